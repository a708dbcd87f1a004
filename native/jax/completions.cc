#include "jax/completions.h"

#include <pthread.h>

#include <exception>
#include <thread>
#include <utility>

namespace ringtrain::jax {

Completions& Completions::Get() {
  static Completions* const completions = new Completions;
  return *completions;
}

// Some stay for ever once there have been any.
bool Completions::Ready() {
  std::lock_guard<std::mutex> lock(mutex_);
  return threads_ > 0 || StartThread();
}

bool Completions::StartThread() {
  try {
    std::thread(&Completions::Work, this).detach();
  } catch (const std::exception&) {  // none is to be had, or no memory
    return false;
  }
  ++threads_;
  ++idle_;
  return true;
}

// A thread for each completion that waits, beyond those that are free; without one those that there are come to it.
void Completions::Add(std::function<void()> completion) {
  std::unique_lock<std::mutex> lock(mutex_);
  queue_.push_back(std::move(completion));
  if (static_cast<int>(queue_.size()) > idle_) StartThread();
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
    if (idle_ >= kIdle && queue_.empty()) break;
    ++idle_;
  }
  --threads_;
}

}  // namespace ringtrain::jax
