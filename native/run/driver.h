// ContextDriver: who moves a rank's loop, when that thread sleeps, and who wakes it.
//
// The loop is moved by one thread at a time, the one that holds the drive mutex. A thread that waits for an
// operation drives if nobody does, which saves waking another one. Else the context's own thread drives; it parks while
// nothing is pending here, and looks once in each idle period (a second at most).
//
// Whoever drives sleeps on the rank's doorbell, which peers, the wire and submitters ring. The context's thread parks
// on a futex of its own, parked_.
//
// Poll promises save wake-ups. A thread that is about to look for news anyway stores in polls_by_ the time until which
// it will have done so; until then a submitter of a small operation calls nobody. The order is what makes it safe:
//   submitter: put the news into the table; fence; read polls_by_.
//   promiser:  set polls_by_ to 0 (CancelPollPromise); fence; look into the table.
// At least one of the two sees what the other wrote, so no news is left behind.
#ifndef RINGTRAIN_RUN_DRIVER_H_
#define RINGTRAIN_RUN_DRIVER_H_

#include <atomic>
#include <thread>

#include "base/clock.h"
#include "base/counters.h"
#include "base/mutex.h"
#include "base/options.h"
#include "observe/timeline.h"
#include "run/epoch.h"
#include "run/spinning.h"
#include "run/submission.h"
#include "transport/progress.h"

namespace ringtrain {

// Bytes of small operations that leave together: from so many on they wait no longer for others.
constexpr int64_t kBurstBytes = 1 << 20;

class ContextDriver {
 public:
  ContextDriver(const Books& books, Progress& progress, Epoch* epoch);
  ~ContextDriver();
  // Lets the wire ring, starts the context's thread, and returns when the rank's life sign has begun in it: a waiting
  // thread may drive from then on, and whatever it begins others must be able to see end.
  Status Start(int rank);

  // News of `bytes` is in the submission table: has it taken, at once or by whoever has promised to poll soon.
  // urgent: it shall not wait for others to come along. caller_waits: Wait follows at once.
  void OnNews(bool caller_waits, bool urgent, int64_t bytes);
  // News of the handle is in the submission table, which a step of the loop may end at once, such as a small tensor to
  // another rank: makes the step if nobody drives. As OnNews if that did not end it.
  void TryNews(const Handle& handle, bool caller_waits);
  // Something else than news asks for a step of the loop: it is driven at once.
  void Call();
  // Returns when the operation is done or the deadline has passed; drives meanwhile if nobody else does.
  void Wait(Handle& handle, Nanoseconds deadline);

  // From now on only the calling thread drives. Says goodbye, serves the others until all have left or the deadline has
  // passed, and ends the context's thread. Returns the deadline for what remains to be done, which is earlier if the
  // wait was long. Once only.
  Nanoseconds Leave(Nanoseconds deadline);
  // Runs it while nobody drives.
  template <typename Action>
  void WhileNobodyDrives(const Action& action) {
    MutexLock lock(drive_mutex_);
    action(*loop_);
  }

 private:
  void RunThread();
  void WaitOn(Handle& handle, Nanoseconds deadline);
  // Drives until `finished()` or the deadline.
  template <typename Finished>
  void Drive(Finished finished, Nanoseconds deadline, Spinning* spinning) RT_REQUIRES(drive_mutex_);
  RankLoop& driven() RT_REQUIRES(drive_mutex_) { return *loop_; }
  void Serve(Nanoseconds* deadline);
  void EndThread();
  void CoalesceSubmissions();
  void CancelPollPromise();
  void WakeThread(bool urgent);

  const Options& options_;
  Progress& progress_;
  Doorbell& doorbell_;
  LifeSign& life_;
  SubmissionTable* const table_;
  Counters* const counters_;
  Timeline* const timeline_;

  Mutex drive_mutex_;  // held by whoever drives
  Spinning of_waiters_ RT_GUARDED_BY(drive_mutex_);
  Spinning of_thread_ RT_GUARDED_BY(drive_mutex_);
  RankLoop* const loop_ RT_PT_GUARDED_BY(drive_mutex_);
  std::atomic<bool> driven_{false};         // somebody drives, perhaps asleep on the doorbell
  std::atomic<uint32_t> parked_{0};         // futex of the context's thread; changes when there is work for it
  std::atomic<bool> urgent_{false};         // the thread was woken for something that must not wait
  std::atomic<Nanoseconds> polls_by_{0};    // poll promise: a thread will have looked for news by then
  std::atomic<int64_t> gathered_bytes_{0};  // submitted since a driver was last called
  std::atomic<uint32_t> lives_{0};          // futex; 1 once the life sign has begun
  std::atomic<bool> stop_{false};           // only the thread in Leave drives from now on
  std::atomic<bool> left_{false};           // this rank serves nobody any more
  std::thread thread_;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_RUN_DRIVER_H_
