// SimulatedRank: one process of a simulated world. Its negotiators are the real ones; around them stands what coordinator.cc and
// submission.cc do around them in a process: mail and submissions are taken step by step, control operations are done at once,
// process sets come and go, the end is said goodbye to. Its program is the rank's part of the plan.
#ifndef RINGTRAIN_TESTS_SIMULATION_RANK_H_
#define RINGTRAIN_TESTS_SIMULATION_RANK_H_

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "judge.h"
#include "random.h"

namespace ringtrain {
namespace simulation {

// What a rank needs from the world around it.
class Surroundings {
 public:
  virtual ~Surroundings() = default;
  virtual Nanoseconds now() const = 0;
  virtual void Send(int from, int to, std::string bytes) = 0;
  virtual void CallStep(int rank, Nanoseconds delay) = 0;
  virtual void CallProgram(int rank, Nanoseconds delay) = 0;
  // The rank begins the `index`-th batch of data of a set; EndBatch is called once all members have and some time has passed.
  virtual void BeginBatch(int rank, int set, size_t index, const std::vector<int>& members) = 0;
  // True once all ranks have come to this fence with nothing in flight.
  virtual bool PassesFence(int rank, int fence) = 0;
};

class SimulatedRank {
 public:
  SimulatedRank(const Plan& plan, int rank, Judge* judge, Surroundings* surroundings);

  void Receive(int from, std::string bytes);
  void EndBatch(int set);
  // One step of the driver, and one of the user's program.
  void Step();
  void RunProgram();
  void Abort();

  Nanoseconds next_timer() const;
  bool closed() const { return closed_; }
  bool ended() const { return closed_ || aborted_; }
  // What it is at, for a report of a deadlock.
  std::string Whereabouts() const;

 private:
  struct Action {
    enum Kind { kAct, kWaitForAll, kFence, kLeave } kind;
    const Turn* turn = nullptr;
    int fence = 0;
  };
  struct Set {
    std::unique_ptr<Negotiator> negotiator;  // none where this rank is no member
    std::vector<int> members;
    size_t batches = 0;
    std::deque<effect::Execute> running;
  };

  void MakeProgram();
  bool Perform(const Action& action);
  bool Act(const Turn& turn);
  bool MaySubmit(int set, const Turn& turn) const;
  Nanoseconds ProgramDelay();

  Nanoseconds clock() const { return surroundings_->now() + clock_offset_; }
  bool Feed(int set, const Event& event);
  void Tick();
  void TakeNews();
  void Take(const Turn& turn);
  void Dispatch(int from, const std::string& bytes);
  void On(int set, effect::Send& send);
  void On(int set, effect::Execute& execute);
  void On(int set, effect::Fail& fail);
  void On(int set, effect::Warn& warn);
  void On(int set, effect::Abort& abort);
  void On(int set, effect::Count& count);
  void RunControl(int set, const effect::Execute& execute);
  void AddSet(int id, const std::vector<int>& members);
  int MemberOf(int set, int rank) const;
  // The real id of a planned set, -1 while this rank does not know it.
  int IdOf(int planned) const;
  Request RequestOf(const Turn& turn) const;

  void SayGoodbye(bool gone);
  void HearGoodbye(int from, bool gone);
  void TellAll(bool clean);
  void TryToClose();
  bool busy() const;

  const Plan& plan_;
  const int rank_;
  Judge* const judge_;
  Surroundings* const surroundings_;
  Random random_;
  const Nanoseconds clock_offset_;

  std::deque<Action> program_;
  const Turn* blocks_ = nullptr;        // the turn that the program waits for, as join() does
  Nanoseconds fence_passed_ = 0;
  Nanoseconds due_ = kNever;            // of the action that is delayed

  std::vector<const Turn*> news_;       // submitted or refused since the last step
  std::deque<std::pair<int, std::string>> mail_;
  std::map<int, Set> sets_;             // by id
  int newest_set_ = 0;                  // id
  std::map<int, int> ids_;              // planned set -> id
  std::map<int, std::vector<std::pair<int, Frame>>> early_frames_;
  std::deque<int> ended_batches_;       // sets
  std::vector<std::pair<int, effect::Execute>> held_removals_;  // of sets with a batch under way

  bool leaving_ = false, all_goodbye_ = false, clean_ = false, closed_ = false, aborted_ = false;
  Nanoseconds close_by_ = kNever;
  std::map<int, bool> goodbyes_;        // the lowest rank's: who has said it
};

}  // namespace simulation
}  // namespace ringtrain
#endif  // RINGTRAIN_TESTS_SIMULATION_RANK_H_
