// SimulatedWorld: ranks, their hosts, the network between them and the time in which they live, on one thread. Faults
// strike here.
//
// One heap of events, keyed by virtual time; every choice comes from the plan's seed. The network keeps the order of a
// pair of ranks and no other. Runs until all ranks have ended, or nothing moves any more, or the judge has found
// something.
#ifndef RINGTRAIN_TESTS_SIMULATION_WORLD_H_
#define RINGTRAIN_TESTS_SIMULATION_WORLD_H_

#include <map>
#include <memory>
#include <queue>
#include <string>
#include <vector>

#include "rank.h"

namespace ringtrain {
namespace simulation {

struct Result {
  std::string violation;  // empty if there was none
  uint64_t digest = 0;    // of every event in its order: equal for two runs of one plan
  int64_t events = 0;
};

class SimulatedWorld : public Surroundings {
 public:
  // trace: prints every event to stderr.
  SimulatedWorld(const Plan& plan, bool trace);

  Result Run();

  Nanoseconds now() const override { return now_; }
  const World& world() const override { return world_; }
  void Send(int from, int to, const Frame& frame) override;
  Life& life(int rank) override { return lives_[static_cast<size_t>(rank)]; }
  std::string& notice(int rank) override { return notices_[plan_.host_of.at(rank)]; }
  PromiseSign& promise(int rank, int set) override { return promises_[{rank, set}]; }
  void Ring(int rank) override { processes_.at(rank).rank->Ring(); }
  void CallStep(int rank, Nanoseconds delay) override;
  void CallProgram(int rank, Nanoseconds delay) override;
  void FailureTold(int rank) override;
  void BeginBatch(int rank, int set, size_t index, const std::vector<int>& members) override;
  bool PassesFence(int rank, int fence) override;

 private:
  enum Kind : uint8_t {
    kFrame,
    kLostPeer,
    kStep,
    kProgram,
    kTimer,
    kBatchEnd,
    kFreeze,  // from here on faults, which no freeze delays
    kCrash,
    kRaise,
    kCut,
    kLoss,
    kDeadline
  };
  struct Happening {
    Nanoseconds at;
    uint64_t number;  // in the order in which they were made: equal times keep it
    Kind kind;
    int rank;
    int other = 0;         // kFrame: the sender; kLostPeer: who; kBatchEnd: the set; of faults: their place in the plan
    Nanoseconds made = 0;  // kFrame: when it was sent
    bool woken = false;    // kDeadline: those that were stopped must have ended, too
    std::string bytes = {};
    bool held = false;  // has happened, but to a rank that stands still
    bool operator<(const Happening& that) const { return at != that.at ? at > that.at : number > that.number; }
  };
  struct Process {
    std::unique_ptr<SimulatedRank> rank;
    Nanoseconds frozen_until = 0, crashed_at = kNever, timer = kNever;
    Nanoseconds step_at = kNever, program_at = kNever;  // called for
    int slowness = 1;
  };
  struct Link {
    explicit Link(Random its_own) : random(its_own) {}
    Random random;
    Nanoseconds last = 0;  // arrival
  };

  void Add(Happening happening);
  Link& LinkOf(int from, int to);
  void LosePeer(int rank, int lost);
  bool LoseConnections(const Fault& fault);
  void LoseConnectionsWith(int rank);
  bool IsLost(int from, int to) const { return !lost_links_.empty() && lost_links_.count({from, to}) > 0; }
  bool SomeAreDisconnected(const std::vector<int>& ranks);
  void Call(Kind kind, int rank, Nanoseconds delay, Nanoseconds* called);
  void Happen(Happening& happening);
  void Note(const Happening& happening);
  void Strike(const Happening& happening);
  bool KernelTells(const Fault& fault) const;
  bool CrashesSoon(int rank) const;
  bool WireTells(const Fault& fault) const;
  bool Lives(int rank) const;
  void CheckDeadline(const Fault& fault, bool woken);
  // Until when no frame comes through from one rank to another.
  Nanoseconds CutUntil(int from, int to) const;
  void SetTimer(int rank);
  void CheckAllEnded();

  const Plan& plan_;
  const bool trace_;
  Judge judge_;
  Random random_;
  Nanoseconds now_ = 0;
  uint64_t number_ = 0;
  Result result_;
  std::priority_queue<Happening> heap_;
  // One for all ranks, since 4096 of them would take a gigabyte: its rank is the one that moves at the moment.
  World world_;
  std::map<int, Process> processes_;                         // by rank
  std::vector<Life> lives_;                                  // by rank
  std::map<int, std::string> notices_;                       // by host
  std::map<std::pair<int, int>, PromiseSign> promises_;      // by (rank, set)
  std::set<int> struck_;                                     // places of faults
  Nanoseconds last_moved_ = 0;                               // other than by signs of life
  std::set<std::pair<int, int>> lost_links_;                 // (from, to)
  std::map<std::pair<int, int>, Link> links_;                // by (from, to)
  std::map<std::pair<int, size_t>, std::set<int>> batches_;  // by (set, index): who has begun it
  std::map<std::pair<int, int>, Nanoseconds> batch_ends_;    // by (rank, set): of the last one
  std::map<int, std::set<int>> fences_;                      // who has come to it
};

// Runs a plan from its start to its end.
Result Simulate(const Plan& plan, bool trace = false);

}  // namespace simulation
}  // namespace ringtrain
#endif  // RINGTRAIN_TESTS_SIMULATION_WORLD_H_
