// Authority: numbers the worlds of an elastic job, sans-I/O. There is one, in the launcher, and no rank asks it
// anything on the path of a step: worlds that run need it only to become other worlds.
//
//   gathering → forming(e) → running(e) → stopping(e) → forming(e') → …       waiting: too few for a world
//   resuming: a launcher that was started again finds out which world there is
//
// Running. A death that an agent attests, or the loss of an agent's connection, stops the world at once; silence that
// ranks suspect stops it, too. Processes that have come anew, and ranks that
// leave on notice, are only reason to stop between two steps; to the slot of one that leaves nobody comes.
// Stopping. Every rank of the world reports, and says whom it did not hear lately. Who does not in time is evicted. If
// some cannot hear each other, the larger side stays, or that of the lowest rank; a host that loses all its ranks so
// gets none before its network has been checked. Only those who have been members of a
// world that ran have a voice: the voters. Forming. The next count is written down before anybody hears of it, and
// granted once. Who is new is only admitted where all voters are between two steps, and is named behind them. When all
// have formed, the world goes; if any fails before that, it is stopped and another count is granted.
//
// Why nothing is lost: a world releases nothing without all of its members (elastic/step.h), so any voter of the newest
// granted world that stands still keeps that world from going on, and knows enough to settle the open window in the
// next one. Hence the one rule: the next world's voters are voters of the newest granted one. An evicted rank never
// votes again.
//
// Where an engine of the user's starts processes and starts them again, there are no agents: hosts begin to be known
// with their first process (ProcessCame), each process speaks for itself, and nobody acts on a Start.
//
// Driven by (a) the launcher's thread: bytes that come from the agent of a host are decoded (control.h) and handed to
// Arrived; connections that open and break to HostCame and HostLost; time to Tick at next_timer(). Actions are carried
// out in their order. Write must be on the disk before what follows it: the record that comes last is what a launcher
// that is started again hands to Resume. Random numbers are handed in, so the same events give the same actions.
#ifndef RINGTRAIN_ELASTIC_AUTHORITY_H_
#define RINGTRAIN_ELASTIC_AUTHORITY_H_

#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/clock.h"
#include "elastic/control.h"
#include "elastic/cuts.h"
#include "elastic/hosts.h"
#include "elastic/roster.h"

namespace ringtrain {

struct AuthorityOptions {
  std::map<std::string, int> hosts;        // by name: its slots; none where an engine of the user's starts processes
  int minimum = 1;                         // ranks that a world must have
  int reset_limit = 0;                     // worlds after the first; 0: any number
  Nanoseconds silence = 0;                 // D: of an agent, that counts as its loss
  Nanoseconds grace = 0;                   // without a launcher: then agents and ranks end themselves
  Nanoseconds wait = 0;                    // below the minimum, or for those that do not come; then the job ends
  Nanoseconds first_pause = 0;             // of a slot after a failure; doubles from one to the next
  Nanoseconds longest_pause = 0;           // which it does not exceed
  Nanoseconds joiners_patience = kSecond;  // of a world that forms, with ranks that join it; doubles
  std::function<uint64_t()> random;        // numbers that nobody can guess
};

namespace authority_action {
struct Write {
  std::string record;
};
struct Send {  // to the agent of that host; if frame.process.uid is not zero, on to that rank, else to all of its ranks
  std::string host;
  ControlFrame frame;
};
struct Start {  // a rank in that slot, unless there is one
  std::string host;
  int slot;
};
struct LetGo {  // the agent of that host, and have the host come again (HostAdded) once the others' networks reach it
  std::string host;
};
struct Say {  // to whoever reads the launcher's output
  std::string text;
};
struct End {
  bool well;
  std::string text;
};
}  // namespace authority_action
using AuthorityAction = std::variant<authority_action::Write, authority_action::Send, authority_action::Start,
                                     authority_action::LetGo, authority_action::Say, authority_action::End>;
using AuthorityActions = std::vector<AuthorityAction>;

class Authority {
 public:
  enum class Phase { kResuming, kGathering, kForming, kRunning, kStopping, kWaiting, kEnded };

  explicit Authority(AuthorityOptions options);

  // ---- events; the first is one of these two ----
  void Begin(Nanoseconds now);
  // record: the last one written, or empty.
  void Resume(Nanoseconds now, const std::string& record);

  void HostCame(Nanoseconds now, const std::string& host, AuthorityActions* actions);
  void HostLost(Nanoseconds now, const std::string& host, const std::string& cause, AuthorityActions* actions);
  // A host that may have ranks from now on, once HostCame says so; also one that has left, when all of it is gone.
  void HostAdded(const std::string& host, int slots);
  // All its ranks leave on notice, because of this.
  void HostLeaves(Nanoseconds now, const std::string& host, const std::string& cause, AuthorityActions* actions);
  // A process that an engine of the user's has started is connected: it has this slot until it has gone, is asked who
  // it is, and may come again.
  void ProcessCame(Nanoseconds now, const Process& process, AuthorityActions* actions);
  // The end of its connection tells of its end. A host without any is none.
  void ProcessGone(Nanoseconds now, const Process& process, const std::string& cause, AuthorityActions* actions);
  void Arrived(Nanoseconds now, const std::string& host, const ControlFrame& frame, AuthorityActions* actions);
  void Tick(Nanoseconds now, AuthorityActions* actions);
  Nanoseconds next_timer() const;

  Phase phase() const { return phase_; }
  const EpochId& epoch() const { return epoch_; }

 private:
  // What comes in.
  void Ready(Nanoseconds now, const ControlFrame& frame, AuthorityActions* actions);
  void Admit(Nanoseconds now, const Uid& uid, bool lost, AuthorityActions* actions);
  void Dead(Nanoseconds now, const ControlFrame& frame, AuthorityActions* actions);
  void Suspect(Nanoseconds now, const ControlFrame& frame, AuthorityActions* actions);
  void Refuse(Nanoseconds now, const ControlFrame& frame, AuthorityActions* actions);
  void EvictMissing(Nanoseconds now, const ControlFrame& frame, AuthorityActions* actions);
  void Report(Nanoseconds now, const ControlFrame& frame);
  void Leave(const ControlFrame& frame, AuthorityActions* actions);
  void Present(const std::string& host, const ControlFrame& frame);
  void Hear(Nanoseconds now, const std::string& host, AuthorityActions* actions);
  void SkipStandstill(Nanoseconds now);
  void LoseSilentHosts(Nanoseconds now, AuthorityActions* actions);
  void Lose(Nanoseconds now, const Uid& uid, AuthorityActions* actions);

  // What follows.
  void Decide(Nanoseconds now, AuthorityActions* actions);
  void EndResuming(Nanoseconds now, AuthorityActions* actions);
  bool MayRunUnheard() const;
  void SayUnheard(Nanoseconds left, AuthorityActions* actions);
  void AskForAPause(AuthorityActions* actions);
  void Stop(Nanoseconds now, AuthorityActions* actions);
  void EvictTheLate(Nanoseconds now, AuthorityActions* actions);
  void BelieveDoubts();
  void KeepTheLargerSide(Nanoseconds now, AuthorityActions* actions);
  void LetGo(Nanoseconds now, const std::string& host, AuthorityActions* actions);
  void GiveUpJoiners(Nanoseconds now, AuthorityActions* actions);
  void LeaveOutLateJoiners(Nanoseconds now, AuthorityActions* actions);
  void EvictWhoDoNotEnd(Nanoseconds now, AuthorityActions* actions);
  void EvictWhoDoNotAnswer(Nanoseconds now, AuthorityActions* actions);
  void FormNext(Nanoseconds now, AuthorityActions* actions);
  void Wait(Nanoseconds now, AuthorityActions* actions);
  void EndIfShortForTooLong(Nanoseconds now, AuthorityActions* actions);
  void Grant(const Uids& voters, const Uids& newcomers, Nanoseconds now, AuthorityActions* actions);
  void Go(Nanoseconds now, AuthorityActions* actions);
  void StartRanks(Nanoseconds now, AuthorityActions* actions);
  void DismissTheUnneeded(AuthorityActions* actions);
  void EndIfAllHaveGone(AuthorityActions* actions);
  void End(bool well, std::string text, AuthorityActions* actions);

  bool WantsAPause() const;
  Nanoseconds JoinersPatience() const;
  bool SomebodyIsHeard(Nanoseconds now) const;
  bool StillStarting(Nanoseconds now) const;
  bool GiveUpTheStart(AuthorityActions* actions);
  void Evict(Nanoseconds now, const Uid& uid, const std::string& cause, AuthorityActions* actions);
  void Dismiss(Roster::Rank* rank, AuthorityActions* actions);
  void Tell(const Process& to, ControlFrame frame, AuthorityActions* actions) const;
  void TellHost(const std::string& host, ControlType type, AuthorityActions* actions) const;

  const AuthorityOptions options_;
  Hosts hosts_;
  Roster roster_;
  Cuts cuts_;
  Phase phase_ = Phase::kGathering;
  EpochId epoch_;         // the newest granted
  bool begun_ = false;    // some world has run, so that there is state to lose
  bool ending_ = false;   // some program has come to its end
  bool pausing_ = false;  // the world was asked to stop at a release
  bool said_unheard_ = false;
  bool unconnected_ =
      false;  // the world that forms, or formed last: a member cannot connect, and does not know with whom
  std::string program_;
  std::map<std::pair<std::string, int>, int> failures_;  // by host and slot, since somebody has held state
  std::set<Uid> noticed_;   // processes that are to leave, and have not said yet that they are there
  std::set<Uid> finished_;  // members that came to their end before they had answered the next launcher
  Nanoseconds since_ = 0;   // when the phase began
  Nanoseconds awake_ = 0;   // when it was last told of anything; a timer is, each second
  Nanoseconds next_beat_ = 0;
  Nanoseconds short_since_ = kNever;  // when ranks were first too few since a world ran
  int resets_ = 0;                    // worlds that ran after the first
};

}  // namespace ringtrain
#endif  // RINGTRAIN_ELASTIC_AUTHORITY_H_
