// Counters of a context (tables/counters.def): added to by its threads, read by anyone.
#ifndef RINGTRAIN_BASE_COUNTERS_H_
#define RINGTRAIN_BASE_COUNTERS_H_

#include <atomic>
#include <cstdint>

#include "tables/tables.h"

namespace ringtrain {

class Counters {
 public:
  void Add(Counter counter, int64_t amount) {
    values_[static_cast<int>(counter)].fetch_add(amount, std::memory_order_relaxed);
  }
  int64_t Get(int counter) const { return values_[counter].load(std::memory_order_relaxed); }

 private:
  std::atomic<int64_t> values_[kCounterCount] = {};
};

}  // namespace ringtrain
#endif  // RINGTRAIN_BASE_COUNTERS_H_
