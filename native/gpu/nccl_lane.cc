#include "gpu/nccl_lane.h"

namespace ringtrain {

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
}

}  // namespace ringtrain
