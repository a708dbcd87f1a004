#include "gpu/plane.h"

namespace ringtrain {

Plane::Plane(const Options& options, Group* group, std::vector<int64_t>, std::shared_ptr<Device> device, const World&, Log*)
    : options_(options), group_(group), device_(std::move(device)) {}

Plane::~Plane() {
  if (device_ == nullptr) return;
  InContext current(*device_);
  copies_ = {};
}

Status Plane::Advance(bool*) { return {}; }

void Plane::Abandon() {}

Status Plane::MakeStreams() {
  if (device_ == nullptr || copies_.to_host != nullptr) return {};
  RT_TRY(Stream::Make(device_, &copies_.to_host));
  return Stream::Make(device_, &copies_.to_device);
}

Status Plane::MakeTask(DeviceBatch batch, std::unique_ptr<DeviceTask>* task) {
  RT_TRY(MakeStreams());
  return Staged::Make(std::move(batch), group_, copies_, static_cast<size_t>(options_.device_chunk_bytes), task);
}

}  // namespace ringtrain
