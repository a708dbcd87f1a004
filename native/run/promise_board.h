// PromiseBoard: what the ranks of a host show each other in its memory of what they have promised (promises.h). The
// driver's thread only.
#ifndef RINGTRAIN_RUN_PROMISE_BOARD_H_
#define RINGTRAIN_RUN_PROMISE_BOARD_H_

#include <map>
#include <utility>
#include <vector>

#include "agree/promises.h"
#include "transport/host_memory.h"
#include "transport/world.h"

namespace ringtrain {

class PromiseBoard {
 public:
  PromiseBoard(const World& world, HostMemory* memory) : world_(world), memory_(memory) {}

  // A set with a lane from kMaxScheduledSets on has no place here: nobody sees a promise, so it never runs by a
  // schedule.
  void Add(int process_set, int lane) { sets_[process_set].lane = lane; }
  void Remove(int process_set) { sets_.erase(process_set); }

  // This rank's promise, for all to see before this rank looks at theirs.
  void Write(int process_set, const PromiseSign& sign);
  // Looks at what these ranks show of the schedule that this rank has promised for. True if it has changed.
  bool Look(int process_set, const std::vector<int>& ranks);
  // The sets of which Look has found something new.
  std::vector<int> TakeChanged() { return std::exchange(changed_, {}); }
  // What Look has found, by its ranks.
  const std::vector<PromiseSign>& seen(int process_set) const { return sets_.at(process_set).seen; }

 private:
  struct Set {
    int lane = 0;
    uint32_t schedule = 0;
    std::vector<PromiseSign> seen;
  };

  // nullptr if there is none.
  PromiseSlot* slot(int rank, int lane) const {
    const int place = world_.local_rank_of[static_cast<size_t>(rank)];
    return lane < kMaxScheduledSets ? &memory_->control().place(place).promises[lane] : nullptr;
  }

  const World& world_;
  HostMemory* const memory_;
  std::map<int, Set> sets_;
  std::vector<int> changed_;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_RUN_PROMISE_BOARD_H_
