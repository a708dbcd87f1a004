// Communicator: NCCL's ranks of one plane. Nonblocking, so that it can be aborted: a call may answer that it is in
// progress, and has then done nothing yet; the next one waits until Poll says so. The driver's thread, with the
// device's context current.
#ifndef RINGTRAIN_GPU_COMMUNICATOR_H_
#define RINGTRAIN_GPU_COMMUNICATOR_H_

#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "device/nccl.h"

namespace ringtrain {

// Memory of NCCL's on the current device, for as long as it lives: communicators that know it go first.
class NcclMemory {
 public:
  static Status Allocate(const Nccl& nccl, size_t bytes, std::unique_ptr<NcclMemory>* memory);
  ~NcclMemory() { nccl_.MemFree(memory_); }
  NcclMemory(const NcclMemory&) = delete;
  NcclMemory& operator=(const NcclMemory&) = delete;

  char* get() const { return static_cast<char*>(memory_); }
  size_t bytes() const { return bytes_; }

 private:
  NcclMemory(const Nccl& nccl, void* memory, size_t bytes) : nccl_(nccl), memory_(memory), bytes_(bytes) {}

  const Nccl& nccl_;
  void* const memory_;
  const size_t bytes_;
};

class Communicator {
 public:
  // Begins to open it; it is open at the first Poll that finds it idle. most_ctas: of the GPU's blocks, 0 for NCCL's
  // choice.
  static Status Begin(const Nccl& nccl, int ranks, const std::string& unique_id, int rank, int most_ctas,
                      std::unique_ptr<Communicator>* communicator);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  const Nccl& nccl() const { return nccl_; }
  ncclComm_t get() const { return comm_; }
  // Whether nothing is in progress. Not ok if anything that was asked for has failed, also on the GPU since.
  Status Poll(bool* idle) const;
  // Another one of the same ranks, while nothing is in progress. Every rank asks for it.
  static Status BeginSplit(const Communicator& parent, int rank, std::unique_ptr<Communicator>* communicator);
  // Makes memory known to NCCL, so that it need not copy out of it. Every rank asks alike, while nothing is in
  // progress. First as a window, at the same offset on all ranks, for which NCCL has its fastest ways; whether it has
  // made one is known when nothing is in progress.
  bool CanRegister() const { return nccl_.MemAlloc != nullptr && nccl_.CommRegister != nullptr; }
  Status BeginWindow(const NcclMemory& memory);
  bool has_window() const { return window_ != nullptr; }
  Status Register(const NcclMemory& memory);
  // Ends what is under way of these on the GPU, all at once: to end one takes memory back, for which the device may
  // wait for the others' kernels, and those for ranks that are no more. nullptr: none.
  static void Abort(const std::vector<Communicator*>& communicators);

 private:
  explicit Communicator(const Nccl& nccl) : nccl_(nccl) {}
  void Abort();
  static void AbortInGroup(const std::vector<Communicator*>& communicators);
  static void AbortInThreads(const std::vector<Communicator*>& communicators);

  const Nccl& nccl_;
  ncclComm_t comm_ = nullptr;
  void* window_ = nullptr;
};

// A new communicator's id.
Status MakeUniqueId(const Nccl& nccl, std::string* unique_id);

}  // namespace ringtrain
#endif  // RINGTRAIN_GPU_COMMUNICATOR_H_
