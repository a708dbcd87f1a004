// Executor: runs what the negotiators have agreed on, batch after batch, on the data plane of each process set.
// The driver's thread only. Nothing here waits.
#ifndef RINGTRAIN_CORE_EXECUTOR_H_
#define RINGTRAIN_CORE_EXECUTOR_H_

#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "base/counters.h"
#include "base/options.h"
#include "collectives/group.h"
#include "core/negotiator.h"
#include "core/submission.h"
#include "core/timeline.h"
#include "transport/world.h"

namespace ringtrain {

// The topology and window of a process set, as the options want them: the same on every member.
Topology TopologyFor(const World& world, const Options& options, const std::vector<int>& members);
WindowGeometry GeometryFor(const Topology& topology, const Options& options);

class Executor {
 public:
  Executor(const World& world, const Options& options, Transport* transport, HostMemory* memory, SubmissionTable* table,
           Counters* counters, Timeline* timeline);
  ~Executor();

  void AddGroup(int process_set, int lane, const std::vector<int>& members);
  void RemoveGroup(int process_set);

  // Starts a batch of data operations.
  Status Start(int process_set, const effect::Execute& execute);
  // Moves every group's batches; appends the process set of each that is finished.
  Status Advance(bool* moved, std::vector<int>* finished);
  bool busy() const { return under_way_ > 0; }
  bool busy(int process_set) const;

 private:
  class Execution;
  struct Lane {
    Group group;
    std::unique_ptr<HostMemory> alone;  // memory of a group whose only member on this host is this rank
    std::deque<std::unique_ptr<Execution>> executions;
  };

  Status MapWindow(Lane* lane);

  const World& world_;
  const Options& options_;
  Transport* const transport_;
  HostMemory* const memory_;
  SubmissionTable* const table_;
  Counters* const counters_;
  Timeline* const timeline_;
  std::map<int, Lane> lanes_;  // by process set
  int under_way_ = 0;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_CORE_EXECUTOR_H_
