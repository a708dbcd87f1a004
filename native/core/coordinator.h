// Coordinator: one rank's side of the work, step by step. Read this file's .cc first: Step shows the way of a tensor in order.
//
// Whoever drives the context calls it, one thread at a time (context.h). It owns the mail, the negotiators and the executor;
// it decides nothing itself, but performs what the negotiators decide.
#ifndef RINGTRAIN_CORE_COORDINATOR_H_
#define RINGTRAIN_CORE_COORDINATOR_H_

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/log.h"
#include "base/mutex.h"
#include "core/executor.h"
#include "core/liveness.h"
#include "core/negotiator.h"
#include "core/process_sets.h"
#include "core/submission.h"
#include "transport/mail.h"

namespace ringtrain {

class Coordinator {
 public:
  Coordinator(const World& world, const Options& options, Transport* transport, HostMemory* memory, SubmissionTable* table,
              ProcessSetTable* process_sets, Counters* counters, LatenessTable* lateness, Timeline* timeline, Log* log);
  ~Coordinator();

  // Does what can be done without waiting. True if anything moved.
  bool Step();

  // Something of this rank is pending: it must be driven until this is false.
  bool HasWork() const;
  // What it waits for cannot ring the doorbell: the driver must look again soon.
  bool MustPoll() const;
  Nanoseconds next_timer() const;
  // How long a rank with nothing pending may sleep before it shows the others that it lives.
  Nanoseconds idle_period() const { return liveness_.idle_period(); }

  // Tells the others that this rank will submit no more (gone: and decides no more); ready_to_close() once nobody waits for anybody.
  void SayGoodbye(bool gone = false);
  bool ready_to_close() const { return all_goodbye_ && !executor_.busy(); }
  // All ranks have said goodbye, so that what is collective may be done.
  bool closed_cleanly() const { return clean_; }
  // This rank waits no longer: those who wait for it fail, and if it is rank 0 nobody need wait for the others either.
  void GiveUpWaiting();

  // Ends the world on all ranks with this cause, unless it has ended already. The driver's thread; any other calls RequestAbort.
  void Abort(const Status& last);
  void RequestAbort(const std::string& cause);
  // Ends this rank's part if this rank or another of its host has asked for an abort; the driver's thread. Step does so first.
  void HeedAbort();

  // Where to ask for what a stall needs of this process's Python (rt_ask_through); any thread.
  void AskThrough(int pipe) { requests_pipe_.store(pipe); }
  // Nobody shall expect this rank for that long. Any thread; the driver passes it on.
  void RequestLongPhase(Nanoseconds duration) { long_phase_.store(duration, std::memory_order_release); }

 private:
  void ReceiveMail(bool* moved);
  void Dispatch(int from, Frame frame);
  void TakeSubmissions(bool* moved);
  void LookForTheDead();
  void TickNegotiators(Nanoseconds now, bool* moved);
  void Feed(int process_set, const Event& event);
  void Perform(int process_set, Effects effects);
  void Perform(int process_set, effect::Send& send);
  void Perform(int process_set, effect::Execute& execute);
  void Perform(int process_set, effect::Fail& fail);
  void Perform(int process_set, effect::Warn& warn);
  void Perform(int process_set, effect::Abort& abort);
  void Perform(int process_set, effect::Count& count);
  void RunControl(int process_set, const Response& response);
  void AddProcessSet(int process_set, const std::vector<int>& members);
  void RemoveProcessSet(int process_set);
  void HearGoodbye(int rank, bool gone);
  void CheckLongPhase();
  bool Ask(char what);
  void ShowStacks(const std::string& awaited);
  void InsistOnStacks();
  std::string RequestedCause();
  Status FirstCause(const Status& cause);
  void Send(int rank, Frame frame);
  void SendBeat(int rank, bool last);
  int MemberOf(int process_set, int rank) const;

  const World& world_;
  const Options& options_;
  Transport* const transport_;
  HostMemory* const memory_;
  SubmissionTable* const table_;
  ProcessSetTable* const process_sets_;
  Counters* const counters_;
  LatenessTable* const lateness_;
  Log* const log_;

  Mail mail_;
  Executor executor_;
  Liveness liveness_;
  std::map<int, Negotiator> negotiators_;                        // by process set, those this rank belongs to
  std::map<int, std::vector<std::pair<int, Frame>>> early_frames_;  // for sets that this rank does not know yet
  int newest_process_set_ = 0;  // ids ascend, on every rank in the same order
  std::vector<std::pair<int, Response>> held_removals_;  // process set of the operation, what it does
  Nanoseconds last_active_ = 0;

  bool aborted_ = false;
  Mutex request_mutex_;
  std::atomic<bool> abort_requested_{false};
  std::string requested_cause_ RT_GUARDED_BY(request_mutex_);
  std::atomic<Nanoseconds> long_phase_{-1};  // asked for and not passed on yet
  std::atomic<int> requests_pipe_{-1};
  Nanoseconds insist_on_stacks_at_ = kNever;

  bool all_goodbye_ = false, clean_ = false;
  std::vector<bool> goodbyes_;  // rank 0: by rank
};

}  // namespace ringtrain
#endif  // RINGTRAIN_CORE_COORDINATOR_H_
