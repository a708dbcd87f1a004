// One collective operation of a graph as a kernel, and one execution of it. operations.cc registers these with
// TensorFlow.
#ifndef RINGTRAIN_TENSORFLOW_COLLECTIVE_H_
#define RINGTRAIN_TENSORFLOW_COLLECTIVE_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "include/ringtrain.h"
#include "tables/tables.h"
#include "tensorflow/kernel_api.h"

namespace ringtrain::tensorflow {

// A node of a graph, or an eager operation: what its attributes say. Shared by all its executions.
struct Collective {
  Operation operation;
  std::string name;           // empty: numbered when it is submitted
  bool by_iteration = false;  // the graph may run iterations of a loop side by side, each needs a name of its own
  int64_t slot = 0;
  bool on_gpu = false;   // its tensors are in the memory of TensorFlow's GPU device
  rt_request request{};  // its process set, and what tables/attributes.def lists
};

// From submission until TensorFlow's done callback has run; then it is gone. Nothing here waits: the core calls back
// from whichever thread drives it, possibly before the submission has returned.
class Execution {
 public:
  // Takes the inputs, submits, and returns; everything that goes wrong ends in the done callback too.
  static void Start(const Collective& collective, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done);

 private:
  using DoneCallback = std::function<void()>;

  Execution(const Collective& collective, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done);
  Execution(const Execution&) = delete;
  Execution& operator=(const Execution&) = delete;

  // Results have their inputs' shapes, so that TensorFlow may give us the inputs' memory for them.
  bool same_shape() const { return Find(collective_.operation)->output == Output::kSame; }
  std::string Name() const;
  std::string Subject(const std::string& name) const;

  bool TakeInputs();
  bool TakeInput(int index);
  bool TakeSplits(int index);
  bool ProvideOutput(int index);
  int32_t Submit();
  void PlaceOnGpu();
  void EndPart();
  void Finish();
  bool SetReceivedSplits();
  bool SetResult();
  void* Allocate(int32_t index, TF_DataType dtype, int32_t ndim, const int64_t* shape);
  void Fail(int32_t status, const char* error);
  void FailForMemory();
  bool Check(const StatusPointer& status);

  static void* OnAllocate(void* execution, int32_t tensor, int32_t ndim, const int64_t* shape);
  static void OnDone(void* execution, int32_t status, const char* error);

  const Collective& collective_;  // TensorFlow keeps the kernel until the done callback has run
  TF_OpKernelContext* const context_;
  DoneCallback done_;
  std::vector<TensorPointer> held_;  // inputs that the core reads, outputs that it writes
  std::vector<TF_DataType> dtypes_;  // of the tensors
  std::vector<std::vector<int64_t>> shapes_;
  std::vector<rt_tensor> tensors_;
  std::vector<int64_t> splits_;
  std::string refusal_;  // why this rank cannot submit them, which its peers hear, too
  rt_handle* handle_ = nullptr;
  std::atomic<int> parts_left_{2};  // the submission returns; the operation ends
  TF_Code code_ = TF_OK;
  std::string error_;
};

}  // namespace ringtrain::tensorflow
#endif  // RINGTRAIN_TENSORFLOW_COLLECTIVE_H_
