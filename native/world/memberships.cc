#include "world/memberships.h"

#include <algorithm>
#include <utility>

namespace ringtrain {

Negotiator& Memberships::Add(int process_set, NegotiatorOptions options) {
  Negotiator& negotiator = negotiators_.emplace(process_set, std::move(options)).first->second;
  for (int member : negotiator.members_here()) watched_[process_set].push_back(RankOf(process_set, member));
  return negotiator;
}

void Memberships::Remove(int process_set) {
  negotiators_.erase(process_set);
  watched_.erase(process_set);
}

Negotiator* Memberships::Find(int process_set) {
  auto found = negotiators_.find(process_set);
  return found == negotiators_.end() ? nullptr : &found->second;
}

std::vector<int> Memberships::ids() const {
  std::vector<int> process_sets;
  for (const auto& entry : negotiators_) process_sets.push_back(entry.first);
  return process_sets;
}

int Memberships::MemberOf(int process_set, int rank) const {
  const std::vector<int>& ranks = Ranks(process_set);
  return static_cast<int>(std::lower_bound(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

bool Memberships::HasMember(int process_set, int rank) const {
  const std::vector<int>& ranks = Ranks(process_set);
  return std::binary_search(ranks.begin(), ranks.end(), rank);
}

bool Memberships::pending() const {
  return std::any_of(negotiators_.begin(), negotiators_.end(),
                     [](const auto& entry) { return entry.second.pending(); });
}

Nanoseconds Memberships::next_timer() const {
  Nanoseconds next = kNever;
  for (const auto& entry : negotiators_) next = std::min(next, entry.second.next_timer());
  return next;
}

std::set<int> Memberships::Concerned() const {
  std::set<int> concerned;
  for (const auto& entry : negotiators_) {
    const std::vector<int>& ranks = entry.second.members();
    concerned.insert(ranks[0]);
    if (ranks[0] == world_.rank) concerned.insert(ranks.begin(), ranks.end());
  }
  return concerned;
}

bool Memberships::DecidesFor(int rank) const {
  return std::any_of(negotiators_.begin(), negotiators_.end(), [&](const auto& entry) {
    return entry.second.members()[0] == world_.rank && HasMember(entry.first, rank);
  });
}

bool Memberships::AwaitsVerdict(const std::set<int>& silent) const {
  return std::any_of(negotiators_.begin(), negotiators_.end(), [&](const auto& entry) {
    const int coordinator = entry.second.members()[0];
    return entry.second.pending() && coordinator != world_.rank && silent.count(coordinator) == 0;
  });
}

}  // namespace ringtrain
