// Judge: knows what every rank may be told, and looks after every event. It compares what ranks are told with the
// plan's verdicts and with each other, by a record of its own: which turn of a name a rank is at, and which batches a
// process set has run.
#ifndef RINGTRAIN_TESTS_SIMULATION_JUDGE_H_
#define RINGTRAIN_TESTS_SIMULATION_JUDGE_H_

#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "plan.h"

namespace ringtrain {
namespace simulation {

class Judge {
 public:
  explicit Judge(const Plan& plan);

  // Empty while all is well: the first thing that went wrong.
  const std::string& violation() const { return violation_; }
  void Violate(const std::string& text);

  // What a rank does and is told. Process sets by their real ids.
  void Submitted(int rank, int set, const Turn& turn, const Request& request);
  void Executed(int rank, int set, const effect::Execute& execute, const std::vector<int>& members);
  // What a rank contributes to a batch, as a text: which turns it has submitted.
  std::string ContributionOf(int rank, int set, const std::vector<Response>& responses) const;
  // What it has sent ahead of a batch that it begins, and what has come.
  void WentAhead(int rank, int set, const effect::Execute& execute, const Ahead& ahead);
  void Finished(int rank, int set, const effect::Execute& execute);
  void Failed(int rank, int set, const std::string& name, const Status& status);
  void Warned(int rank, const std::string& text);
  void Counted(int rank, int set, const effect::Count& count);
  void Sent(int rank, const Frame& frame, bool coordinates, bool to_coordinator);
  void Removed(int rank, int set);
  // The world has ended for this rank, for the reason that it is told: whatever it waited for ends with that, though
  // others may yet count on what it submitted.
  void Ended(int rank, Nanoseconds now, const std::string& cause);
  void Crashed(int rank) { ended_.insert(rank); }
  // A deadly fault has struck.
  void Struck(const Fault& fault, Nanoseconds now);
  // It has left the world to the others, and what it still waited for ends with that.
  void Closed(int rank);
  // Nothing moves any more.
  void End();

  bool InFlight(int rank, int set, const std::string& name) const;
  bool InFlight(int rank, int set) const;
  bool Idle(int rank) const;
  // The turn that a rank has in flight under a name.
  const Turn& TurnOf(int rank, int set, const std::string& name) const;

 private:
  struct Submission {
    const Turn* turn;
    Request request;
    bool executed = false;
  };
  struct Batch {
    uint64_t digest = 0;  // of what everyone must be told in the same bytes
    std::vector<std::pair<const Turn*, std::string>> turns;
    std::map<std::string, std::vector<int64_t>> exchanged;  // by name: rows that were submitted, [from * members + to]
  };
  // A rank's side of a process set.
  struct Member {
    std::map<std::string, Submission> in_flight;
    size_t batches = 0;
    std::map<std::string, Request> agreed;  // what the response cache must hold of this rank if it never evicts
    int expected_hits = 0, hits = 0, expected_misses = 0, misses = 0;
    int under_way = 0;
  };

  const Member* Find(int rank, int set) const;
  Batch* BatchOf(int set, const effect::Execute& execute, Member* member);
  void CheckNewBatch(int set, const effect::Execute& execute, const std::vector<int>& members, Batch* batch);
  void CheckFusion(const effect::Execute& execute);
  void CheckContributions(int set, const Response& response, const std::vector<bool>& joined,
                          const std::vector<int>& members, Batch* batch);
  void CheckExchange(int rank, size_t place, const Response& response, const std::vector<int64_t>& rows);
  void Finish(int rank, const std::string& name, Member* member);
  void CheckToldBefore(int rank);
  void CheckSameTold(int rank, const Turn& turn, const std::string& text);
  void Remember(const Response& response, const effect::Execute& execute, Member* member);

  const Plan& plan_;
  const bool never_evicts_;
  std::string violation_;
  std::map<std::pair<int, int>, Member> members_;               // by (rank, set)
  std::map<int, std::vector<Batch>> batches_;                   // by set, in the order of the first rank to run them
  std::map<std::tuple<int, uint32_t, uint64_t>, Ahead> ahead_;  // by set, schedule, batch: of the first to begin it
  std::map<int, std::string> failures_;                         // by turn: the text that everyone must get
  std::map<int, int> warnings_;                                 // by turn
  std::set<std::pair<int, int>> done_;                          // (rank, turn)
  std::map<int, Batch> removals_;                               // of process sets, by turn
  std::vector<std::pair<Fault, Nanoseconds>> struck_;           // deadly faults, and when
  std::set<std::string> fitting_causes_;                        // to any of them
  std::map<int, std::string> causes_;                           // by host: why its ranks have ended
  std::set<int> ended_;                                         // ranks that the world's end, or their own, has reached
};

}  // namespace simulation
}  // namespace ringtrain
#endif  // RINGTRAIN_TESTS_SIMULATION_JUDGE_H_
