// Judge: the invariants of an elastic job (E1 to E15), asked at every event. It keeps a record of its own of what every
// rank has contributed, held and released; nothing of it comes from the code that is judged.
#ifndef RINGTRAIN_TESTS_SIMULATION_ELASTIC_JUDGE_H_
#define RINGTRAIN_TESTS_SIMULATION_ELASTIC_JUDGE_H_

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "elastic/step.h"
#include "plan.h"

namespace ringtrain {
namespace elastic {

// What one rank gives to an operation of a window.
struct Contribution {
  Uid from;
  int64_t step = 0;
  std::vector<int64_t> samples;
  int64_t weight = 1;  // with batches: samples that count
  bool operator==(const Contribution& other) const {
    return from == other.from && step == other.step && samples == other.samples && weight == other.weight;
  }
};
// What a rank that joins takes over.
struct Progress {
  int64_t steps = 0;
  bool metric_done = false;  // that comes before the next step
  int64_t next = 0;
  std::vector<int64_t> given_back;
  bool operator==(const Progress& other) const {
    return steps == other.steps && metric_done == other.metric_done && next == other.next &&
           given_back == other.given_back;
  }
};
// What an operation gave: in which epoch, made of what.
struct Sum {
  EpochId epoch;
  std::map<Uid, Contribution> parts;
};
using Sums = std::map<std::string, Sum>;  // by name

class Judge {
 public:
  explicit Judge(const Plan& plan) : plan_(plan) {}

  const std::string& violation() const { return violation_; }
  void Violate(const std::string& text);

  // The launcher.
  void Wrote(const EpochId& epoch);
  void Formed(const ControlFrame& form);  // a Form is about to be sent
  void Heard(const ControlFrame& frame);  // by it, of an agent
  void Evicted(const Uid& uid);
  void Starts(Nanoseconds now, const std::string& host);  // a rank there
  void Ended(bool well) { ended_ = true, well_ = well; }

  // A rank.
  // It has settled with the other members, and goes on from there.
  void Ran(Nanoseconds now, const Uid& uid, const EpochId& epoch, const std::vector<Member>& members,
           const Progress& progress);
  void HasProgram(const EpochId& epoch, const std::string& program);
  void Took(const EpochId& message, const EpochId& epoch);
  void Gave(const Uid& donor);
  // It has come to all results of the part that it waits for; and has agreed with the others on what becomes of them.
  void Holds(const Uid& uid) { holding_.insert(uid); }
  void Settled(const Uid& uid) { holding_.erase(uid); }
  // How far it says that it is with that part.
  void Stands(const Uid& uid, const Standing& standing);
  // Of the step behind so many, or of the metric before it: the results of a part are used.
  void Used(const Uid& uid, int64_t done, bool of_step, size_t part, const Sums& sums);
  // A step is applied, settled: by what ranks tell each other when the epoch begins. Its results, and whose samples are
  // in it.
  void Released(const Uid& uid, const EpochId& epoch, bool settled, int64_t step, const std::vector<Uid>& contributors,
                const Sums& sums);
  void Reported(size_t bytes);
  void Finished(const Uid& uid, const Progress& progress);
  // victim: the process that it strikes, if it is one, and there is one.
  void Struck(Nanoseconds now, const Fault& fault, const Uid& victim, bool member);
  void Killed(const Uid& uid) { killed_.insert(uid); }  // by a fault
  void AllGone(Nanoseconds now);

 private:
  struct World {
    Progress progress;
    std::vector<Member> members;
    std::set<int64_t> released;
    size_t running = 0;  // members
    std::string program = {};
  };
  void Began(Nanoseconds now, const EpochId& epoch, const World& world);
  void UsePositions(const Sums& sums);
  bool all_state_is_lost() const;
  void CheckTime(Nanoseconds now);
  bool IsWithinTheCut(const std::string& host) const { return plan_.faults[0].places.count(host[0] - 'a') > 0; }
  void CheckSides(Nanoseconds now, const EpochId& old, const World& world);

  const Plan& plan_;
  std::string violation_;
  EpochId written_, newest_run_;
  std::map<uint64_t, EpochId> granted_;                                     // by count
  std::map<EpochId, World> worlds_;                                         // that have run somewhere
  std::map<int64_t, Sums> applied_;                                         // by step
  std::map<std::pair<std::pair<int64_t, bool>, size_t>, Sums> used_parts_;  // as Used has them
  std::map<Uid, int64_t> step_of_;
  std::set<Uid> members_, evicted_, finished_, killed_;  // members: of any world that ran
  std::set<Uid> known_;                                  // to the launcher, as far as it has not heard of their end
  std::set<Uid> holding_;                                // results that no release or settlement has ended
  std::set<int64_t> used_;                               // positions
  Nanoseconds struck_ = kNever, launcher_gone_ = kNever;
  Nanoseconds cut_at_ = kNever;
  EpochId struck_in_, cut_in_;
  ControlFrame formed_;       // the last Form
  Uid struck_rank_;           // by a fault that is its program's, or its process's
  bool undisturbed_ = false;  // a world of which all members run when the launcher crashes
  bool ended_ = false, well_ = false;
};

}  // namespace elastic
}  // namespace ringtrain
#endif  // RINGTRAIN_TESTS_SIMULATION_ELASTIC_JUDGE_H_
