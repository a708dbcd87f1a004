// Moment: a point in a stream's work that has passed or not; what an event holds after it was recorded.
//
// It orders whoever sees that it has passed after the work before it, and nobody else, so that ThreadSanitizer knows
// the order that CUDA gives and no other. For the same reason a moment is never freed: a reference count would be an
// order too.
#ifndef RINGTRAIN_TESTS_FAKES_CUDA_MOMENT_H_
#define RINGTRAIN_TESTS_FAKES_CUDA_MOMENT_H_

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

namespace fakes {

class Moment {
 public:
  void Pass() {
    clock_gettime(CLOCK_MONOTONIC, &when_);
    passed_.store(1, std::memory_order_release);
    syscall(SYS_futex, &passed_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
  }
  bool passed() const { return passed_.load(std::memory_order_acquire) != 0; }
  void Wait() {
    while (!passed()) syscall(SYS_futex, &passed_, FUTEX_WAIT_PRIVATE, 0, nullptr, nullptr, 0);
  }
  // Once it has passed.
  double milliseconds() const {
    return 1e3 * static_cast<double>(when_.tv_sec) + 1e-6 * static_cast<double>(when_.tv_nsec);
  }

 private:
  std::atomic<uint32_t> passed_{0};
  timespec when_{};
};

}  // namespace fakes
#endif  // RINGTRAIN_TESTS_FAKES_CUDA_MOMENT_H_
