#include "world/placement.h"

#include <numeric>

namespace ringtrain {

Topology TopologyFor(const World& world, const Options& options, const std::vector<int>& members) {
  std::vector<int> host_of = world.host_of;
  if (options.algorithm == "ring") std::iota(host_of.begin(), host_of.end(), 0);  // every rank is a host of its own
  return MakeTopology(members, world.rank, host_of, world.site_of);
}

WindowGeometry GeometryFor(const Topology& topology, const Options& options, Nanoseconds round_trip) {
  return MakeGeometry(topology, static_cast<size_t>(options.chunk_bytes),
                      static_cast<size_t>(options.shared_memory_bytes), round_trip);
}

}  // namespace ringtrain
