// Topology: the members of a process set and which of them share a host, for the data plane. Pure, constant, the same
// on every member but for `me`. A member is named by its position in `members`.
#ifndef RINGTRAIN_COLLECTIVES_TOPOLOGY_H_
#define RINGTRAIN_COLLECTIVES_TOPOLOGY_H_

#include <algorithm>
#include <map>
#include <vector>

namespace ringtrain {

struct Topology {
  std::vector<int> members;             // global ranks, ascending
  std::vector<std::vector<int>> hosts;  // members of each host
  std::vector<int> host_of;             // by member
  std::vector<int> local_of;            // by member: place on its host
  int me = 0;
  int rings = 1;        // rings across hosts: as many as the smallest host has members
  int most_locals = 1;  // members of the largest host

  int member_count() const { return static_cast<int>(members.size()); }
  int host_count() const { return static_cast<int>(hosts.size()); }
  int my_host() const { return host_of[me]; }
  int my_local() const { return local_of[me]; }
  const std::vector<int>& locals() const { return hosts[my_host()]; }
  int local_count() const { return static_cast<int>(locals().size()); }
};

// host_of_rank: by global rank; only equality counts.
inline Topology MakeTopology(std::vector<int> members, int my_rank, const std::vector<int>& host_of_rank) {
  Topology topology;
  topology.members = std::move(members);
  std::map<int, int> host_index;
  for (size_t member = 0; member < topology.members.size(); ++member) {
    int rank = topology.members[member];
    if (rank == my_rank) topology.me = static_cast<int>(member);
    auto found = host_index.emplace(host_of_rank[rank], static_cast<int>(topology.hosts.size()));
    if (found.second) topology.hosts.emplace_back();
    std::vector<int>& host = topology.hosts[found.first->second];
    topology.host_of.push_back(found.first->second);
    topology.local_of.push_back(static_cast<int>(host.size()));
    host.push_back(static_cast<int>(member));
  }
  topology.rings = topology.member_count();
  for (const std::vector<int>& host : topology.hosts) {
    topology.rings = std::min<int>(topology.rings, static_cast<int>(host.size()));
    topology.most_locals = std::max<int>(topology.most_locals, static_cast<int>(host.size()));
  }
  return topology;
}

}  // namespace ringtrain
#endif  // RINGTRAIN_COLLECTIVES_TOPOLOGY_H_
