// Fleet: the hosts of an elastic job, their agents and processes, the launcher, the network and the time in which they
// live, on one thread. Faults strike here.
//
// One heap of events, keyed by virtual time; every choice comes from the plan's seed. Each connection keeps its order.
#ifndef RINGTRAIN_TESTS_SIMULATION_ELASTIC_FLEET_H_
#define RINGTRAIN_TESTS_SIMULATION_ELASTIC_FLEET_H_

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <queue>
#include <string>
#include <utility>
#include <vector>

#include "elastic/authority.h"
#include "rank.h"

namespace ringtrain {
namespace elastic {

struct Result {
  std::string violation;
  uint64_t digest = 0;
  int64_t events = 0;
  Nanoseconds time = 0;
};

class Fleet : public Surroundings {
 public:
  Fleet(const Plan& plan, bool trace);
  Result Run();

  Nanoseconds now() const override { return now_; }
  void Send(const Uid& from, const Uid& to, Message message) override;
  void TellAgent(const Uid& from, const ControlFrame& frame) override;
  void Call(const Uid& process, Nanoseconds delay) override;
  bool has_died(const Uid& process) const override { return processes_.at(process.low).dead; }
  Life& life(const Uid& process, const EpochId& epoch) override { return lives_[{process, epoch}]; }
  std::string& notice(const std::string& host, const EpochId& epoch) override { return notices_[{host, epoch}]; }
  void Exit(const Uid& process, int exit_code) override;
  void Trace(const Uid& process, const std::string& text) override;

 private:
  // Where an event happens: at a process, which may be frozen or dead, or at an agent or the launcher.
  struct Place {
    int host = kLauncher;
    uint64_t process = 0;
  };
  struct Event {
    Nanoseconds at;
    uint64_t number;
    int from;  // the host, or the launcher, that it comes from
    Place to;
    std::shared_ptr<std::function<void()>> what;
    bool operator<(const Event& other) const { return at != other.at ? at > other.at : number > other.number; }
  };
  struct OneProcess {
    Process process;
    std::unique_ptr<SimulatedRank> rank;
    Nanoseconds frozen_until = 0;
    bool dead = false;
  };
  struct Agent {
    bool there = false;
    bool is_let_go = false;    // until its network has been checked
    bool has_ended = false;    // after that, and its launcher knows
    int launcher = 0;          // which of them it obeys
    Nanoseconds heard_at = 0;  // of it
    std::string record;
    bool finished = false;               // some rank here
    uint64_t count = 0;                  // of the record
    std::map<int, uint64_t> processes;   // by slot
    std::map<int, std::string> program;  // that the next process of a slot has
  };

  void At(Nanoseconds at, int from, Place to, std::function<void()> what);
  void Deliver(int from, Place to, Nanoseconds least, std::function<void()> what);
  Nanoseconds CutUntil(int from, int to) const;

  // The launcher.
  void StartLauncher();
  void CrashLauncher(const Fault& fault);
  void Look();
  void FromAgent(int host, const ControlFrame& frame);
  void CarryOut(AuthorityActions actions);
  void Do(authority_action::Write& write);
  void Do(authority_action::Send& send);
  void Do(authority_action::Start& start);
  void Do(authority_action::LetGo& let_go);
  void Do(authority_action::Say& say) { TraceText("launcher: " + say.text); }
  void Do(authority_action::End& end);

  // Agents.
  void FromLauncher(int host, int launcher, const ControlFrame& frame);
  void Present(int host);
  void PassOn(int host, const ControlFrame& frame);
  void ToLauncher(int host, const ControlFrame& frame);
  void StartProcess(int host, int slot);
  void Beat(int host);
  void Die(uint64_t process, int exit_code);
  void AskForLeave(const OneProcess& process);

  void Strike(const Fault& fault);
  void IsAboutToSend(ControlType type);
  uint64_t ProcessIn(int host, int slot) const;
  void LoseHost(int host);
  void EndAgent(int host, int launcher);
  void TryHost(int host);
  void TraceText(const std::string& text) const;

  const Plan& plan_;
  const bool trace_;
  Judge judge_;
  simulation::Random random_;
  Nanoseconds now_ = 0;
  uint64_t number_ = 0;
  std::priority_queue<Event> heap_;
  Result result_;
  std::map<std::pair<std::pair<int, uint64_t>, std::pair<int, uint64_t>>, Nanoseconds> arrivals_;  // of each connection
  std::vector<Agent> agents_;
  std::map<std::pair<std::string, EpochId>, std::string> notices_;
  std::map<std::pair<Uid, EpochId>, Life> lives_;
  std::map<uint64_t, OneProcess> processes_;
  uint64_t next_process_ = 1;
  std::optional<Authority> authority_;
  int launcher_ = 0;
  std::string disk_;
  bool over_ = false, launcher_gone_ = false;  // for good
  Nanoseconds look_at_ = kNever;
  std::map<ControlType, int> sent_;
  std::map<int, std::map<ControlType, int>> sent_at_;  // by fault, when it struck
  std::map<int, Nanoseconds> cuts_;                    // by fault: until when
};

Result Simulate(const Plan& plan, bool trace = false);

}  // namespace elastic
}  // namespace ringtrain
#endif  // RINGTRAIN_TESTS_SIMULATION_ELASTIC_FLEET_H_
