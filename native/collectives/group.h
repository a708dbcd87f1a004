// Group: the data plane of one process set, as one member sees it: its topology, its window, its wire. Owned by the
// executor.
#ifndef RINGTRAIN_COLLECTIVES_GROUP_H_
#define RINGTRAIN_COLLECTIVES_GROUP_H_

#include <vector>

#include "base/clock.h"
#include "base/counters.h"
#include "collectives/batch.h"
#include "collectives/topology.h"
#include "collectives/window.h"
#include "kernels/handover.h"
#include "transport/host_memory.h"
#include "transport/wire.h"

namespace ringtrain {

struct Group {
  static constexpr int kTags = 64;
  static constexpr int kExchangesApart =
      4;  // alltoalls at the same time: two batches, each of two pieces if it is staged
  static constexpr int kChunksApart = kTags - 1 - kExchangesApart;  // in flight at the same time, at most
  // Process sets at the same time. Each may have another group, across its hosts, whose lane is as much higher.
  static constexpr int kMaxGroups = Wire::kMaxTag / kTags / 2 - 1;
  static constexpr int kPairTag = Wire::kMaxTag - 1;  // of what is between two ranks: no group's

  int process_set = 0;
  int lane =
      0;  // below 2 * kMaxGroups; unlike the id it is used again, and no two process sets have it at the same time
  Topology topology;
  WindowGeometry geometry;
  // Of the world, between hosts: the longest, and the least that rank 0 has; 0 where they are not known.
  Nanoseconds round_trip = 0, least_round_trip = 0;
  Window window;                 // mapped at the first operation
  std::vector<Doorbell*> peers;  // of the other members on this host
  Wire* wire = nullptr;
  Counters* counters = nullptr;
  Handover handover;           // to those who read the window
  std::vector<char> room;      // of the task whose turn it is in the window's sequence
  uint64_t next_chunk = 0;     // of the window's sequence; tasks take theirs in the order in which they are made
  uint64_t next_exchange = 0;  // of the alltoalls

  void RingPeers() const {
    for (Doorbell* doorbell : peers) doorbell->Ring();
  }
  int RankOf(int member) const { return topology.members[member]; }
  // A tag for the messages of a chunk: apart from those of other sets and of chunks in flight at the same time.
  int Tag(uint64_t chunk) const { return lane * kTags + static_cast<int>(chunk % kChunksApart); }
  // For the messages of an alltoall between hosts, which wait for no chunk: those behind it may come far before they
  // are through.
  int ExchangeTag(uint64_t exchange) const {
    return lane * kTags + kChunksApart + static_cast<int>(exchange % kExchangesApart);
  }
  // Of tasks that exchange messages only when all before them in the sequence are done.
  int OrderedTag() const { return lane * kTags + kTags - 1; }
};

// The task that carries a batch out; takes its share of the window's sequence.
std::unique_ptr<Task> MakeTask(Batch batch, Group* group, StageObserver* observer);

}  // namespace ringtrain
#endif  // RINGTRAIN_COLLECTIVES_GROUP_H_
