// What one rank sees of the others' lives: frames that have come from other hosts, and what the memory of this one
// tells.
#ifndef RINGTRAIN_RUN_SIGNS_H_
#define RINGTRAIN_RUN_SIGNS_H_

#include "transport/host_memory.h"
#include "transport/wire.h"
#include "transport/world.h"
#include "world/liveness.h"

namespace ringtrain {

SignsOfLife SignsNow(const World& world, const Wire& wire, HostMemory* memory);

}  // namespace ringtrain
#endif  // RINGTRAIN_RUN_SIGNS_H_
