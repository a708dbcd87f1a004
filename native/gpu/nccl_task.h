// NcclTask: a batch on GPUs through NCCL. The host only puts work on streams, whose order events keep:
//
//     packing      wait for the tensors, and for the buffer's last user; pack
//     collective                                                        wait; exchange
//     finishing                                                                       wait; unpack; completion
//
// so that the next batch packs into the other buffer while this one is exchanged. A lone tensor that needs no scaling, and
// operations that only move bytes, go without a buffer; so does what is too large for one, which is scaled in its outputs.
// Once the task is done the GPU is still at work, up to `completion`.
#ifndef RINGTRAIN_GPU_NCCL_TASK_H_
#define RINGTRAIN_GPU_NCCL_TASK_H_

#include <memory>
#include <vector>

#include "collectives/topology.h"
#include "device/pack_kernels.h"
#include "gpu/communicator.h"
#include "gpu/device_batch.h"

namespace ringtrain {

// The order in which batches of a process set are launched, whatever their GPUs: the one in which they are agreed, on every rank.
struct LaunchOrder {
  uint64_t tickets = 0;   // taken
  uint64_t launched = 0;  // of those, are with NCCL
};

// What the tasks of a plane use in turn; owned by the plane.
struct NcclLane {
  static constexpr int kBuffers = 2;
  struct Buffer {
    void* memory = nullptr;
    std::shared_ptr<DeviceEvent> free;  // after which it may be written; nullptr at first
    bool taken = false;                 // by a task that has not recorded `free` yet
  };

  std::shared_ptr<Device> device;
  std::unique_ptr<Stream> packing, collective, finishing;
  std::unique_ptr<PackKernels> kernels;
  std::unique_ptr<Communicator> communicator;  // nullptr with one member
  size_t buffer_bytes = 0;
  Buffer buffers[kBuffers];
  int next_buffer = 0;
  LaunchOrder* order = nullptr;
};

class NcclTask : public DeviceTask {
 public:
  // batch: one that NcclCan. Takes the next ticket of the lane's order.
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
  Status Exchange();
  Status Finish();
  Status CopyAlone();
  Status Reduce(const void* from, void* to, size_t elements, DType dtype);
  Status ReduceTensors();
  Status BroadcastTensors();
  Status GatherTensors();
  Status ScatterTensors();
  Status ExchangeRows();
  Status Check(ncclResult_t result, const char* what) const;
  std::vector<PackedTensor> Packed(bool outputs) const;
  size_t ElementsOf(const BatchTensor& tensor) const { return tensor.bytes / Bytes(work_.batch.dtype); }

  const DeviceBatch work_;
  const Topology& topology_;
  NcclLane* const lane_;
  const uint64_t ticket_;
  const bool packs_;
  float input_factor_ = 1.0f, output_factor_ = 1.0f;
  NcclLane::Buffer* buffer_ = nullptr;
  Phase phase_ = Phase::kPack;
  std::shared_ptr<DeviceEvent> completion_;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_GPU_NCCL_TASK_H_
