// Communicator: NCCL's ranks of one plane. Nonblocking, so that it can be aborted: a call may answer that it is in progress, and has
// then done nothing yet; the next one waits until Poll says so. The driver's thread, with the device's context current.
#ifndef RINGTRAIN_GPU_COMMUNICATOR_H_
#define RINGTRAIN_GPU_COMMUNICATOR_H_

#include <memory>
#include <string>

#include "base/status.h"
#include "device/nccl.h"

namespace ringtrain {

class Communicator {
 public:
  // Begins to open it; it is open at the first Poll that finds it idle. most_ctas: of the GPU's blocks, 0 for NCCL's choice.
  static Status Begin(const Nccl& nccl, int ranks, const std::string& unique_id, int rank, int most_ctas,
                      std::unique_ptr<Communicator>* communicator);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  const Nccl& nccl() const { return nccl_; }
  ncclComm_t get() const { return comm_; }
  // Whether nothing is in progress. Not ok if anything that was asked for has failed, also on the GPU since.
  Status Poll(bool* idle) const;
  // Memory that NCCL knows, so that it need not copy out of it; freed with the communicator. Every member asks alike, while nothing is in
  // progress, and once.
  bool CanRegister() const { return nccl_.MemAlloc != nullptr && nccl_.CommRegister != nullptr; }
  Status AllocateRegistered(size_t bytes, void** memory);
  // Ends what is under way on the GPU.
  void Abort();

 private:
  explicit Communicator(const Nccl& nccl) : nccl_(nccl) {}

  const Nccl& nccl_;
  ncclComm_t comm_ = nullptr;
  void* registered_ = nullptr;  // of ncclMemAlloc
};

// A new communicator's id.
Status MakeUniqueId(const Nccl& nccl, std::string* unique_id);

}  // namespace ringtrain
#endif  // RINGTRAIN_GPU_COMMUNICATOR_H_
