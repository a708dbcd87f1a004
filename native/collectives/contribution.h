// Contribution: what a host with one member sends to the others of a batch that goes to them as it is (ring.h), before
// the batch begins.
#ifndef RINGTRAIN_COLLECTIVES_CONTRIBUTION_H_
#define RINGTRAIN_COLLECTIVES_CONTRIBUTION_H_

#include <string>

#include "collectives/group.h"

namespace ringtrain {

// The bytes that RingPass would send of all chunks. Requires an allreduce whose codec keeps nothing, to which all
// members contribute by the same factor, and that this member is alone on its host.
std::string ContributionOf(const Batch& batch, const Group& group);

}  // namespace ringtrain
#endif  // RINGTRAIN_COLLECTIVES_CONTRIBUTION_H_
