#include "gpu/nccl_lane.h"

#include <time.h>

#include "base/clock.h"

namespace ringtrain {

namespace {

// For what is on a stream when its communicator is aborted, and ends with it. A GPU that hangs does not.
constexpr double kSecondsToLeave = 1.0;

// A device that cannot be asked does nothing any more.
bool AwaitEnd(const std::shared_ptr<Device>& device, const Stream& stream, Nanoseconds deadline) {
  std::shared_ptr<DeviceEvent> end;
  if (!DeviceEvent::Record(device, stream.get(), &end).ok()) return true;
  for (bool passed = false; end->Passed(&passed).ok() && !passed;) {
    if (Now() >= deadline) return false;
    const timespec pause = {0, 100000};
    nanosleep(&pause, nullptr);
  }
  return true;
}

}  // namespace

bool AwaitEnds(const std::shared_ptr<Device>& device, const std::vector<const Stream*>& streams) {
  const Nanoseconds deadline = DeadlineAfter(kSecondsToLeave);
  bool ended = true;
  for (const Stream* stream : streams) ended = (stream == nullptr || AwaitEnd(device, *stream, deadline)) && ended;
  return ended;
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

void NcclLane::AddCommunicators(std::vector<Communicator*>* all) const {
  for (const Channel& channel : channels) all->push_back(channel.communicator.get());
}

bool NcclLane::Abort() {
  std::vector<Communicator*> communicators;
  AddCommunicators(&communicators);
  Communicator::Abort(communicators);
  return AwaitEnds(device, Streams());
}

}  // namespace ringtrain
