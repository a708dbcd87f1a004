// Where futures of XLA's are completed: on threads of this library. Whoever completes a future goes on with the
// program, by XLA's rules: it computes what comes next, calls back into Python, even waits for another operation. The
// core's thread, on which operations end, must do none of that.
#ifndef RINGTRAIN_JAX_COMPLETIONS_H_
#define RINGTRAIN_JAX_COMPLETIONS_H_

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>

namespace ringtrain::jax {

class Completions {
 public:
  // One in each process. Never destroyed: XLA's threads outlive static objects.
  static Completions& Get();

  // Whether there is a thread, which one must ask before anything is to be completed.
  bool Ready();
  // Runs it soon, beside all others: one that waits for another never keeps that from running.
  void Add(std::function<void()> completion);

 private:
  static constexpr int kIdle = 2;  // threads that wait for more; others end

  bool StartThread();
  void Work();

  std::mutex mutex_;
  std::condition_variable added_;
  std::deque<std::function<void()>> queue_;  // guarded by mutex_, like the next
  int idle_ = 0;                             // threads that wait, or are about to look at the queue
  int threads_ = 0;
};

}  // namespace ringtrain::jax
#endif  // RINGTRAIN_JAX_COMPLETIONS_H_
