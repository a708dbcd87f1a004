// Epoch: all that belongs to one world and ends with it: the world itself, its memory on this host, its process sets,
// and the loop with everything below it. A world is a value that never changes; another one, under another
// number, is another Epoch over the same wire, tables and threads, which the context keeps (context.h).
//
// So whoever keeps a reference to a World, or to a part of its memory, lies in here, or is made anew together with it.
#ifndef RINGTRAIN_RUN_EPOCH_H_
#define RINGTRAIN_RUN_EPOCH_H_

#include <memory>
#include <utility>

#include "run/rank_loop.h"
#include "transport/host_memory.h"
#include "transport/world.h"
#include "world/process_sets.h"

namespace ringtrain {

class Epoch {
 public:
  // books: stay valid as long as it is there.
  Epoch(World world, std::unique_ptr<HostMemory> memory, const Books& books, Transport& transport)
      : world_(std::move(world)),
        memory_(std::move(memory)),
        loop_(world_, books, transport, memory_.get(), &residuals_, &process_sets_) {}

  const World& world() const { return world_; }
  HostMemory& memory() const { return *memory_; }
  const ProcessSetTable& process_sets() const { return process_sets_; }
  Residuals& residuals() { return residuals_; }
  RankLoop& loop() { return loop_; }

 private:
  const World world_;
  const std::unique_ptr<HostMemory> memory_;
  ProcessSetTable process_sets_;
  Residuals residuals_;
  RankLoop loop_;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_RUN_EPOCH_H_
