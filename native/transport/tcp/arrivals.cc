#include "transport/tcp/arrivals.h"

namespace ringtrain {

void Arrivals::Put(int from, std::string frame) {
  MutexLock lock(mutex_);
  frames_.emplace_back(from, std::move(frame));
  arrived_.fetch_add(1, std::memory_order_release);
}

void Arrivals::PutLost(LostPeer lost) {
  MutexLock lock(mutex_);
  lost_.push_back(std::move(lost));
  any_lost_.store(true, std::memory_order_release);
}

bool Arrivals::TakeFrame(int* from, std::string* frame) {
  if (arrived_.load(std::memory_order_acquire) == 0) return false;
  MutexLock lock(mutex_);
  if (frames_.empty()) return false;
  *from = frames_.front().first;
  *frame = std::move(frames_.front().second);
  frames_.pop_front();
  arrived_.fetch_sub(1);
  return true;
}

bool Arrivals::TakeLost(LostPeer* told) {
  if (!any_lost_.load(std::memory_order_acquire)) return false;
  MutexLock lock(mutex_);
  for (auto lost = lost_.begin(); lost != lost_.end(); ++lost) {
    bool heard = true;
    for (const auto& frame : frames_) heard &= frame.first != lost->rank;
    if (!heard) continue;
    *told = std::move(*lost);
    lost_.erase(lost);
    any_lost_.store(!lost_.empty());
    return true;
  }
  return false;
}

}  // namespace ringtrain
