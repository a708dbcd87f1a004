// Where a thread is in native code when it crashes, before Python's faulthandler says where it is in Python: what
// crashes once in some hundred runs is not seen again. tests/failures.py loads it into the workers of bin/test.
#include <execinfo.h>
#include <signal.h>

namespace {

constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
constexpr int kFrames = 64;

int file = -1;
struct sigaction others[NSIG];

// The next handler has its turn on return: at the same instruction, or as the signal is raised again.
void Tell(int number, siginfo_t*, void*) {
  void* frames[kFrames];
  backtrace_symbols_fd(frames, backtrace(frames, kFrames), file);
  sigaction(number, &others[number], nullptr);
  raise(number);
}

}  // namespace

// Writes the frames of whichever thread crashes to this file, the innermost first, one a line.
extern "C" __attribute__((visibility("default"))) void tell_crashes(int descriptor) {
  file = descriptor;
  void* frame = nullptr;
  backtrace(&frame, 1);  // loads what it needs, which a handler could not
  struct sigaction action{};
  action.sa_sigaction = &Tell;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (const int number : kSignals) sigaction(number, &action, &others[number]);
}
