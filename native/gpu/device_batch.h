// DeviceBatch: a batch with tensors on GPUs, and DeviceTask: such a batch under way. Built by the executor, carried out
// by a plane.
#ifndef RINGTRAIN_GPU_DEVICE_BATCH_H_
#define RINGTRAIN_GPU_DEVICE_BATCH_H_

#include <memory>
#include <vector>

#include "collectives/batch.h"
#include "device/device.h"

namespace ringtrain {

struct DeviceBatch {
  Batch batch;                     // addresses on the device; on a rank that has joined nullptr, or memory of the host
  std::shared_ptr<Device> device;  // nullptr on a rank that has joined
  std::vector<std::shared_ptr<DeviceEvent>> ready;  // after which the tensors may be read and written
};

// done() once the host has nothing left to do for it.
class DeviceTask : public Task {
 public:
  // When the GPU has nothing left to do either; nullptr: it has not, once the task is done.
  virtual std::shared_ptr<DeviceEvent> completion() const = 0;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_GPU_DEVICE_BATCH_H_
