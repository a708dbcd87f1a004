// Context: one rank of one world, and owner of everything that belongs to it: what ends with the world is one object,
// its epoch (epoch.h), and what could outlast it lies beside that. N contexts in one process are N ranks.
// Any thread submits and waits; driver.h tells which thread moves the work.
#ifndef RINGTRAIN_RUN_CONTEXT_H_
#define RINGTRAIN_RUN_CONTEXT_H_

#include <memory>
#include <string>
#include <vector>

#include "base/counters.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/options.h"
#include "base/writer.h"
#include "observe/timeline.h"
#include "run/driver.h"
#include "run/epoch.h"
#include "run/submission.h"
#include "transport/rendezvous.h"

namespace ringtrain {

class Context {
 public:
  // Blocks until all ranks of the rendezvous have called, or start_timeout_seconds.
  static Status Open(Rendezvous& rendezvous, const Options& options, std::shared_ptr<Context>* context);
  // Of a rank that has met the others.
  static Status Open(const Options& options, Meeting meeting, std::shared_ptr<Context>* context);
  ~Context();

  const World& world() const { return epoch_.world(); }
  std::vector<int> ProcessSetRanks(int process_set) const { return epoch_.process_sets().Members(process_set); }
  int ProcessSetHosts(int process_set) const;
  const Counters& counters() const { return counters_; }
  const LatenessTable& lateness() const { return lateness_; }
  const TrafficTable& traffic() const { return traffic_; }
  // As JSON.
  std::string FlightRecord() const;
  std::string Lines() const { return transport_->Lines(); }
  Log& log() { return log_; }
  Residuals& residuals() { return epoch_.residuals(); }
  Status StartTimeline(const std::string& path, bool mark_cycles);
  Status StopTimeline();

  // refusal: why the caller refuses it, if it does; it comes back, and the peers get it too.
  Status Submit(std::shared_ptr<Submission> submission, const Status& refusal, bool caller_waits);
  // Returns when the operation is done or the deadline has passed.
  void Wait(Handle& handle, Nanoseconds deadline) { driver_.Wait(handle, deadline); }
  // Memory of a GPU, which Device::Free takes back.
  Status AllocateOn(int device, size_t bytes, void** memory);
  Status ReadFrom(int device, void* stream, const void* from, size_t bytes, void* to);
  void Abort(const std::string& cause);
  Suspects suspects() { return epoch_.loop().suspects(); }
  void AskThrough(int pipe) {
    log_.AskThrough(pipe);
    epoch_.loop().AskThrough(pipe);
  }
  void LongPhase(double seconds);
  void AwaitStateFrom(int first) { epoch_.loop().AwaitStateFrom(first); }
  // Says goodbye, serves the others until all have or the time is over (shutdown_timeout_seconds), and ends.
  // Not ok if the world had failed: some rank may never come to its end.
  Status Close(double seconds);
  Status Close() { return Close(options_.shutdown_timeout_seconds); }

 private:
  Context(const Options& options, Meeting meeting);
  Status Begin();
  Status CloseBehindDriver(Nanoseconds deadline, const Status& last);

  const Options options_;
  Counters counters_;
  LatenessTable lateness_;
  Log log_;
  Writer writer_;
  Timeline timeline_{&writer_};
  TrafficTable traffic_;
  DeviceTable devices_;
  SubmissionTable table_;
  const Books books_{options_, &table_, &counters_, &lateness_, &timeline_, &traffic_, &log_, &writer_};
  std::unique_ptr<Transport> transport_;
  Epoch epoch_;  // its loop is the driver's; here only what any thread may call
  ContextDriver driver_;
  Mutex close_mutex_;
  bool closed_ RT_GUARDED_BY(close_mutex_) = false;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_RUN_CONTEXT_H_
