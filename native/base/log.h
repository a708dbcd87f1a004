// Log: lines for a person, kept until Python fetches them into its own logging. Native code prints nothing.
#ifndef RINGTRAIN_BASE_LOG_H_
#define RINGTRAIN_BASE_LOG_H_

#include <deque>
#include <string>

#include "base/mutex.h"

namespace ringtrain {

class Log {
 public:
  void Warning(const std::string& text) { Add("warning|" + text); }
  void Info(const std::string& text) { Add("info|" + text); }

  // False if there is no line.
  bool Next(std::string* line) {
    MutexLock lock(mutex_);
    if (lines_.empty()) return false;
    *line = std::move(lines_.front());
    lines_.pop_front();
    return true;
  }

 private:
  static constexpr size_t kMostLines = 1000;  // nobody fetches: keep the first ones, they tell the cause

  void Add(std::string line) {
    MutexLock lock(mutex_);
    if (lines_.size() < kMostLines) lines_.push_back(std::move(line));
  }

  Mutex mutex_;
  std::deque<std::string> lines_ RT_GUARDED_BY(mutex_);
};

}  // namespace ringtrain
#endif  // RINGTRAIN_BASE_LOG_H_
