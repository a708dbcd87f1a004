// Cuts: which members of a world do not hear which, and who of them goes so that all that are left hear each other.
//
// A rank that was not heard for the whole bound of silence is a cut; one that was not for a moment is a doubt, which
// counts only beside cuts. Where there are two sides the larger one stays, or that of the lowest rank.
#ifndef RINGTRAIN_ELASTIC_CUTS_H_
#define RINGTRAIN_ELASTIC_CUTS_H_

#include <map>
#include <optional>
#include <set>
#include <utility>

#include "elastic/roster.h"

namespace ringtrain {

class Cuts {
 public:
  bool empty() const { return cuts_.empty(); }
  void Add(const Uid& one, const Uid& other) { cuts_.insert({one, other}); }
  void Doubt(const Uid& one, const Uid& other) { doubts_.insert({one, other}); }
  void ForgetDoubts() { doubts_.clear(); }
  void BelieveDoubts() { cuts_.merge(doubts_); }
  // To be doubted, should a world not be connected with them.
  void DoubtThoseBesideTheStopped(const Roster& roster);
  // Of the members whom some do not hear the one that most do not; none if all that live hear each other.
  std::optional<Uid> MostUnheard(const Roster& roster) const;
  void Settled() { cuts_.clear(); }

 private:
  std::map<Uid, size_t> Unheard(const Roster& roster) const;
  std::set<Uid> Stopped(const Roster& roster) const;

  std::set<std::pair<Uid, Uid>> cuts_;    // who does not hear whom
  std::set<std::pair<Uid, Uid>> doubts_;  // who did not hear whom for a while
};

}  // namespace ringtrain
#endif  // RINGTRAIN_ELASTIC_CUTS_H_
