// NcclOpening: opens a lane, a step at a time: communicators, memory, kernels, and the memory made known to NCCL.
// Nothing waits: the next step is taken once no communicator has anything in progress. Every member takes the same
// steps. The plane drives it, with the device's context current.
#ifndef RINGTRAIN_GPU_NCCL_OPENING_H_
#define RINGTRAIN_GPU_NCCL_OPENING_H_

#include <functional>
#include <string>
#include <vector>

#include "gpu/nccl_lane.h"

namespace ringtrain {

class NcclOpening {
 public:
  // communicators: how many, of the lane's ranks; none where that is one.
  NcclOpening(NcclLane* lane, int communicators);

  // The kernels, before any rank can have launched one of NCCL's: loading waits for what is on the GPU.
  Status OpenKernels();
  // They and the first communicator.
  Status Begin(const Nccl& nccl, const std::string& unique_id, int most_ctas);
  // The next step, if it can be taken; *open after the last.
  Status Advance(bool* open);

 private:
  Status Split(size_t channel);
  Status OpenMemory();
  Status MakeWindow(size_t channel);
  Status Register(size_t channel);

  NcclLane* const lane_;
  const int members_, me_;
  std::vector<std::function<Status()>> steps_;  // in this order
  size_t taken_ = 0;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_GPU_NCCL_OPENING_H_
