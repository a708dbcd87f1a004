// One execution of a collective operation in a compiled program of JAX.
#ifndef RINGTRAIN_JAX_COLLECTIVE_H_
#define RINGTRAIN_JAX_COLLECTIVE_H_

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "include/ringtrain.h"
#include "jax/ffi.h"
#include "tables/tables.h"

namespace ringtrain::jax {

// From the call until its future is completed; then it is gone. Nothing here waits: the core calls back from whichever
// thread drives it, possibly before the submission has returned. So a program has as many operations under way as its
// data allow, in whichever order XLA starts them on each rank.
class Execution {
 public:
  // Takes the buffers, submits, and returns; the future that it leaves in the frame is completed at the end. An error
  // is returned where nothing was submitted.
  static Error* Start(CallFrame* frame);

 private:
  explicit Execution(const CallFrame& frame) : api_(*frame.api), outputs_(All(frame.results)) {}
  Execution(const Execution&) = delete;
  Execution& operator=(const Execution&) = delete;

  static std::vector<const Buffer*> All(const Arguments& arguments) {
    const auto* const* buffers = reinterpret_cast<const Buffer* const*>(arguments.buffers);
    return {buffers, buffers + arguments.count};
  }

  bool ReadAttributes(const Attributes& attributes);
  bool TakeInputs(const Arguments& arguments);
  bool TakeInput(const Buffer& input, const Buffer& output);
  bool HasCompletions();
  bool MakeFuture();
  bool Submit();
  void EndPart();
  void Finish();
  void* Allocate(const Buffer& output, int32_t ndim, const int64_t* shape);
  bool Fail(StatusCode code, const std::string& text);
  void FailForMemory();
  Error* NewError() const;
  std::string Subject() const { return std::string(Text(operation())) + " '" + name_ + "'"; }
  Operation operation() const { return static_cast<Operation>(request_.operation); }

  static void* OnAllocate(void* execution, int32_t tensor, int32_t ndim, const int64_t* shape);
  static void OnDone(void* execution, int32_t status, const char* error);

  const Api& api_;
  const std::vector<const Buffer*> outputs_;
  std::string name_;
  int64_t slot_ = 0;
  int32_t keeps_ = 1;  // else the result is zeros on this rank
  rt_request request_{};
  std::vector<rt_tensor> tensors_;  // several, all or nothing, of a grouped operation
  Future* future_ = nullptr;
  rt_handle* handle_ = nullptr;
  std::atomic<int> parts_left_{2};  // the submission returns; the operation ends
  StatusCode code_ = StatusCode::kOk;
  std::string error_;
};

}  // namespace ringtrain::jax
#endif  // RINGTRAIN_JAX_COLLECTIVE_H_
