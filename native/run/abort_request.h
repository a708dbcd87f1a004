// AbortRequest: any thread asks for the end of the world, and the driver finds out why. The first one counts.
#ifndef RINGTRAIN_RUN_ABORT_REQUEST_H_
#define RINGTRAIN_RUN_ABORT_REQUEST_H_

#include <atomic>
#include <string>

#include "base/mutex.h"

namespace ringtrain {

class AbortRequest {
 public:
  void Make(const std::string& cause);
  bool made() const { return made_.load(std::memory_order_acquire); }
  std::string cause() const;

 private:
  mutable Mutex mutex_;
  std::atomic<bool> made_{false};
  std::string cause_ RT_GUARDED_BY(mutex_);
};

}  // namespace ringtrain
#endif  // RINGTRAIN_RUN_ABORT_REQUEST_H_
