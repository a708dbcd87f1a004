// Spinning: whether a driver that waits looks again for a while before it sleeps. Pure: it is told how its looks ended.
//
// To sleep and be woken costs two switches of threads and more latency than most waits for a small tensor take; to look
// again in vain costs the time of it, and more where the one who is waited for needs this core: so when the system has
// put two ranks on one core, or all cores have other work. Which it is shows in how the looks end.
#ifndef RINGTRAIN_RUN_SPINNING_H_
#define RINGTRAIN_RUN_SPINNING_H_

#include <algorithm>

#include "base/clock.h"

namespace ringtrain {

class Spinning {
 public:
  // longest: of a look, in nanoseconds; 0: none. always: whatever the looks are good for.
  Spinning(Nanoseconds longest, bool always) : longest_(longest), always_(always) {}

  // A wait begins. Returns how long to look again; 0: not at all.
  Nanoseconds Begin() {
    if (always_ || credit_ > 0) return longest_;
    if (++passed_ < kPassed) return 0;
    passed_ = 0;
    return longest_;
  }

  // The look has ended: something has come, or nothing has.
  void Ended(bool came) { credit_ = came ? std::min(credit_ + 1, kMost) : std::max(credit_ - kPrice, 0); }

 private:
  static constexpr int kMost = 8, kPrice = 3;  // three of four looks must be good for something
  static constexpr int kPassed = 16;           // without credit only one wait in so many begins with a look

  const Nanoseconds longest_;
  const bool always_;
  int credit_ = kMost;
  int passed_ = 0;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_RUN_SPINNING_H_
