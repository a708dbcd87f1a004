// Suspicions: with which ranks this one finds fault, for the launcher, which may stop this world at any moment for what
// another rank has found before. The driver's thread tells; any thread asks.
#ifndef RINGTRAIN_RUN_SUSPICIONS_H_
#define RINGTRAIN_RUN_SUSPICIONS_H_

#include <vector>

#include "base/clock.h"
#include "base/mutex.h"
#include "world/protocol.h"

namespace ringtrain {

// Ranks with which this one finds fault; another host by its lowest rank, which speaks for it.
struct Suspects {
  std::vector<int> silent;  // it has found the world to have ended by their silence
  std::vector<int>
      unheard;  // it had not heard them for half of that bound when it looked last; itself, if it was stopped
  std::vector<int> missing;  // an operation has waited for them until it was given up
};

class Suspicions {
 public:
  // It has looked who lives.
  void Looked(const Protocol& protocol, Nanoseconds now);
  // The world has ended: it will not look again.
  void LooksNoMore();
  // An operation has waited for these ranks until it was given up.
  void Missing(std::vector<int> ranks);
  // As `rank` finds them.
  Suspects Of(int rank, const Protocol& protocol) const;

 private:
  mutable Mutex mutex_;
  Suspects suspects_ RT_GUARDED_BY(mutex_);
  Nanoseconds looked_at_ RT_GUARDED_BY(mutex_) = kNever;  // last, while the world runs
};

}  // namespace ringtrain
#endif  // RINGTRAIN_RUN_SUSPICIONS_H_
