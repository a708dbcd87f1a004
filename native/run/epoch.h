// Epoch: all that belongs to one world and ends with it: the world itself, its memory on this host, its process sets,
// and the coordinator with everything below it. A world is a value that never changes; another one, under another
// number, is another Epoch over the same wire, tables and threads, which the context keeps (context.h).
//
// So whoever keeps a reference to a World, or to a part of its memory, lies in here, or is made anew together with it.
#ifndef RINGTRAIN_RUN_EPOCH_H_
#define RINGTRAIN_RUN_EPOCH_H_

#include <memory>
#include <utility>

#include "run/coordinator.h"
#include "transport/host_memory.h"
#include "transport/world.h"
#include "world/process_sets.h"

namespace ringtrain {

class Epoch {
 public:
  Epoch(World world, std::unique_ptr<HostMemory> memory, const Options& options, Wire& wire, const Progress& progress,
        SubmissionTable* table, Counters* counters, LatenessTable* lateness, Timeline* timeline, TrafficTable* traffic,
        Log* log, Writer* writer)
      : world_(std::move(world)),
        memory_(std::move(memory)),
        coordinator_(world_, options, wire, progress, memory_.get(), table, &residuals_, &process_sets_, counters,
                     lateness, timeline, traffic, log, writer) {}

  const World& world() const { return world_; }
  HostMemory& memory() const { return *memory_; }
  const ProcessSetTable& process_sets() const { return process_sets_; }
  Residuals& residuals() { return residuals_; }
  Coordinator& coordinator() { return coordinator_; }

 private:
  const World world_;
  const std::unique_ptr<HostMemory> memory_;
  ProcessSetTable process_sets_;
  Residuals residuals_;
  Coordinator coordinator_;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_RUN_EPOCH_H_
