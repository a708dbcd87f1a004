#include "collectives/window.h"

#include <algorithm>

namespace ringtrain {
namespace {

constexpr size_t kAlignment = 4096;
constexpr size_t kPieceWithinHost = 64 << 10;   // of a chunk, for each member: stays in a core's own cache
constexpr size_t kLeastWithinHost = 256 << 10;  // of a chunk: each is a meeting of all members
constexpr size_t kPieceAcrossHosts = 2 << 20;   // of a chunk, for each ring: likewise
// Of a chunk, for each host, where each has one member and meets nobody: what has come is added while it is in the
// core's cache. Half of it travels as one message. Between far hosts as much is under way as a long line holds:
// elsewhere looking at so much would only cost time.
constexpr size_t kPieceOfAHost = 128 << 10;
constexpr size_t kUnderWay = 12 << 20;
constexpr int kMostSlots = 48, kSlotsAcrossHosts = 6, kSlotsWithinHost = 4;
// Cells of small tensors are rounded up to whole elements; Partition keeps a chunk's blocks below kResultSlack / 8.
constexpr size_t kResultSlack = 4096;

size_t ChosenBytes(const Topology& topology) {
  const auto rings = static_cast<size_t>(topology.rings), hosts = static_cast<size_t>(topology.host_count());
  if (hosts == 1) return std::max(kLeastWithinHost, kPieceWithinHost * rings);
  if (topology.most_locals == 1) return std::min(kPieceAcrossHosts, kPieceOfAHost * hosts);
  return kPieceAcrossHosts * rings;
}

// Of results that a ring's leader has under way.
int Slots(const Topology& topology, Nanoseconds round_trip, size_t chunk_bytes) {
  if (topology.host_count() == 1) return kSlotsWithinHost;
  if (topology.most_locals > 1 || round_trip < kFarHosts) return kSlotsAcrossHosts;
  return std::clamp(static_cast<int>(kUnderWay / chunk_bytes), kSlotsAcrossHosts, kMostSlots);
}

size_t RoundUp(size_t bytes, size_t alignment) { return (bytes + alignment - 1) / alignment * alignment; }

}  // namespace

WindowGeometry MakeGeometry(const Topology& topology, size_t chunk_bytes, size_t most_bytes, Nanoseconds round_trip) {
  WindowGeometry geometry;
  geometry.chunk_slots = topology.host_count() == 1 ? 3 : 2;
  const size_t wanted = chunk_bytes > 0 ? chunk_bytes : ChosenBytes(topology);
  // Every member's share of a chunk holds at least one element of every type.
  size_t least = RoundUp(64 * static_cast<size_t>(topology.member_count()), kAlignment);
  for (size_t chunk = std::max(RoundUp(wanted, 64), least);; chunk = std::max(RoundUp(chunk * 7 / 8, 64), least)) {
    geometry.chunk_bytes = chunk;
    geometry.result_slots = Slots(topology, round_trip, chunk);
    geometry.result_bytes = RoundUp(chunk / topology.rings + kResultSlack, 64);
    if (chunk == least || geometry.Bytes(topology.most_locals) <= most_bytes) return geometry;
  }
}

}  // namespace ringtrain
