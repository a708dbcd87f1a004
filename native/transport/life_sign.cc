#include "transport/life_sign.h"

#include <errno.h>

namespace ringtrain {

void LifeSign::Begin() {
  pthread_mutexattr_t shared_and_robust;
  pthread_mutexattr_init(&shared_and_robust);
  pthread_mutexattr_setpshared(&shared_and_robust, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&shared_and_robust, PTHREAD_MUTEX_ROBUST);
  pthread_mutex_init(&held_, &shared_and_robust);
  pthread_mutexattr_destroy(&shared_and_robust);
  pthread_mutex_lock(&held_);
  state_.store(kAlive, std::memory_order_release);
}

void LifeSign::End() {
  state_.store(kLeft, std::memory_order_release);
  pthread_mutex_unlock(&held_);
}

bool LifeSign::Died() {
  if (state_.load(std::memory_order_acquire) != kAlive) return state_.load(std::memory_order_relaxed) == kDead;
  const int found = pthread_mutex_trylock(&held_);
  if (found == EOWNERDEAD) state_.store(kDead, std::memory_order_release);  // the kernel tells only the first who asks
  // Only what was locked: to those who ask behind the first one the lock is beyond recovery, and theirs it never was.
  if (found == 0 || found == EOWNERDEAD) pthread_mutex_unlock(&held_);
  return found == EOWNERDEAD || found == ENOTRECOVERABLE;
}

}  // namespace ringtrain
