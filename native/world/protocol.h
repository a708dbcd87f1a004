// Protocol: one rank's side of a world, sans-I/O: a negotiator for each of its process sets, sets that come and go,
// goodbyes, who is dead, and the end. negotiator.h tells how operations are agreed on; here is everything that a rank
// has to know beside that.
//
// Time and events go in by calls, which append what follows to *effects. RankLoop (run/rank_loop.h) carries the
// effects out in a process, a simulated rank in tests/simulation. So the code that runs in thousands of simulated
// worlds is the code that runs in a job.
#ifndef RINGTRAIN_WORLD_PROTOCOL_H_
#define RINGTRAIN_WORLD_PROTOCOL_H_

#include <algorithm>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/clock.h"
#include "base/options.h"
#include "transport/promise_slot.h"
#include "transport/world.h"
#include "world/liveness.h"
#include "world/memberships.h"

namespace ringtrain {

// What a rank is to do. To be carried out in this order, one after the other.
namespace rank_effect {
struct Send {
  int rank;
  Frame frame;
  std::vector<PromisedBatch> ahead = {};  // whose contributions of this rank go with it
};
struct Start {  // a batch of data; Protocol::BatchFinished follows. Not once the world has ended
  int process_set;
  effect::Execute batch;
};
struct Promise {  // write it into the memory of this host, then tell Protocol::Seen what all that it watches have there
  int process_set;
  PromiseSign sign;
};
struct Finish {  // this rank's pending operation without tensors ends well
  int process_set;
  effect::Execute control;
};
struct Fail {  // this rank's pending operation of that name ends with this status
  int process_set;
  std::string name;
  Status status;
  std::vector<int> missing;  // ranks for which it has waited until it was given up
};
struct AddProcessSet {
  int process_set;
  std::vector<int> members;
};
struct RemoveProcessSet {  // once none of its batches is under way; Protocol::ProcessSetRemoved follows
  int process_set;
};
struct Warn {
  std::string text;
};
struct Count {
  int process_set;
  effect::Count count;
};
struct ShowStacks {  // others wait for this operation, which this rank has not submitted
  std::string awaited;
};
struct Beat {};     // show the ranks of this host that this one lives
struct NoteCause {  // write down for the ranks of this host why the world has ended, unless one has before;
  Status cause;     // Protocol::CauseNoted follows with what is written
};
struct Wake {
  int rank;  // of this host
};
struct End {  // everything pending here and later fails with the cause
  Status cause;
};
}  // namespace rank_effect
using RankEffect = std::variant<rank_effect::Send, rank_effect::Start, rank_effect::Promise, rank_effect::Finish,
                                rank_effect::Fail, rank_effect::AddProcessSet, rank_effect::RemoveProcessSet,
                                rank_effect::Warn, rank_effect::Count, rank_effect::ShowStacks, rank_effect::Beat,
                                rank_effect::NoteCause, rank_effect::Wake, rank_effect::End>;
using RankEffects = std::vector<RankEffect>;

class Protocol {
 public:
  // fanout: as of Promises.
  Protocol(const World& world, const Options& options, int fanout = Promises::kFanout);

  // ---- events ----
  // The first: the world itself is a process set.
  void Begin(Nanoseconds now, RankEffects* effects);
  bool Knows(int process_set) const { return memberships_.Has(process_set); }
  void Submitted(Nanoseconds now, int process_set, const Request& request, RankEffects* effects);
  void Refused(Nanoseconds now, int process_set, Refusal refusal, RankEffects* effects);
  void Arrived(Nanoseconds now, int from, Frame frame, RankEffects* effects);
  void BatchFinished(Nanoseconds now, int process_set, RankEffects* effects);
  // What the ranks that it watches have in the memory of this host, in their order.
  void Seen(Nanoseconds now, int process_set, std::vector<PromiseSign> signs, RankEffects* effects);
  // Calls what(process_set, ranks) for each set that runs by a schedule, with its ranks of this host.
  template <typename What>
  void ForEachWatched(What what) const {
    memberships_.ForEachWatched(what);
  }
  void ProcessSetRemoved(Nanoseconds now, int process_set, RankEffects* effects);
  // The wire has lost its connection with a rank.
  void ConnectionLost(const LostPeer& lost, RankEffects* effects);
  // Nobody shall expect this rank for that long.
  void LongPhase(Nanoseconds now, Nanoseconds duration, RankEffects* effects);
  // At next_look(): beats, and judges the others.
  void Look(Nanoseconds now, const SignsOfLife& seen, RankEffects* effects);
  // As Liveness has them.
  void AwaitStateFrom(int first) { liveness_.AwaitStateFrom(first); }
  std::vector<int> Silent(Nanoseconds now) const { return liveness_.Silent(now); }
  std::vector<int> Unheard(Nanoseconds now) const { return liveness_.Unheard(now); }
  bool IsMissed(Nanoseconds unseen) const { return liveness_.IsMissed(unseen); }
  // Sends what has gathered, reports stalls. After every group of events, and at next_timer(). True if anything
  // followed.
  bool Tick(Nanoseconds now, RankEffects* effects);

  bool pending() const { return memberships_.pending(); }  // something of this rank
  Nanoseconds next_timer() const { return aborted_ ? next_end() : std::min(next_look(), next_stall()); }
  Nanoseconds next_look() const { return aborted_ ? looks_again_ : liveness_.next_look(); }
  Nanoseconds next_stall() const { return memberships_.next_timer(); }
  // How long a rank with nothing pending may sleep before it shows the others that it lives.
  Nanoseconds idle_period() const { return liveness_.idle_period(); }
  // Frames of sets that this rank does not know yet.
  size_t early_frames() const { return early_frames_.size(); }

  // ---- the end ----
  // Tells the others that this rank will submit no more; released() once nobody waits for anybody.
  void SayGoodbye(Nanoseconds now, RankEffects* effects);
  bool released() const { return all_goodbye_; }
  // All ranks have said goodbye, and the world has not failed since, so that what is collective may be done.
  bool clean() const { return clean_ && !aborted_; }
  // This rank serves the others no longer: those who wait for it fail, and if it is the lowest nobody need wait for the
  // others either.
  void GiveUpWaiting(Nanoseconds now, RankEffects* effects);
  // How the world ends where this rank leaves what is under way.
  Status LeavesUnderWay() const;
  // Ends the world on all ranks with this cause, unless it has ended already, and this rank's part of it at once.
  void Abort(const Status& last, RankEffects* effects);
  // The same, but the cause came from elsewhere. It is passed on at once. What a coordinator has decided before may
  // still be on its way to this rank, and comes first: until all of that has come, for kLastWords at most, what is
  // pending here waits, and nothing begins.
  void HearEnd(const Status& last, RankEffects* effects);
  // The cause that all ranks of this host shall tell: the first one that was written down.
  void CauseNoted(const Status& cause, RankEffects* effects);
  // All mail that there is has been taken: whoever waits for coordinators' last words looks whether he still has to.
  void MailTaken(Nanoseconds now, RankEffects* effects);
  bool aborted() const { return aborted_; }
  bool awaits_last_words() const { return !held_cause_.ok(); }

 private:
  void Feed(Nanoseconds now, int process_set, const Event& event, RankEffects* effects);
  void ArrivedIn(Nanoseconds now, int process_set, int from, Frame frame, RankEffects* effects);
  bool Fits(int process_set, int from, const Frame& frame, RankEffects* effects);
  // Turns what follows for a negotiator into what follows for this rank.
  void Follow(Nanoseconds now, int process_set, Effects* from, RankEffects* effects);
  void Follow(Nanoseconds now, int process_set, effect::Send& send, RankEffects* effects);
  void Follow(Nanoseconds now, int process_set, effect::Execute& execute, RankEffects* effects);
  void Follow(Nanoseconds now, int process_set, effect::Promise& promise, RankEffects* effects);
  void Follow(Nanoseconds now, int process_set, effect::Ring& ring, RankEffects* effects);
  void Follow(Nanoseconds now, int process_set, effect::Fail& fail, RankEffects* effects);
  void Follow(Nanoseconds now, int process_set, effect::Warn& warn, RankEffects* effects);
  void Follow(Nanoseconds now, int process_set, effect::Abort& abort, RankEffects* effects);
  void Follow(Nanoseconds now, int process_set, effect::Count& count, RankEffects* effects);
  void RunControl(Nanoseconds now, int process_set, effect::Execute control, RankEffects* effects);
  void RunAdditions(Nanoseconds now, RankEffects* effects);
  void FinishControl(Nanoseconds now, int process_set, effect::Execute control, RankEffects* effects);
  void AddProcessSet(Nanoseconds now, int process_set, const std::vector<int>& members, RankEffects* effects);
  void HearGoodbye(Nanoseconds now, int rank, bool gone, RankEffects* effects);
  void TellGoodbye(bool gone, RankEffects* effects);
  void TellAllGoodbye(bool clean, RankEffects* effects);
  void SendBeats(bool last, RankEffects* effects);
  std::set<int> ToldOfEnd() const;
  Nanoseconds next_end() const { return awaits_last_words() ? std::min(end_by_, looks_again_) : kNever; }
  void End(RankEffects* effects);
  const std::vector<int>& everyone() const { return memberships_.Ranks(0); }
  int lowest_rank() const { return everyone()[0]; }

  const World& world_;
  const Options& options_;
  const int fanout_;

  Liveness liveness_;
  Memberships memberships_;
  int live_sets_ = 0;                                               // of all ranks
  std::map<int, std::vector<std::pair<int, Frame>>> early_frames_;  // by process set, with their senders
  int newest_process_set_ = 0;                                      // ids ascend, on every rank in the same order
  struct Control {
    int process_set;  // of the operation
    effect::Execute execute;
  };
  std::map<int, Control> removals_;  // by process set that goes: until it is gone here
  std::deque<Control> additions_;    // those that wait for them

  int batches_under_way_ = 0;  // of all process sets
  std::set<int> goodbyes_;     // the lowest rank's: who has said it
  std::set<int> left_;         // who no longer serves the others, of those that have told this rank so
  bool all_goodbye_ = false, clean_ = false, aborted_ = false;

  // While it waits for last words:
  static constexpr Nanoseconds kLastWords = 250 * INT64_C(1000000);
  std::set<int> silent_;              // ranks of which nothing comes any more that is not in the mail
  bool hears_ = false;                // the cause came from elsewhere
  Status held_cause_;                 // of the end that waits
  Nanoseconds end_by_ = 0;            // 0: it has just begun to wait
  Nanoseconds looks_again_ = kNever;  // who of this host has died
};

}  // namespace ringtrain
#endif  // RINGTRAIN_WORLD_PROTOCOL_H_
