// LifeSign: how the ranks of a host see that another of them lives. One in each rank's place in the shared memory.
//
// Two signs. The kernel's: the owner holds a robust lock for as long as it lives, and the kernel lets go of it however
// the process ends; process ids alone would not do, since they mean nothing between containers (peer_process.h has what
// they tell where they do). The owner's own: a beat, which stops when the process is stopped or its machine hangs. All
// zeros, as fresh memory is, is a rank that has not begun.
#ifndef RINGTRAIN_TRANSPORT_LIFE_SIGN_H_
#define RINGTRAIN_TRANSPORT_LIFE_SIGN_H_

#include <pthread.h>

#include <atomic>
#include <cstdint>

namespace ringtrain {

class LifeSign {
 public:
  // The owner, in a thread that lives as long as the rank; End in the same thread, when the rank leaves of its own
  // will.
  void Begin();
  void End();
  void Beat() { beats_.fetch_add(1, std::memory_order_relaxed); }

  // The others.
  uint32_t beats() const { return beats_.load(std::memory_order_relaxed); }
  bool left() const { return state_.load(std::memory_order_acquire) == kLeft; }
  // Its process has ended, and the rank had not left before.
  bool Died();

 private:
  static constexpr uint32_t kUnborn = 0, kAlive = 1, kLeft = 2, kDead = 3;
  std::atomic<uint32_t> state_;
  std::atomic<uint32_t> beats_;
  pthread_mutex_t held_;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_TRANSPORT_LIFE_SIGN_H_
