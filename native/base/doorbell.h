// Doorbell: one futex word on which a context's driver sleeps, whatever it waits for.
//
// Peers (threads of this process, or processes that map the same memory) publish something and ring. Ringing costs one
// fence and one load while the owner is awake, so it may follow every chunk. The word may lie in shared memory; all
// zero is its start.
//   owner:  ticket = PrepareSleep(); look once more; if nothing, Sleep(ticket, ...), else CancelSleep().
//   peer:   publish with release; Ring().
#ifndef RINGTRAIN_BASE_DOORBELL_H_
#define RINGTRAIN_BASE_DOORBELL_H_

#include <atomic>
#include <cstdint>

#include "base/clock.h"

namespace ringtrain {

// Sleeps while *word == expected, until woken or the deadline. Spurious returns are allowed.
void FutexWait(std::atomic<uint32_t>* word, uint32_t expected, Nanoseconds deadline);
void FutexWake(std::atomic<uint32_t>* word, int waiters);

class alignas(64) Doorbell {
 public:
  void Ring() {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (sleeping_.load(std::memory_order_relaxed) != 0) Wake();
  }

  uint32_t PrepareSleep() {
    uint32_t ticket = rings_.load(std::memory_order_relaxed);
    sleeping_.store(1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    return ticket;
  }
  // Whether the owner has announced that it will sleep, and has not been woken; for whoever could do its work
  // meanwhile.
  bool owner_sleeps() const { return sleeping_.load(std::memory_order_relaxed) != 0; }
  void CancelSleep() { sleeping_.store(0, std::memory_order_relaxed); }
  void Sleep(uint32_t ticket, Nanoseconds deadline) {
    FutexWait(&rings_, ticket, deadline);
    CancelSleep();
  }

 private:
  void Wake();

  std::atomic<uint32_t> rings_{0};
  std::atomic<uint32_t> sleeping_{0};
};

static_assert(std::atomic<uint32_t>::is_always_lock_free, "futex words are plain words");

}  // namespace ringtrain
#endif  // RINGTRAIN_BASE_DOORBELL_H_
