// Monotonic time in nanoseconds, and deadlines made of it.
#ifndef RINGTRAIN_BASE_CLOCK_H_
#define RINGTRAIN_BASE_CLOCK_H_

#include <time.h>

#include <cstdint>
#include <limits>

namespace ringtrain {

using Nanoseconds = int64_t;

constexpr Nanoseconds kSecond = INT64_C(1000000000);

inline Nanoseconds Now() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * kSecond + now.tv_nsec;
}

constexpr Nanoseconds kNever = std::numeric_limits<Nanoseconds>::max();

// `seconds` from now; a year or more is never.
inline Nanoseconds DeadlineAfter(double seconds) {
  return seconds > 3e7 ? kNever : Now() + static_cast<Nanoseconds>(seconds * 1e9);
}

}  // namespace ringtrain
#endif  // RINGTRAIN_BASE_CLOCK_H_
