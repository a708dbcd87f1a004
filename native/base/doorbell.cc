#include "base/doorbell.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

namespace ringtrain {

// Not the private form of the call: the word may be shared between processes.
void FutexWait(std::atomic<uint32_t>* word, uint32_t expected, Nanoseconds deadline) {
  timespec timeout;
  timespec* limit = nullptr;
  if (deadline != kNever) {
    Nanoseconds left = std::max<Nanoseconds>(0, deadline - Now());
    timeout.tv_sec = left / kSecond;
    timeout.tv_nsec = left % kSecond;
    limit = &timeout;
  }
  syscall(SYS_futex, word, FUTEX_WAIT, expected, limit, nullptr, 0);
}

void FutexWake(std::atomic<uint32_t>* word, int waiters) {
  syscall(SYS_futex, word, FUTEX_WAKE, waiters, nullptr, nullptr, 0);
}

void Doorbell::Wake() {
  if (sleeping_.exchange(0, std::memory_order_relaxed) == 0) return;  // another peer is already waking the owner
  rings_.fetch_add(1, std::memory_order_release);
  FutexWake(&rings_, 1);
}

}  // namespace ringtrain
