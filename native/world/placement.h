// Placement: how a process set's members lie on hosts, and how large their window on each is.
#ifndef RINGTRAIN_WORLD_PLACEMENT_H_
#define RINGTRAIN_WORLD_PLACEMENT_H_

#include <vector>

#include "base/options.h"
#include "collectives/topology.h"
#include "collectives/window.h"
#include "transport/world.h"

namespace ringtrain {

// As the options want them: the same on every member.
Topology TopologyFor(const World& world, const Options& options, const std::vector<int>& members);
WindowGeometry GeometryFor(const Topology& topology, const Options& options, Nanoseconds round_trip = 0);

}  // namespace ringtrain
#endif  // RINGTRAIN_WORLD_PLACEMENT_H_
