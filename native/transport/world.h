// World: who the ranks are and which of them share a host. Made once when a context opens, constant afterwards.
#ifndef RINGTRAIN_TRANSPORT_WORLD_H_
#define RINGTRAIN_TRANSPORT_WORLD_H_

#include <cstdint>
#include <string>
#include <vector>

#include "base/clock.h"

namespace ringtrain {

struct World {
  int rank = 0;
  int size = 1;
  uint32_t epoch = 0;                   // the same on all ranks; every frame carries it
  std::vector<std::vector<int>> hosts;  // ranks of each host, ascending; hosts by their lowest rank
  std::vector<int> host_of;             // by rank
  std::vector<int> local_rank_of;       // by rank
  std::vector<std::string> host_names;  // by rank, for people to read
  std::vector<std::string> site_of;     // by rank: what its host was given; "" where it was given none
  Nanoseconds round_trip = 0;           // the longest that any rank has seen when they met; 0: not known
  Nanoseconds least_round_trip = 0;     // between rank 0 and another host; 0: not known

  const std::vector<int>& my_host() const { return hosts[host_of[rank]]; }
  int local_rank() const { return local_rank_of[rank]; }
  int local_size() const { return static_cast<int>(my_host().size()); }
  // Hosts that have a rank with this rank's local rank, and this rank's place among them.
  int cross_size() const;
  int cross_rank() const;
  // The number of this rank's site, in the order of the sites' lowest ranks.
  int site() const;
  bool homogeneous() const;

  // by_rank: the longest that each has seen, which is that to rank 0. Requires the hosts.
  void TakeRoundTrips(const std::vector<Nanoseconds>& by_rank);
};

// Fills hosts, host_of and local_rank_of from each rank's host key; equal keys share a host.
void GroupByHost(const std::vector<std::string>& keys, World* world);

}  // namespace ringtrain
#endif  // RINGTRAIN_TRANSPORT_WORLD_H_
