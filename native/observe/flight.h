// Flight: the last operations that have ended on a rank, remembered for whoever asks later why its world has ended.
//
// What is pending needs no memory of its own: the submission table has it, however many have ended since. So an
// operation is written down once, whole, when it ends, in a ring that lies under the table's lock, which is held then
// anyway: no lock and no allocation comes on top.
#ifndef RINGTRAIN_OBSERVE_FLIGHT_H_
#define RINGTRAIN_OBSERVE_FLIGHT_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "tables/tables.h"

namespace ringtrain {

// One operation of this rank, pending or ended. Times are 0 for what has not come yet.
struct FlownOperation {
  static constexpr int kExtents = 6;

  uint64_t number = 0;        // among this rank's submissions, from 1
  uint64_t agreed = 0;        // among the data operations of its process set, from 1, equal on all members; 0: not yet
  Nanoseconds submitted = 0;  // here
  Nanoseconds announced = 0;  // to the coordinator
  Nanoseconds started = 0;    // agreed on: all have submitted it
  Nanoseconds finished = 0;   // with tensors on a GPU: all is on its queue
  int64_t bytes = 0;          // of all its tensors
  int64_t extents[kExtents]{};  // of the first tensor
  int32_t process_set = 0, root = 0, tensors = 0;
  Operation operation = Operation::kAllreduce;
  Reduction reduction = Reduction::kAverage;
  DType dtype = DType::kFloat32;  // of the first tensor
  int32_t dimensions = 0;         // of it; may be more than kExtents
  StatusCode status = StatusCode::kPending;
  char name[128]{};  // its end, behind dots, where it is longer

  void SetName(const std::string& text) {
    constexpr char kDots[] = "...";
    const bool fits = text.size() < sizeof name;
    const size_t dots = fits ? 0 : sizeof kDots - 1, kept = std::min(text.size(), sizeof name - 1 - dots);
    std::memcpy(name, kDots, dots);
    std::memcpy(name + dots, text.data() + text.size() - kept, kept);
    name[dots + kept] = '\0';
  }
};

// The newest of those that have ended; whose it is sees to the lock.
class FlightRing {
 public:
  explicit FlightRing(size_t capacity) : capacity_(capacity) { ended_.reserve(capacity); }

  // Forgets the oldest if need be.
  void Add(const FlownOperation& operation) {
    if (capacity_ == 0) return;
    if (ended_.size() < capacity_) return ended_.push_back(operation);
    ended_[oldest_] = operation;
    oldest_ = (oldest_ + 1) % capacity_;
  }
  bool remembers() const { return capacity_ > 0; }
  // In no order.
  const std::vector<FlownOperation>& ended() const { return ended_; }

 private:
  const size_t capacity_;
  size_t oldest_ = 0;  // once it is full
  std::vector<FlownOperation> ended_;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_OBSERVE_FLIGHT_H_
