// Coordinator: one rank's side of the work, step by step. Read this file's .cc first: Step shows the way of a tensor in order.
//
// Whoever drives the context calls it, one thread at a time (context.h). It owns the mail, the executor and the protocol; it
// decides nothing itself, but does what the protocol decides.
#ifndef RINGTRAIN_CORE_COORDINATOR_H_
#define RINGTRAIN_CORE_COORDINATOR_H_

#include <atomic>
#include <string>
#include <vector>

#include "base/log.h"
#include "base/mutex.h"
#include "core/executor.h"
#include "core/process_sets.h"
#include "core/protocol.h"
#include "core/submission.h"
#include "transport/mail.h"

namespace ringtrain {

class Coordinator : private Performer {
 public:
  Coordinator(const World& world, const Options& options, Transport* transport, HostMemory* memory, SubmissionTable* table,
              ProcessSetTable* process_sets, Counters* counters, LatenessTable* lateness, Timeline* timeline, Log* log);
  ~Coordinator() override;

  // Does what can be done without waiting. True if anything moved.
  bool Step();

  // Something of this rank is pending: it must be driven until this is false.
  bool HasWork() const;
  // What it waits for cannot ring the doorbell: the driver must look again soon.
  bool MustPoll() const;
  Nanoseconds next_timer() const { return protocol_.next_timer(); }
  // How long a rank with nothing pending may sleep before it shows the others that it lives.
  Nanoseconds idle_period() const { return protocol_.idle_period(); }

  // Tells the others that this rank will submit no more; ready_to_close() once nobody waits for anybody.
  void SayGoodbye();
  bool ready_to_close() const { return protocol_.released() && !executor_.busy(); }
  // All ranks have said goodbye, so that what is collective may be done.
  bool closed_cleanly() const { return protocol_.clean(); }
  // This rank waits no longer: those who wait for it fail, and if it is rank 0 nobody need wait for the others either.
  void GiveUpWaiting();

  // Ends the world on all ranks with this cause, unless it has ended already. The driver's thread; any other calls RequestAbort.
  void Abort(const Status& last) { protocol_.Abort(last); }
  void RequestAbort(const std::string& cause);
  // Ends this rank's part if this rank or another of its host has asked for an abort; the driver's thread. Step does so first.
  void HeedAbort();

  // Where to ask for what a stall needs of this process's Python (rt_ask_through); any thread.
  void AskThrough(int pipe) { requests_pipe_.store(pipe); }
  // Nobody shall expect this rank for that long. Any thread; the driver passes it on.
  void RequestLongPhase(Nanoseconds duration) { long_phase_.store(duration, std::memory_order_release); }

 private:
  void TakeSubmissions(bool* moved);
  void ReceiveMail(bool* moved);
  void AdvanceBatches(bool* moved);
  void CheckLongPhase();
  bool Ask(char what);
  void InsistOnStacks();
  std::string RequestedCause();

  // ---- Performer ----
  void Send(int rank, Frame frame) override;
  void Start(int process_set, const effect::Execute& batch) override;
  bool Busy(int process_set) const override { return executor_.busy(process_set); }
  void Finish(int process_set, const effect::Execute& control) override;
  void Fail(int process_set, const std::string& name, const Status& status) override;
  void AddProcessSet(int process_set, const std::vector<int>& members) override;
  void RemoveProcessSet(int process_set) override;
  void Warn(const std::string& text) override;
  void Count(int process_set, const effect::Count& count) override;
  void ShowStacks(const std::string& awaited) override;
  void Beat() override { life(world_.rank).Beat(); }
  Status NoteCause(const Status& cause) override;
  void Wake(int rank_of_this_host) override { memory_->doorbell(world_.local_rank_of[rank_of_this_host]).Ring(); }
  void End(const Status& cause) override;
  bool Left(int rank) const override { return life(rank).left(); }
  bool Died(int rank) const override { return life(rank).Died(); }
  uint64_t Beats(int rank) const override { return life(rank).beats(); }
  uint64_t Arrivals(int rank) const override { return transport_->arrivals(rank); }
  LifeSign& life(int rank) const { return memory_->control().place(world_.local_rank_of[rank]).life; }

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
  Protocol protocol_;
  Nanoseconds last_active_ = 0;

  Mutex request_mutex_;
  std::atomic<bool> abort_requested_{false};
  std::string requested_cause_ RT_GUARDED_BY(request_mutex_);
  std::atomic<Nanoseconds> long_phase_{-1};  // asked for and not passed on yet
  std::atomic<int> requests_pipe_{-1};
  Nanoseconds insist_on_stacks_at_ = kNever;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_CORE_COORDINATOR_H_
