// SimulatedRank: a process of an elastic job: the product's Membership, Steps and Samples, and for each epoch a world,
// driven as ringtrain/_bootstrap/member.py and ringtrain/elastic/transaction.py drive them; and a program that
// trains.
#ifndef RINGTRAIN_TESTS_SIMULATION_ELASTIC_RANK_H_
#define RINGTRAIN_TESTS_SIMULATION_ELASTIC_RANK_H_

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "elastic/membership.h"
#include "elastic/samples.h"
#include "elastic/step.h"
#include "judge.h"
#include "plan.h"
#include "random.h"
#include "world.h"

namespace ringtrain {
namespace elastic {

constexpr char kProgram[] = "program";           // the digest of what all train
constexpr char kOtherValues[] = "other values";  // the same program, in which something has another shape

class SimulatedRank {
 public:
  SimulatedRank(const Plan& plan, Process process, const std::string& program, Judge* judge,
                Surroundings* surroundings);

  void Begin();
  void Hear(const ControlFrame& frame);
  void Receive(Message message);
  void Step();
  void Hang(Nanoseconds until) { hangs_until_ = std::max(hangs_until_, until); }
  // It submits an operation that no other rank does, and waits for it.
  void GoAnotherWay() { goes_another_way_ = true; }
  bool is_member() const { return membership_.state() == Membership::State::kMember; }

 private:
  // What the program waits for.
  enum class Wait { kWorld, kStandings, kPlaces, kState, kTime, kResults, kWhole, kPause, kAlone, kNothing };

  // Operations of a window that are waited for at once.
  struct OpenPart {
    Part part;
    std::vector<std::string> names;
    std::vector<std::string> to_give;  // of them
    std::map<std::string, Contribution> given;
    Sums held;
    bool asked = false;  // for its results
  };
  struct Window {
    std::deque<OpenPart> parts;
    bool counts = false;  // a step, with samples; else it has none
    bool is_last = false;
    std::vector<int64_t> samples;  // that this rank has drawn
    Sums sums;                     // of its first part that counts
    size_t parts_released = 0;
  };

  // ---- the program ----
  bool Program();
  void Go();
  void BeginWindow();
  void Draw();
  void Give();
  void EndPart();
  void Hold();
  void Agree();
  void PartReleased();
  void GoOn();
  void NoteUnheard();
  void TellSuspects();
  void TakeWorld();
  bool Refuses(const Gifts& told);
  void Settle(const std::vector<int32_t>& places);
  void CarryOutSteps();
  void Resume();
  void Finish(const Contributors& contributors);
  void TakeState(const Progress& progress);
  bool Fails(const std::string& name);
  void ComputeFor(Nanoseconds longest);
  void WaitAlone();
  void AwaitAlone();
  Contribution ContributionOf(const std::string& name) const;
  Progress progress() const;
  std::vector<Uid> UidsOf(const Contributors& contributors) const;

  // ---- the thread that listens ----
  void Connect(const ControlFrame& form);
  void Answered(const Message& message);
  void HaveConnected(bool well);
  void LookAtTheConnection();
  void TakeKept();
  void CarryOut();
  void Do(membership_action::Send& send);
  void Do(membership_action::Abandon&);
  void Do(membership_action::Connect& connect) { Connect(connect.form); }
  void Do(membership_action::Run&);
  void Do(membership_action::Pause&) { wants_pause_ = true; }
  void Do(membership_action::Depart&);
  void Do(membership_action::Fence& fence);
  void End(int exit_code);
  void Arm();
  Message Of(Message::Kind kind, const EpochId& epoch) const { return {kind, epoch, process_.uid}; }
  std::vector<SimulatedWorld*> Worlds() const;  // that there are

  const Plan& plan_;
  bool goes_another_way_ = false;
  const Process process_;
  const std::string program_;
  bool fits_;
  Judge* const judge_;
  Surroundings* const surroundings_;
  simulation::Random random_;
  Membership membership_;
  MembershipActions actions_;
  bool over_ = false;  // of the process
  Nanoseconds armed_ = kNever;

  // The program.
  Wait wait_ = Wait::kWorld;
  Nanoseconds program_at_ = kNever;
  Nanoseconds hangs_until_ = 0;
  Steps steps_;
  std::deque<StepEffect> deeds_;  // of them that are still to be carried out
  bool settles_ = false;          // these follow from a settlement
  Samples samples_;
  std::deque<std::vector<int64_t>> ahead_;  // drawn since the last release
  int64_t done_ = 0;                        // steps
  bool metric_done_ = false;                // of the one that comes
  std::optional<Window> window_;
  bool agreed_to_pause_ = false;
  std::map<int64_t, std::vector<Member>> members_in_;  // by number of a world
  int64_t dealt_in_ = 0;

  // Worlds.
  std::unique_ptr<SimulatedWorld> present_, opened_, next_;  // that the program has; that waits to run; that runs
  bool goes_on_ = false;                                     // nobody has ended the present one
  bool wants_pause_ = false;
  std::optional<ControlFrame> form_;  // that is being connected
  std::map<Uid, bool> answered_;
  Nanoseconds connect_by_ = kNever;
  int failures_ = 0;
  EpochId newest_;            // that this rank has run, or given up
  std::deque<Message> kept_;  // for a later epoch
};

}  // namespace elastic
}  // namespace ringtrain
#endif  // RINGTRAIN_TESTS_SIMULATION_ELASTIC_RANK_H_
