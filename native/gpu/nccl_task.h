// NcclTask: a batch on GPUs through NCCL. The host only puts work on streams, whose order events keep:
//
//     packing      wait for the tensors, and for the buffer's last user; pack
//     collective                                                        wait; the plan's steps
//     finishing                                                                                wait; unpack; completion
//
// so that the next batch packs into another buffer while this one is exchanged. A lone tensor that needs no scaling,
// and operations that only move bytes, go without a buffer; so does what is too large for one, which is scaled in its
// outputs. Once the task is done the GPU is still at work, up to `completion`.
#ifndef RINGTRAIN_GPU_NCCL_TASK_H_
#define RINGTRAIN_GPU_NCCL_TASK_H_

#include <memory>
#include <vector>

#include "collectives/topology.h"
#include "gpu/choice.h"
#include "gpu/device_batch.h"
#include "gpu/nccl_lane.h"
#include "gpu/nccl_plan.h"

namespace ringtrain {

class NcclTask : public DeviceTask {
 public:
  // batch: one that NcclCan. Takes the next ticket of the lane's order, and the next of its channels.
  NcclTask(DeviceBatch batch, const Topology& topology, NcclLane* lane);

  Status Advance(bool* moved) override;
  bool done() const override { return phase_ == Phase::kDone; }
  std::shared_ptr<DeviceEvent> completion() const override { return completion_; }

 private:
  enum class Phase { kPack, kLaunch, kLaunching, kDone };

  Status Pack(bool* moved);
  Status ScaleIntoOutputs();
  Status ScaleOutputs();
  Status Launch(bool* moved);
  NcclPlan Plan() const;
  Status Perform(const NcclStep& step);
  Status Cross(const Crossing& crossing);
  Status Call(const NcclCall& call) const;
  Status Finish();
  Status CopyAlone();
  Status Idle(bool* idle) const;
  Status Check(ncclResult_t result, const char* what) const;
  std::vector<PackedTensor> Packed(bool outputs) const;
  size_t BufferedElements() const;
  size_t ElementsOf(const BatchTensor& tensor) const { return tensor.bytes / Bytes(work_.batch.dtype); }

  const DeviceBatch work_;
  const Topology& topology_;
  NcclLane* const lane_;
  const NcclLane::Channel& channel_;
  const uint64_t ticket_;
  const Schedule schedule_;
  const bool packs_;
  float input_factor_ = 1.0f, output_factor_ = 1.0f;
  NcclLane::Buffer* buffer_ = nullptr;
  NcclPlan plan_;
  size_t performed_ = 0;                  // steps of the plan
  std::unique_ptr<DeviceTask> crossing_;  // under way, of the last of these
  Phase phase_ = Phase::kPack;
  std::shared_ptr<DeviceEvent> completion_;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_GPU_NCCL_TASK_H_
