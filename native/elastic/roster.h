// Roster: who there is in an elastic job: the members of the newest granted world, and the processes that have said
// Ready and live, as far as is known. The authority writes down what it hears and decides; here are the questions that
// it decides by.
#ifndef RINGTRAIN_ELASTIC_ROSTER_H_
#define RINGTRAIN_ELASTIC_ROSTER_H_

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "elastic/control.h"

namespace ringtrain {

class Roster {
 public:
  struct Rank {
    Process process;
    bool holds_state = false, leaves = false, finished = false;
    bool reported = false, formed = false, suspected = false;
    int left_out = 0;              // how often it has not formed in time with a world that it was to join
    Nanoseconds asked = kNever;    // when it was asked whether it lives, and has not answered since
    Nanoseconds refused = kNever;  // when others have refused it, which it knows: it is to end
    std::string program;
    EpochId runs;        // when a launcher that was started again found it
    bool admits = true;  // somebody new, as it has reported
  };
  using Ranks = std::map<Uid, Rank>;

  // ---- processes ----
  Rank& Add(const Uid& uid) { return ranks_[uid]; }
  void Remove(const Uid& uid) { ranks_.erase(uid); }
  bool has(const Uid& uid) const { return ranks_.count(uid) > 0; }
  Rank* Find(const Uid& uid);  // nullptr if it is not there
  const Rank* Find(const Uid& uid) const;
  Rank& at(const Uid& uid) { return ranks_.at(uid); }
  const Rank& at(const Uid& uid) const { return ranks_.at(uid); }
  Ranks& ranks() { return ranks_; }
  const Ranks& ranks() const { return ranks_; }
  Uids On(const std::string& host) const;
  bool AreBeside(const Uid& one, const Uid& other) const;  // on one host
  bool IsTaken(const std::string& host, int slot) const;
  // Those that were asked, or refused, so long ago, and are still there.
  Uids NotAnswered(Nanoseconds now, Nanoseconds bound) const;
  Uids NotEnded(Nanoseconds now, Nanoseconds bound) const;
  // Nothing was heard for a while because nobody listened.
  void Skip(Nanoseconds missed);

  // ---- the newest granted world ----
  const std::vector<Member>& world() const { return world_; }
  void SetWorld(std::vector<Member> members) { world_ = std::move(members); }
  void LeaveOut(const Uids& members);
  bool InWorld(const Uid& uid) const;
  bool IsLiving(const Uid& uid) const;
  Uids Living() const;         // members that have not finished
  Uids Voters() const;         // of those, who hold state
  bool AnyOfTheFirst() const;  // whether a member is left that has not joined others
  bool AnyAwaited() const;     // whether one has not reported
  // Processes that may join the next one, in the order of hosts and slots.
  Uids Newcomers() const;
  bool AllLeave(const Uids& uids) const;
  bool AnyLeaves() const;

 private:
  Ranks ranks_;
  std::vector<Member> world_;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_ELASTIC_ROSTER_H_
