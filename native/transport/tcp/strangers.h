// Strangers: what is said of those who were turned away at the door. The first one at once, then at most a line a
// minute, with how many there have been since. Pure: time goes in, lines come out.
#ifndef RINGTRAIN_TRANSPORT_TCP_STRANGERS_H_
#define RINGTRAIN_TRANSPORT_TCP_STRANGERS_H_

#include <string>
#include <utility>

#include "base/clock.h"

namespace ringtrain {

class Strangers {
 public:
  static constexpr Nanoseconds kPeriod = 60 * kSecond;

  void TurnedAway(std::string from, const char* reason) {
    ++untold_;
    last_ = std::move(from) + ", which " + reason;
  }
  // When the next line is due: kNever while there is nobody to tell of.
  Nanoseconds due() const { return untold_ > 0 ? next_line_ : kNever; }
  // The line that is due by now, "" if none is. last: no other follows.
  std::string Line(Nanoseconds now, int rank, bool last = false) {
    if (untold_ == 0 || (now < next_line_ && !last)) return "";
    next_line_ = now + kPeriod;
    return "rank " + std::to_string(rank) + ": connections must be of this job, but " +
           std::to_string(std::exchange(untold_, 0)) + " turned away were not, the last from " + last_ + ".";
  }

 private:
  int untold_ = 0;
  std::string last_;
  Nanoseconds next_line_ = 0;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_TRANSPORT_TCP_STRANGERS_H_
