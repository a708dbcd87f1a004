// Topology: the members of a process set and which of them share a host, for the data plane. Pure, constant, the same
// on every member but for `me`. A member is named by its position in `members`.
//
// Hosts may be at different sites, which long lines connect. Those of one site follow each other (ring.h).
#ifndef RINGTRAIN_COLLECTIVES_TOPOLOGY_H_
#define RINGTRAIN_COLLECTIVES_TOPOLOGY_H_

#include <algorithm>
#include <map>
#include <string>
#include <vector>

namespace ringtrain {

struct Topology {
  std::vector<int> members;             // global ranks, ascending
  std::vector<std::vector<int>> hosts;  // members of each host; those of a site one behind the other
  std::vector<int> host_of;             // by member
  std::vector<int> local_of;            // by member: place on its host
  int me = 0;
  int rings = 1;                 // rings across hosts: as many as the smallest host has members
  int most_locals = 1;           // members of the largest host
  std::vector<int> sites = {0};  // the first host of each

  int member_count() const { return static_cast<int>(members.size()); }
  int host_count() const { return static_cast<int>(hosts.size()); }
  int site_count() const { return static_cast<int>(sites.size()); }
  int hosts_of_site(int site) const {
    return (site + 1 < site_count() ? sites[static_cast<size_t>(site) + 1] : host_count()) -
           sites[static_cast<size_t>(site)];
  }
  int my_site() const {
    return static_cast<int>(std::upper_bound(sites.begin(), sites.end(), my_host()) - sites.begin()) - 1;
  }
  int my_host() const { return host_of[me]; }
  int my_local() const { return local_of[me]; }
  const std::vector<int>& locals() const { return hosts[my_host()]; }
  int local_count() const { return static_cast<int>(locals().size()); }
};

namespace topology_internal {

// Of hosts, by the lowest member: those of the first one's site, then of the next one that is at another, and so on.
inline std::vector<std::vector<int>> BySite(const std::vector<std::vector<int>>& hosts,
                                            const std::vector<std::string>& site_of_host, std::vector<int>* sites) {
  std::vector<std::string> names;
  for (const std::string& name : site_of_host)
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  std::vector<std::vector<int>> ordered;
  sites->clear();
  for (const std::string& name : names) {
    sites->push_back(static_cast<int>(ordered.size()));
    for (size_t host = 0; host < hosts.size(); ++host)
      if (site_of_host[host] == name) ordered.push_back(hosts[host]);
  }
  return ordered;
}

}  // namespace topology_internal

// host_of_rank, site_of_rank: by global rank; only equality counts. A host is where its lowest member is; no sites:
// all at one.
inline Topology MakeTopology(std::vector<int> members, int my_rank, const std::vector<int>& host_of_rank,
                             const std::vector<std::string>& site_of_rank = {}) {
  Topology topology;
  topology.members = std::move(members);
  std::map<int, size_t> host_index;
  std::vector<std::string> site_of_host;
  for (size_t member = 0; member < topology.members.size(); ++member) {
    const int rank = topology.members[member];
    if (rank == my_rank) topology.me = static_cast<int>(member);
    auto found = host_index.emplace(host_of_rank[rank], topology.hosts.size());
    if (found.second) {
      topology.hosts.emplace_back();
      site_of_host.push_back(site_of_rank.empty() ? "" : site_of_rank[rank]);
    }
    topology.hosts[found.first->second].push_back(static_cast<int>(member));
  }
  topology.hosts = topology_internal::BySite(topology.hosts, site_of_host, &topology.sites);
  topology.host_of.resize(topology.members.size());
  topology.local_of.resize(topology.members.size());
  topology.rings = topology.member_count();
  for (size_t host = 0; host < topology.hosts.size(); ++host) {
    const std::vector<int>& locals = topology.hosts[host];
    for (size_t local = 0; local < locals.size(); ++local) {
      topology.host_of[locals[local]] = static_cast<int>(host);
      topology.local_of[locals[local]] = static_cast<int>(local);
    }
    topology.rings = std::min<int>(topology.rings, static_cast<int>(locals.size()));
    topology.most_locals = std::max<int>(topology.most_locals, static_cast<int>(locals.size()));
  }
  return topology;
}

}  // namespace ringtrain
#endif  // RINGTRAIN_COLLECTIVES_TOPOLOGY_H_
