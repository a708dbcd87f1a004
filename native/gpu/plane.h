// Plane: how the tensors of one process set on one choice of GPUs, one for each member, travel.
#ifndef RINGTRAIN_GPU_PLANE_H_
#define RINGTRAIN_GPU_PLANE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "base/log.h"
#include "base/options.h"
#include "collectives/group.h"
#include "gpu/staged.h"
#include "transport/world.h"

namespace ringtrain {

class Plane {
 public:
  // devices: by member; device: this member's, nullptr on a rank that has joined.
  Plane(const Options& options, Group* group, std::vector<int64_t> devices, std::shared_ptr<Device> device, const World& world, Log* log);
  ~Plane();

  // Whether tasks can be made; Advance brings it about.
  bool ready() const { return true; }
  Status Advance(bool* moved);
  // The world has failed: lets go of what the GPU waits for.
  void Abandon();

  // The task that carries a batch out; takes its share of the group's sequence. The device's context must be current.
  Status MakeTask(DeviceBatch batch, std::unique_ptr<DeviceTask>* task);

 private:
  Status MakeStreams();

  const Options& options_;
  Group* const group_;
  const std::shared_ptr<Device> device_;
  CopyStreams copies_;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_GPU_PLANE_H_
