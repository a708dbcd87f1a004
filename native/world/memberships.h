// Memberships: the process sets that one rank belongs to, and its negotiator in each; sans-I/O.
#ifndef RINGTRAIN_WORLD_MEMBERSHIPS_H_
#define RINGTRAIN_WORLD_MEMBERSHIPS_H_

#include <map>
#include <set>
#include <vector>

#include "agree/negotiator.h"
#include "base/clock.h"
#include "transport/world.h"

namespace ringtrain {

class Memberships {
 public:
  explicit Memberships(const World& world) : world_(world) {}

  Negotiator& Add(int process_set, NegotiatorOptions options);
  void Remove(int process_set);
  bool Has(int process_set) const { return negotiators_.count(process_set) > 0; }
  // Null if this rank does not belong to it.
  Negotiator* Find(int process_set);
  std::vector<int> ids() const;

  // Ranks of a set, ascending. A member is a place among them.
  const std::vector<int>& Ranks(int process_set) const { return negotiators_.at(process_set).members(); }
  int RankOf(int process_set, int member) const { return Ranks(process_set)[static_cast<size_t>(member)]; }
  int MemberOf(int process_set, int rank) const;
  bool HasMember(int process_set, int rank) const;

  bool pending() const;  // something of this rank
  Nanoseconds next_timer() const;
  // Calls what(process_set, ranks) for each set that runs by a schedule, with its ranks of this host.
  template <typename What>
  void ForEachWatched(What what) const {
    for (const auto& [process_set, watched] : watched_)
      if (negotiators_.at(process_set).watches()) what(process_set, watched);
  }

  // ---- coordinators, which are the lowest of a set ----
  // Who decides for this rank, and all for whom it decides.
  std::set<int> Concerned() const;
  // Something of that rank waits for this one's verdicts.
  bool DecidesFor(int rank) const;
  // Something here waits for the verdict of a rank that may have sent it: of one that is not silent.
  bool AwaitsVerdict(const std::set<int>& silent) const;

 private:
  const World& world_;
  std::map<int, Negotiator> negotiators_;    // by process set
  std::map<int, std::vector<int>> watched_;  // by process set: its ranks of this host
};

}  // namespace ringtrain
#endif  // RINGTRAIN_WORLD_MEMBERSHIPS_H_
