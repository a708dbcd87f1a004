// Log: lines for a person, kept until Python fetches them into its own logging. Native code prints nothing. A warning
// asks for that at once: the program may be busy with something else, and somebody waits to know.
#ifndef RINGTRAIN_BASE_LOG_H_
#define RINGTRAIN_BASE_LOG_H_

#include <unistd.h>

#include <atomic>
#include <deque>
#include <string>

#include "base/mutex.h"

namespace ringtrain {

class Log {
 public:
  void Warning(const std::string& text) {
    Add("warning|" + text);
    AskToFetch();
  }
  void Info(const std::string& text) { Add("info|" + text); }

  // Where to ask Python to fetch what there is (rt_ask_through); any thread.
  void AskThrough(int pipe) {
    pipe_.store(pipe);
    AskToFetch();  // what has been said before
  }
  // False if there is no line.
  bool Next(std::string* line) {
    MutexLock lock(mutex_);
    if (lines_.empty()) return false;
    *line = std::move(lines_.front());
    lines_.pop_front();
    return true;
  }

 private:
  static constexpr size_t kMaxLines = 1000;  // nobody fetches: keep the first ones, they tell the cause

  void Add(std::string line) {
    MutexLock lock(mutex_);
    if (lines_.size() < kMaxLines) lines_.push_back(std::move(line));
  }

  void AskToFetch() {
    const int pipe = pipe_.load();
    if (pipe < 0) return;
    [[maybe_unused]] const ssize_t written = write(pipe, "l", 1);  // full: it has been asked
  }

  std::atomic<int> pipe_{-1};
  Mutex mutex_;
  std::deque<std::string> lines_ RT_GUARDED_BY(mutex_);
};

}  // namespace ringtrain
#endif  // RINGTRAIN_BASE_LOG_H_
