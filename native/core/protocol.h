// Protocol: one rank's side of a world, sans-I/O: a negotiator for each of its process sets, sets that come and go, goodbyes, who is
// dead, and the end. negotiator.h tells how operations are agreed on; here is everything that a rank has to know beside that.
//
// Time and events go in by calls; what follows is done by the Performer: the coordinator (coordinator.h) in a process, and a
// simulated rank in tests/simulation. So the code that runs in thousands of simulated worlds is the code that runs in a job.
#ifndef RINGTRAIN_CORE_PROTOCOL_H_
#define RINGTRAIN_CORE_PROTOCOL_H_

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/options.h"
#include "core/liveness.h"
#include "core/negotiator.h"
#include "transport/world.h"

namespace ringtrain {

// What a rank can do. It may call Protocol::Abort from within any of these, and nothing else of it.
class Performer : public LifeSigns {
 public:
  virtual void Send(int rank, Frame frame) = 0;
  // Runs a batch of data; Protocol::BatchFinished follows.
  virtual void Start(int process_set, const effect::Execute& batch) = 0;
  // Batches of the process set are under way.
  virtual bool Busy(int process_set) const = 0;
  // This rank's pending operation of that name ends: an agreed one without tensors, or with a failure.
  virtual void Finish(int process_set, const effect::Execute& control) = 0;
  virtual void Fail(int process_set, const std::string& name, const Status& status) = 0;
  virtual void AddProcessSet(int process_set, const std::vector<int>& members) = 0;
  virtual void RemoveProcessSet(int process_set) = 0;
  virtual void Warn(const std::string& text) = 0;
  virtual void Count(int process_set, const effect::Count& count) = 0;
  // Others wait for this operation, which this rank has not submitted.
  virtual void ShowStacks(const std::string& awaited) = 0;

  // Shows the ranks of this host that this one lives.
  virtual void Beat() = 0;
  // Writes down for the ranks of this host why the world has ended, unless one has before; returns what is written.
  virtual Status NoteCause(const Status& cause) = 0;
  virtual void Wake(int rank_of_this_host) = 0;
  // The world has ended: everything pending here and later fails with the cause.
  virtual void End(const Status& cause) = 0;
};

class Protocol {
 public:
  Protocol(const World& world, const Options& options, Performer* performer);

  // ---- events ----
  bool Knows(int process_set) const { return negotiators_.count(process_set) > 0; }
  void Submitted(Nanoseconds now, int process_set, const Request& request);
  void Refused(Nanoseconds now, int process_set, Refusal refusal);
  void Arrived(Nanoseconds now, int from, Frame frame);
  void BatchFinished(Nanoseconds now, int process_set);
  // Nobody shall expect this rank for that long.
  void LongPhase(Nanoseconds now, Nanoseconds duration);
  // Beats and listens, if it is time to.
  void LookForTheDead(Nanoseconds now);
  // Sends what has gathered, reports stalls. After every group of events, and at next_timer(). True if anything followed.
  bool Tick(Nanoseconds now);

  bool pending() const;  // something of this rank
  Nanoseconds next_timer() const { return std::min(next_look(), next_stall()); }
  Nanoseconds next_look() const { return aborted_ ? kNever : liveness_.next_look(); }
  Nanoseconds next_stall() const;
  // How long a rank with nothing pending may sleep before it shows the others that it lives.
  Nanoseconds idle_period() const { return liveness_.idle_period(); }
  // Frames of sets that this rank does not know yet.
  size_t early_frames() const { return early_frames_.size(); }

  // ---- the end ----
  // Tells the others that this rank will submit no more; released() once nobody waits for anybody.
  void SayGoodbye(Nanoseconds now);
  bool released() const { return all_goodbye_; }
  // All ranks have said goodbye, and the world has not failed since, so that what is collective may be done.
  bool clean() const { return clean_ && !aborted_; }
  // This rank serves the others no longer: those who wait for it fail, and if it is the lowest nobody need wait for the others either.
  void GiveUpWaiting(Nanoseconds now);
  // Ends the world on all ranks with this cause, unless it has ended already.
  void Abort(const Status& last);
  bool aborted() const { return aborted_; }

 private:
  void Feed(Nanoseconds now, int process_set, const Event& event);
  void Follow(Nanoseconds now, int process_set, Effects* effects);
  void Follow(Nanoseconds now, int process_set, effect::Send& send);
  void Follow(Nanoseconds now, int process_set, effect::Execute& execute);
  void Follow(Nanoseconds now, int process_set, effect::Fail& fail);
  void Follow(Nanoseconds now, int process_set, effect::Warn& warn);
  void Follow(Nanoseconds now, int process_set, effect::Abort& abort);
  void Follow(Nanoseconds now, int process_set, effect::Count& count);
  void RunControl(Nanoseconds now, int process_set, const effect::Execute& control);
  void RunHeldRemovals(Nanoseconds now);
  void AddProcessSet(Nanoseconds now, int process_set, const std::vector<int>& members);
  void RemoveProcessSet(int process_set);
  void HearGoodbye(Nanoseconds now, int rank, bool gone);
  void TellGoodbye(bool gone);
  void TellAllGoodbye(bool clean);
  void SendBeats(bool last);
  std::vector<int> ProcessSets() const;
  int MemberOf(int process_set, int rank) const;
  const std::vector<int>& everyone() const { return negotiators_.at(0).members(); }
  int lowest_rank() const { return everyone()[0]; }

  const World& world_;
  const Options& options_;
  Performer* const performer_;

  Liveness liveness_;
  std::map<int, Negotiator> negotiators_;                          // by process set, those this rank belongs to
  std::map<int, std::vector<std::pair<int, Frame>>> early_frames_;  // by process set, with their senders
  int newest_process_set_ = 0;  // ids ascend, on every rank in the same order
  std::vector<std::pair<int, effect::Execute>> held_removals_;  // process set of the operation, what it does

  std::set<int> goodbyes_;  // the lowest rank's: who has said it
  bool all_goodbye_ = false, clean_ = false, aborted_ = false;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_CORE_PROTOCOL_H_
