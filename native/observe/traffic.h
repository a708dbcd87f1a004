// Traffic: how much a rank has exchanged and how long that took, by operation and size of its tensors. Added to by the
// driver at the end of a batch, read by anyone; a few additions for each operation, so it is always on.
#ifndef RINGTRAIN_OBSERVE_TRAFFIC_H_
#define RINGTRAIN_OBSERVE_TRAFFIC_H_

#include <atomic>
#include <cstdint>
#include <vector>

#include "base/clock.h"
#include "tables/tables.h"

namespace ringtrain {

// What was exchanged by operations of one kind and size.
struct Traffic {
  Operation operation = Operation::kAllreduce;
  int size_class = 0;       // bytes in [2^(class - 1), 2^class), 0: none
  int64_t count = 0;        // operations
  int64_t bytes = 0;        // what an operation is about: its whole input, or of a gather its whole output
  int64_t link_bytes = 0;   // of these, what each member must send at least, whatever the algorithm
  Nanoseconds time = 0;     // that batches were under way, shared by bytes; overlapping ones are counted once
  Nanoseconds waiting = 0;  // from submission until all members had submitted
};

class TrafficTable {
 public:
  // One operation. The driver's thread.
  void Add(const Traffic& more) {
    Cell& cell = cells_[static_cast<int>(more.operation)][more.size_class];
    Increase(&cell.count, more.count);
    Increase(&cell.bytes, more.bytes);
    Increase(&cell.link_bytes, more.link_bytes);
    Increase(&cell.time, more.time);
    Increase(&cell.waiting, more.waiting);
  }
  // What there is, by operation and size.
  std::vector<Traffic> All() const {
    std::vector<Traffic> all;
    for (int operation = 0; operation < kOperationCount; ++operation)
      for (int size_class = 0; size_class < kSizeClasses; ++size_class) {
        const Cell& cell = cells_[operation][size_class];
        if (cell.count.load(std::memory_order_relaxed) == 0) continue;
        all.push_back({static_cast<Operation>(operation), size_class, cell.count.load(std::memory_order_relaxed),
                       cell.bytes.load(std::memory_order_relaxed), cell.link_bytes.load(std::memory_order_relaxed),
                       cell.time.load(std::memory_order_relaxed), cell.waiting.load(std::memory_order_relaxed)});
      }
    return all;
  }
  static int SizeClass(int64_t bytes) {
    int size_class = 0;
    for (; bytes > 0; bytes >>= 1) ++size_class;
    return size_class;
  }

 private:
  static constexpr int kSizeClasses = 64;
  using Number = std::atomic<int64_t>;
  struct Cell {
    Number count{0}, bytes{0}, link_bytes{0}, time{0}, waiting{0};
  };
  // One thread at a time drives, so nothing is lost between load and store.
  static void Increase(Number* number, int64_t amount) {
    number->store(number->load(std::memory_order_relaxed) + amount, std::memory_order_relaxed);
  }

  Cell cells_[kOperationCount][kSizeClasses];
};

}  // namespace ringtrain
#endif  // RINGTRAIN_OBSERVE_TRAFFIC_H_
