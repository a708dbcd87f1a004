// SimulatedRank: one process of a simulated world. Its protocol is the real one; this does what the protocol decides,
// as rank_loop.cc and submission.cc do in a process: mail and submissions are taken step by step, batches are run,
// signs of life are given and seen. Its program is the rank's part of the plan.
#ifndef RINGTRAIN_TESTS_SIMULATION_RANK_H_
#define RINGTRAIN_TESTS_SIMULATION_RANK_H_

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "judge.h"
#include "random.h"
#include "world/protocol.h"

namespace ringtrain {
namespace simulation {

// A rank's place in its host's memory.
struct Life {
  bool begun = false, left = false, ended = false;
  uint64_t beats = 0;

  void Leave() { left = ended = true; }  // its process has nothing else to do
};

// What a rank needs from the world around it.
class Surroundings {
 public:
  virtual ~Surroundings() = default;
  virtual Nanoseconds now() const = 0;
  virtual const World& world() const = 0;
  virtual void Send(int from, int to, const Frame& frame) = 0;
  // Memory of hosts: what its ranks show each other, and why the world has ended for them (empty while it has not).
  virtual Life& life(int rank) = 0;
  virtual std::string& notice(int rank) = 0;
  virtual PromiseSign& promise(int rank, int set) = 0;
  virtual void Ring(int rank) = 0;
  virtual void CallStep(int rank, Nanoseconds delay) = 0;
  virtual void CallProgram(int rank, Nanoseconds delay) = 0;
  // The rank's program has been told that an operation failed.
  virtual void FailureTold(int rank) = 0;
  // The rank begins the `index`-th batch of data of a set; EndBatch is called once all members have and some time has
  // passed.
  virtual void BeginBatch(int rank, int set, size_t index, const std::vector<int>& members) = 0;
  // True once all ranks have come to this fence with nothing in flight.
  virtual bool PassesFence(int rank, int fence) = 0;
};

class SimulatedRank {
 public:
  SimulatedRank(const Plan& plan, int rank, Judge* judge, Surroundings* surroundings);

  void Receive(int from, std::string bytes);
  // Its wire tells it of a lost peer.
  void LosePeer(int rank, const std::string& cause);
  void EndBatch(int set);
  // One step of the driver, and one of the user's program.
  void Step();
  void RunProgram();
  // Its driver is called, if it is not asleep because nothing is pending here.
  void Ring();
  // An exception in its program, unless that has come to its end. True if so.
  bool Raise();

  Nanoseconds next_timer() const;
  bool closed() const { return closed_; }
  bool ended() const { return closed_ || aborted_; }
  // What it is at, for a report of a deadlock.
  std::string Whereabouts() const;

 private:
  struct Action {
    enum Kind { kAct, kWaitForAll, kFence, kLinger, kLeave } kind;
    const Turn* turn = nullptr;
    int fence = 0;
  };
  struct Set {
    std::vector<int> members;
    size_t batches = 0;
    std::deque<effect::Execute> running;
    AheadOf ahead;
  };

  void MakeProgram();
  bool Perform(const Action& action);
  bool Act(const Turn& turn);
  bool MaySubmit(int set, const Turn& turn) const;
  bool HasPassed(Nanoseconds time);
  void Announce(Nanoseconds long_phase);
  Nanoseconds ProgramDelay();

  Nanoseconds clock() const { return surroundings_->now() + clock_offset_; }
  bool HasWork() const {
    return protocol_.awaits_last_words() || leaving_ || !news_.empty() || busy() || protocol_.pending();
  }
  bool busy() const;
  void HeedAbort();
  void PassOnLongPhase();
  void TakeNews();
  void Take(const Turn& turn);
  void TakeMail();
  void LookAtPromises();
  std::vector<PromiseSign> SignsOf(int set, const std::vector<int>& ranks) const;
  void TakeLostPeers();
  void EndBatches();
  void TryToClose();

  // ---- what the protocol decides, as RankLoop::CarryOut ----
  void CarryOut();
  void CarryOut(rank_effect::Send& send);
  void CarryOut(rank_effect::Start& start);
  void CarryOut(rank_effect::Promise& promise);
  void CarryOut(rank_effect::Finish& finish);
  void CarryOut(rank_effect::Fail& fail);
  void CarryOut(rank_effect::AddProcessSet& added);
  void CarryOut(rank_effect::RemoveProcessSet& removed) { removals_.push_back(removed.process_set); }
  void CarryOut(rank_effect::Warn& warn) { judge_->Warned(rank_, warn.text); }
  void CarryOut(rank_effect::Count& count) { judge_->Counted(rank_, count.process_set, count.count); }
  void CarryOut(rank_effect::ShowStacks&) {}  // of Python: there is none
  void CarryOut(rank_effect::Beat&) { ++surroundings_->life(rank_).beats; }
  void CarryOut(rank_effect::NoteCause& note);
  void CarryOut(rank_effect::Wake& wake) { surroundings_->Ring(wake.rank); }
  void CarryOut(rank_effect::End& end);
  bool Tick();
  void RemoveProcessSets();
  void LookForTheDead();
  SignsOfLife Signs() const;

  // The real id of a planned set, -1 while this rank does not know it.
  int IdOf(int planned) const;
  Request RequestOf(const Turn& turn) const;

  const Plan& plan_;
  const int rank_;
  Judge* const judge_;
  Surroundings* const surroundings_;
  Random random_;
  const Nanoseconds clock_offset_;

  std::deque<Action> program_;
  const Turn* blocks_ = nullptr;  // the turn that the program waits for, as join() does
  Nanoseconds fence_passed_ = 0;
  Nanoseconds due_ = kNever;  // of the action that is delayed

  std::vector<const Turn*> news_;  // submitted or refused since the last step
  std::deque<std::pair<int, std::string>> mail_;
  std::map<int, std::vector<PromiseSign>> seen_;  // by set: what its ranks of this host had promised at the last look
  std::vector<std::pair<int, std::vector<PromiseSign>>> seen_changed_;
  std::deque<std::pair<int, std::string>> lost_;  // peers, with causes
  std::map<int, uint64_t> arrivals_;              // frames, by sender
  std::map<int, Set> sets_;                       // by id
  std::map<int, int> ids_;                        // planned set -> id
  std::deque<int> ended_batches_;                 // sets
  std::string raised_;                            // by its program
  Nanoseconds long_phase_ = -1;                   // announced, and not passed on yet
  Nanoseconds last_step_ = 0;

  bool leaving_ = false, closed_ = false, aborted_ = false;
  Nanoseconds close_by_ = kNever;
  Protocol protocol_;
  RankEffects effects_;        // decided and not carried out yet
  RankEffects carried_out_;    // at the moment
  std::vector<int> removals_;  // sets that go as soon as none of their batches is under way
};

}  // namespace simulation
}  // namespace ringtrain
#endif  // RINGTRAIN_TESTS_SIMULATION_RANK_H_
