// Arrivals: what has come from other ranks and waits for the driver: frames, and losses, each behind the last frame of
// the rank that was lost. Any thread.
#ifndef RINGTRAIN_TRANSPORT_TCP_ARRIVALS_H_
#define RINGTRAIN_TRANSPORT_TCP_ARRIVALS_H_

#include <atomic>
#include <deque>
#include <string>
#include <utility>

#include "base/mutex.h"
#include "transport/wire.h"

namespace ringtrain {

class Arrivals {
 public:
  void Put(int from, std::string frame);
  void PutLost(LostPeer lost);
  bool TakeFrame(int* from, std::string* frame);
  bool TakeLost(LostPeer* told);

 private:
  Mutex mutex_;
  std::deque<std::pair<int, std::string>> frames_ RT_GUARDED_BY(mutex_);
  std::deque<LostPeer> lost_ RT_GUARDED_BY(mutex_);
  std::atomic<int> arrived_{0};  // how many frames there are
  std::atomic<bool> any_lost_{false};
};

}  // namespace ringtrain
#endif  // RINGTRAIN_TRANSPORT_TCP_ARRIVALS_H_
