#include "run/abort_request.h"

#include <new>

namespace ringtrain {

void AbortRequest::Make(const std::string& cause) {
  MutexLock lock(mutex_);
  if (made_.load(std::memory_order_relaxed)) return;
  try {
    cause_ = cause;
  } catch (const std::bad_alloc&) {  // it ends without
  }
  made_.store(true, std::memory_order_release);
}

std::string AbortRequest::cause() const {
  MutexLock lock(mutex_);
  return cause_;
}

}  // namespace ringtrain
