#include "collectives/window.h"

#include <algorithm>

namespace ringtrain {
namespace {

constexpr size_t kAlignment = 4096;
constexpr size_t kPieceWithinHost = 64 << 10;   // of a chunk, for each member: stays in a core's own cache
constexpr size_t kLeastWithinHost = 256 << 10;  // of a chunk: each is a meeting of all members
constexpr size_t kPieceAcrossHosts = 2 << 20;   // of a chunk, for each ring: long messages fill the wire
// Cells of small tensors are rounded up to whole elements; Partition keeps a chunk's blocks below kResultSlack / 8.
constexpr size_t kResultSlack = 4096;

size_t RoundUp(size_t bytes, size_t alignment) { return (bytes + alignment - 1) / alignment * alignment; }

}  // namespace

WindowGeometry MakeGeometry(const Topology& topology, size_t chunk_bytes, size_t most_bytes) {
  bool one_host = topology.host_count() == 1;
  WindowGeometry geometry;
  geometry.chunk_slots = one_host ? 3 : 2;
  geometry.result_slots = one_host ? 4 : 6;
  const size_t rings = static_cast<size_t>(topology.rings);
  const size_t chosen = one_host ? std::max(kLeastWithinHost, kPieceWithinHost * rings) : kPieceAcrossHosts * rings;
  size_t wanted = chunk_bytes > 0 ? chunk_bytes : chosen;
  // Every member's share of a chunk holds at least one element of every type.
  size_t least = RoundUp(64 * static_cast<size_t>(topology.member_count()), kAlignment);
  for (size_t chunk = std::max(RoundUp(wanted, 64), least);; chunk = std::max(RoundUp(chunk * 7 / 8, 64), least)) {
    geometry.chunk_bytes = chunk;
    geometry.result_bytes = RoundUp(chunk / topology.rings + kResultSlack, 64);
    if (chunk == least || geometry.Bytes(topology.most_locals) <= most_bytes) return geometry;
  }
}

}  // namespace ringtrain
