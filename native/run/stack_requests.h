// StackRequests: asks this process's Python for its stacks when other ranks wait for this one: first by a byte in a
// pipe that a thread of Python reads (rt_ask_through), then, if nobody has read it, by a signal.
#ifndef RINGTRAIN_RUN_STACK_REQUESTS_H_
#define RINGTRAIN_RUN_STACK_REQUESTS_H_

#include <atomic>
#include <memory>
#include <string>

#include "base/clock.h"
#include "base/writer.h"

namespace ringtrain {

class StackRequests {
 public:
  // signal: 0 if none may be asked for.
  StackRequests(int rank, int64_t signal, Writer* writer) : rank_(rank), signal_(signal), writer_(writer) {}

  // Any thread; nothing is asked for before.
  void AskThrough(int pipe) { pipe_.store(pipe); }
  // Others wait for this operation.
  void Ask(const std::string& awaited);
  // By the signal, once that is due.
  void Insist();

 private:
  using Time = std::atomic<Nanoseconds>;

  const int rank_;
  const int64_t signal_;
  Writer* const writer_;
  std::atomic<int> pipe_{-1};
  const std::shared_ptr<Time> insists_at_ = std::make_shared<Time>(kNever);  // the writer's, too
};

}  // namespace ringtrain
#endif  // RINGTRAIN_RUN_STACK_REQUESTS_H_
