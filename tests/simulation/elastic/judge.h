// Judge: the invariants of an elastic job (E1 to E14), asked at every event. It keeps a record of its own of what every
// rank has contributed, held and released; nothing of it comes from the code that is judged.
#ifndef RINGTRAIN_TESTS_SIMULATION_ELASTIC_JUDGE_H_
#define RINGTRAIN_TESTS_SIMULATION_ELASTIC_JUDGE_H_

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "plan.h"

namespace ringtrain {
namespace elastic {

// What one rank gives to an operation of a window.
struct Contribution {
  Uid from;
  Step step = 0;
  std::vector<Positions> samples;
  bool operator==(const Contribution& other) const {
    return from == other.from && step == other.step && samples == other.samples;
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
  void Evicted(const Uid& uid);
  void Ended(bool well) { ended_ = true, well_ = well; }

  // A rank.
  void Ran(Nanoseconds now, const Uid& uid, const EpochId& epoch, const std::vector<Member>& members,
           const StepProgress& progress);
  void HasProgram(const EpochId& epoch, const std::string& program);
  void Took(const EpochId& message, const EpochId& epoch);
  void Gave(const Uid& donor);
  void Released(Nanoseconds now, const Uid& uid, const EpochId& epoch, bool runs, Step step, size_t divisor,
                const Sums& sums);
  void Kept(size_t inputs, size_t report_bytes);
  void Finished(const Uid& uid, const StepProgress& progress);
  void Struck(Nanoseconds now, const Fault& fault, bool member);
  void AllGone(Nanoseconds now);

 private:
  struct World {
    StepProgress progress;
    std::vector<Member> members;
    std::set<Step> released;
    size_t running = 0;  // members
    std::string program = {};
  };
  struct Applied {
    Sums sums;
    size_t divisor = 0;
  };
  void UsePositions(const Sums& sums);
  void CheckTime(Nanoseconds now);
  void CheckSides(Nanoseconds now, const EpochId& old, const World& world);

  const Plan& plan_;
  std::string violation_;
  EpochId written_, newest_run_;
  std::map<uint64_t, EpochId> granted_;  // by count
  std::map<EpochId, World> worlds_;      // that have run somewhere
  std::map<Step, Applied> applied_;
  std::map<Uid, Step> step_of_;
  std::set<Uid> members_, evicted_, finished_;  // members: of any world that ran
  std::set<uint64_t> used_;                     // positions
  Nanoseconds struck_ = kNever, launcher_gone_ = kNever;
  Nanoseconds cut_at_ = kNever;
  EpochId struck_in_, cut_in_;
  bool undisturbed_ = false;  // a world of which all members run when the launcher crashes
  bool ended_ = false, well_ = false;
};

}  // namespace elastic
}  // namespace ringtrain
#endif  // RINGTRAIN_TESTS_SIMULATION_ELASTIC_JUDGE_H_
