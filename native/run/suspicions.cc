#include "run/suspicions.h"

#include <utility>

namespace ringtrain {

void Suspicions::Looked(const Protocol& protocol, Nanoseconds now) {
  MutexLock lock(mutex_);
  suspects_.unheard = protocol.Unheard(now);
  looked_at_ = now;
  if (protocol.aborted()) suspects_.silent = protocol.Silent(now);
}

void Suspicions::LooksNoMore() {
  MutexLock lock(mutex_);
  looked_at_ = kNever;
}

void Suspicions::Missing(std::vector<int> ranks) {
  MutexLock lock(mutex_);
  suspects_.missing = std::move(ranks);
}

Suspects Suspicions::Of(int rank, const Protocol& protocol) const {
  MutexLock lock(mutex_);
  Suspects found = suspects_;
  // It wakes just now: its driver has not looked yet.
  if (looked_at_ != kNever && protocol.IsMissed(Now() - looked_at_)) found.unheard = {rank};
  return found;
}

}  // namespace ringtrain
