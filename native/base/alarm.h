// Alarm: ends the process with a sentence if something takes too long that nobody can interrupt, such as a library's
// call that waits for other processes while it keeps the caller's locks. rt_alarm_set makes one.
#ifndef RINGTRAIN_BASE_ALARM_H_
#define RINGTRAIN_BASE_ALARM_H_

#include <unistd.h>

#include <chrono>
#include <future>
#include <string>
#include <thread>

namespace ringtrain {

class Alarm {
 public:
  // Destroyed within so many seconds it does nothing; else the text goes to stderr, and the exit code is 1 (2 without a
  // stderr).
  Alarm(double seconds, std::string text) : thread_(&Alarm::Run, cancel_.get_future(), seconds, std::move(text)) {}
  ~Alarm() {
    cancel_.set_value();
    thread_.join();
  }
  Alarm(const Alarm&) = delete;
  Alarm& operator=(const Alarm&) = delete;

 private:
  static void Run(std::future<void> cancelled, double seconds, const std::string& text) {
    if (cancelled.wait_for(std::chrono::duration<double>(seconds)) == std::future_status::ready) return;
    const bool said = write(STDERR_FILENO, text.data(), text.size()) >= 0;
    _exit(said ? 1 : 2);
  }

  std::promise<void> cancel_;
  std::thread thread_;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_BASE_ALARM_H_
