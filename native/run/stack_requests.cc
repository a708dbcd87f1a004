#include "run/stack_requests.h"

#include <signal.h>
#include <sys/ioctl.h>
#include <unistd.h>

namespace ringtrain {
namespace {

// On a busy machine Python needs a while for its stacks, and faulthandler beside running threads may crash.
constexpr Nanoseconds kPatience = 5 * kSecond;

}  // namespace

// Whoever reads stderr may have stopped reading.
void StackRequests::Ask(const std::string& awaited) {
  const int pipe = pipe_.load();
  if (pipe < 0 || signal_ == 0) return;
  const std::string text = "ringtrain: the other ranks wait for " + awaited + ", which rank " + std::to_string(rank_) +
                           " has not submitted. Its Python is here:\n";
  const auto show = [text, pipe, insists_at = insists_at_] {
    if (write(STDERR_FILENO, text.data(), text.size()) >= 0 && write(pipe, "s", 1) == 1)
      insists_at->store(Now() + kPatience);
    return std::string();
  };
  writer_->Do("stacks for " + awaited, show, [](const std::string&) {});
}

// A signal's handler needs no lock of the interpreter, which a busy thread may keep. Without a handler it would end the
// process.
void StackRequests::Insist() {
  const Nanoseconds at = insists_at_->load(std::memory_order_relaxed);
  if (at == kNever || Now() < at) return;
  insists_at_->store(kNever);
  int unread = 0;
  if (ioctl(pipe_.load(), FIONREAD, &unread) != 0 || unread == 0) return;
  struct sigaction action;
  const int number = static_cast<int>(signal_);
  if (sigaction(number, nullptr, &action) == 0 && action.sa_handler != SIG_DFL && action.sa_handler != SIG_IGN)
    kill(getpid(), number);
}

}  // namespace ringtrain
