// Staged: a batch on GPUs by way of the host. Each piece of it goes to pinned memory, through the host's own task, and
// back:
//
//     piece 0    to host | exchange | to device
//     piece 1              to host  | exchange  | to device
//     piece 2                         to host   | exchange  | to device
//
// so that both directions of the bus and the exchange overlap. The sums are the host's, bit by bit. It needs nothing
// but the driver, works with any number of ranks on a GPU, and with ranks that have joined. When it is done, the GPU
// is, too.
#ifndef RINGTRAIN_GPU_STAGED_H_
#define RINGTRAIN_GPU_STAGED_H_

#include <memory>
#include <vector>

#include "collectives/group.h"
#include "gpu/device_batch.h"
#include "gpu/staging_plan.h"

namespace ringtrain {

// The streams of a plane on which pieces are copied.
struct CopyStreams {
  std::unique_ptr<Stream> to_host, to_device;
};

class Staged : public DeviceTask {
 public:
  // Takes its share of the window's sequence. The device's context must be current, here and in Advance; the streams
  // outlive it.
  static Status Make(DeviceBatch batch, Group* group, const CopyStreams& streams, size_t chunk_bytes,
                     std::unique_ptr<DeviceTask>* task);

  Status Advance(bool* moved) override;
  bool done() const override { return returned_ == pieces_.size(); }
  std::shared_ptr<DeviceEvent> completion() const override { return nullptr; }

 private:
  Staged(DeviceBatch batch, Group* group, const CopyStreams& streams)
      : work_(std::move(batch)), group_(group), streams_(streams) {}
  Status TakeMemory();
  Batch HostBatch(const StagedPiece& piece, char* slot) const;
  bool on_device() const { return work_.device != nullptr; }
  bool sends() const;
  char* SlotOf(size_t piece) const { return slots_.empty() ? nullptr : slots_[piece % slots_.size()]->get(); }

  Status FetchNext(bool* moved);
  Status Exchange(bool* moved);
  Status SendBack(size_t piece);
  Status Release(bool* moved);

  const DeviceBatch work_;
  Group* const group_;
  const CopyStreams& streams_;
  std::vector<StagedPiece> pieces_;
  std::vector<std::unique_ptr<Task>> tasks_;  // by piece
  std::vector<std::unique_ptr<Pinned>> slots_;
  std::vector<std::shared_ptr<DeviceEvent>> here_, back_;  // by piece: its copies to the host, and to the device
  // Pieces that have begun their way to the host, that are exchanged, and that are back on the device.
  size_t fetched_ = 0, exchanged_ = 0, returned_ = 0;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_GPU_STAGED_H_
