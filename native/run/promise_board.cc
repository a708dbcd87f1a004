#include "run/promise_board.h"

#include <utility>

namespace ringtrain {
namespace {

// Ids of sets are never used again, nor are numbers of a set's schedules.
uint64_t KeyOf(int process_set, uint32_t schedule) { return (static_cast<uint64_t>(process_set) + 1) << 32 | schedule; }

}  // namespace

void PromiseBoard::Write(int process_set, const PromiseSign& sign) {
  Set& set = sets_.at(process_set);
  set.schedule = sign.schedule;
  PromiseSlot* const mine = slot(world_.rank, set.lane);
  if (mine != nullptr) mine->Write(KeyOf(process_set, sign.schedule), {sign.promised, sign.agreed, sign.at});
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

bool PromiseBoard::Look(int process_set, const std::vector<int>& ranks) {
  Set& set = sets_.at(process_set);
  const uint64_t key = KeyOf(process_set, set.schedule);
  bool changed = set.seen.size() != ranks.size();
  set.seen.resize(ranks.size());
  for (size_t place = 0; place < ranks.size(); ++place) {
    const PromiseSlot* const theirs = slot(ranks[place], set.lane);
    const PromiseSlot::Value value = theirs == nullptr ? PromiseSlot::Value() : theirs->Read(key);
    const PromiseSign sign = {set.schedule, value.promised, value.agreed, value.at};
    changed |= !(sign == set.seen[place]);
    set.seen[place] = sign;
  }
  if (changed) changed_.push_back(process_set);
  return changed;
}

}  // namespace ringtrain
