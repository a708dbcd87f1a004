// Context: one rank of one world, and owner of everything that belongs to it. N contexts in one process are N ranks.
//
// Threads. Any thread submits and waits. The coordinator's state is moved by one thread at a time, the driver: a thread that
// waits for an operation drives if nobody does, which saves waking another; else the context's own thread does, which sleeps
// while nothing is pending here but for one look a second.
#ifndef RINGTRAIN_CORE_CONTEXT_H_
#define RINGTRAIN_CORE_CONTEXT_H_

#include <atomic>
#include <memory>
#include <string>
#include <thread>

#include "base/counters.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/options.h"
#include "core/coordinator.h"
#include "core/submission.h"
#include "core/timeline.h"
#include "transport/in_process.h"
#include "transport/world.h"

namespace ringtrain {

class Context {
 public:
  // Both block until all ranks have called, or the start timeout.
  static Status OpenInProcess(const std::shared_ptr<Hub>& hub, int rank, const std::string& options, std::shared_ptr<Context>* context);
  static Status OpenMpi(const std::string& library, uintptr_t communicator, const std::string& options,
                        std::shared_ptr<Context>* context);
  ~Context();

  const World& world() const { return world_; }
  std::vector<int> ProcessSetRanks(int process_set) const { return process_sets_.Members(process_set); }
  const Counters& counters() const { return counters_; }
  const LatenessTable& lateness() const { return lateness_; }
  Log& log() { return log_; }
  Status StartTimeline(const std::string& path);
  Status StopTimeline();

  // refusal: why the caller refuses it; the text comes back, and the peers get it too.
  Status Submit(std::shared_ptr<Submission> submission, const std::string& refusal, bool caller_waits);
  // Returns when the operation is done or the deadline has passed.
  void Wait(Handle& handle, Nanoseconds deadline);
  // Memory of a GPU, which Device::Free takes back.
  Status AllocateOn(int device, size_t bytes, void** memory);
  Status ReadFrom(int device, void* stream, const void* from, size_t bytes, void* to);
  void Abort(const std::string& cause) RT_NOT_ANALYSED;  // passes a request on, which any thread may do; so do the next two
  void AskThrough(int pipe) RT_NOT_ANALYSED { coordinator_->AskThrough(pipe); }
  void LongPhase(double seconds) RT_NOT_ANALYSED;
  // Says goodbye, serves the others until all have or the time is over (shutdown_timeout_seconds), and ends.
  // Not ok if the world had failed: some rank may never come to its end.
  Status Close(double seconds);
  Status Close() { return Close(options_.shutdown_timeout_seconds); }

 private:
  Context() = default;
  static Status Open(std::shared_ptr<Context> context, std::vector<int> layout, std::shared_ptr<Context>* opened);
  Status AgreeOnStart(Nanoseconds deadline);
  void ChooseSpin();
  Status CheckSubmission(const Submission& submission, const std::vector<int>& members) const;
  Status CheckAddition(const Request& request) const;
  // Notes, on the submitter's streams, from when on its tensors may be read and written.
  Status MarkReady(Submission* submission);
  Status CheckRemoval(const Request& request) const;

  void WaitOn(Handle& handle, Nanoseconds deadline);
  void Announce(bool caller_waits, bool urgent, int64_t bytes);
  void RunThread();
  void Gather();
  void StopLooking();
  void Leave(Nanoseconds* deadline);
  void WakeThread(bool urgent);
  // Drives until `finished()` or the deadline.
  template <typename Finished>
  void Drive(Finished finished, Nanoseconds deadline) RT_REQUIRES(drive_mutex_);
  Doorbell& doorbell() const { return memory_->doorbell(world_.local_rank()); }

  Options options_;
  World world_;
  Counters counters_;
  LatenessTable lateness_;
  Log log_;
  Timeline timeline_;
  std::unique_ptr<DeviceTable> devices_;
  SubmissionTable table_;
  ProcessSetTable process_sets_;
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<HostMemory> memory_;
  Nanoseconds spin_ = 0;  // how long the driver looks again before it sleeps

  Mutex drive_mutex_;                         // held by the driver
  std::unique_ptr<Coordinator> coordinator_ RT_PT_GUARDED_BY(drive_mutex_);
  std::atomic<bool> driven_{false};           // somebody drives, perhaps asleep on the doorbell
  std::atomic<uint32_t> parked_{0};           // futex of the context's thread; changes when there is work for it
  std::atomic<bool> urgent_{false};           // the thread was woken for something that must not wait
  std::atomic<Nanoseconds> looks_by_{0};      // somebody will have looked for news by then without being called
  std::atomic<int64_t> gathered_bytes_{0};    // submitted since somebody was called
  std::atomic<bool> stop_{false};             // no thread but the one that closes drives from now on
  std::atomic<bool> left_{false};             // this rank serves nobody any more
  Mutex close_mutex_;
  bool closed_ RT_GUARDED_BY(close_mutex_) = false;
  std::thread thread_;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_CORE_CONTEXT_H_
