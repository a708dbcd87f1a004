#include "jax/completions.h"

#include <pthread.h>

#include <system_error>
#include <thread>
#include <utility>

namespace ringtrain::jax {

Completions& Completions::Get() {
  static Completions* const completions = new Completions;
  return *completions;
}

// A thread for each completion that waits, beyond those that are free.
void Completions::Add(std::function<void()> completion) {
  std::unique_lock<std::mutex> lock(mutex_);
  queue_.push_back(std::move(completion));
  if (static_cast<int>(queue_.size()) > idle_) {
    try {
      std::thread(&Completions::Work, this).detach();
      ++idle_;
    } catch (const std::system_error&) {
      // The threads that there are come to it.
    }
  }
  lock.unlock();
  added_.notify_one();
}

void Completions::Work() {
  pthread_setname_np(pthread_self(), "ringtrain-jax");
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    added_.wait(lock, [this] { return !queue_.empty(); });
    const std::function<void()> completion = std::move(queue_.front());
    queue_.pop_front();
    --idle_;
    lock.unlock();
    completion();
    lock.lock();
    if (idle_ >= kIdle && queue_.empty()) return;
    ++idle_;
  }
}

}  // namespace ringtrain::jax
