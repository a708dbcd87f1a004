#include "gpu/nccl_lane.h"

#include <time.h>

#include "base/clock.h"

namespace ringtrain {

namespace {

// For what is on a stream when its communicator is aborted, and ends with it. A GPU that hangs does not.
constexpr double kSecondsToLeave = 1.0;

void AwaitEnd(const std::shared_ptr<Device>& device, const Stream& stream, Nanoseconds deadline) {
  std::shared_ptr<DeviceEvent> end;
  if (!DeviceEvent::Record(device, stream.get(), &end).ok()) return;
  for (bool passed = false; end->Passed(&passed).ok() && !passed && Now() < deadline;) {
    const timespec pause = {0, 100000};
    nanosleep(&pause, nullptr);
  }
}

}  // namespace

void AwaitEnds(const std::shared_ptr<Device>& device, const std::vector<const Stream*>& streams) {
  const Nanoseconds deadline = DeadlineAfter(kSecondsToLeave);
  for (const Stream* stream : streams)
    if (stream != nullptr) AwaitEnd(device, *stream, deadline);
}

std::vector<const Stream*> NcclLane::Streams() const {
  std::vector<const Stream*> streams = {packing.get()};
  for (const Channel& channel : channels) streams.push_back(channel.collective.get());
  streams.push_back(finishing.get());
  return streams;
}

Status NcclLane::Poll(bool* idle) const {
  *idle = true;
  for (const Channel& channel : channels) {
    bool idle_here = true;
    if (channel.communicator != nullptr) RT_TRY(channel.communicator->Poll(&idle_here));
    *idle = *idle && idle_here;
  }
  return {};
}

void NcclLane::Abort() {
  for (const Channel& channel : channels)
    if (channel.communicator != nullptr) channel.communicator->Abort();
  AwaitEnds(device, Streams());
}

}  // namespace ringtrain
