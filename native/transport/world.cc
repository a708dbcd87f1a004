#include "transport/world.h"

#include <algorithm>
#include <map>
#include <set>

namespace ringtrain {

int World::cross_size() const {
  return static_cast<int>(std::count_if(hosts.begin(), hosts.end(), [this](const std::vector<int>& ranks) {
    return static_cast<int>(ranks.size()) > local_rank();
  }));
}

int World::cross_rank() const {
  return static_cast<int>(
      std::count_if(hosts.begin(), hosts.begin() + host_of[rank],
                    [this](const std::vector<int>& ranks) { return static_cast<int>(ranks.size()) > local_rank(); }));
}

int World::site() const {
  std::set<std::string> before;
  for (size_t other = 0; other < site_of.size() && site_of[other] != site_of[rank]; ++other)
    before.insert(site_of[other]);
  return static_cast<int>(before.size());
}

bool World::homogeneous() const {
  return std::all_of(hosts.begin(), hosts.end(),
                     [this](const std::vector<int>& ranks) { return ranks.size() == hosts[0].size(); });
}

void World::TakeRoundTrips(const std::vector<Nanoseconds>& by_rank) {
  round_trip = *std::max_element(by_rank.begin(), by_rank.end());
  least_round_trip = hosts.size() > 1 ? round_trip : 0;
  for (size_t other = 0; other < by_rank.size(); ++other)
    if (host_of[other] != host_of[0]) least_round_trip = std::min(least_round_trip, by_rank[other]);
}

void GroupByHost(const std::vector<std::string>& keys, World* world) {
  std::map<std::string, int> host_of_key;
  world->hosts.clear();
  world->host_of.clear();
  world->local_rank_of.clear();
  for (size_t rank = 0; rank < keys.size(); ++rank) {
    auto found = host_of_key.emplace(keys[rank], static_cast<int>(world->hosts.size()));
    if (found.second) world->hosts.emplace_back();
    std::vector<int>& ranks = world->hosts[found.first->second];
    world->host_of.push_back(found.first->second);
    world->local_rank_of.push_back(static_cast<int>(ranks.size()));
    ranks.push_back(static_cast<int>(rank));
  }
}

}  // namespace ringtrain
