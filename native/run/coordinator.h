// Coordinator: one rank's side of the work, step by step. Read this file's .cc first: Step shows the way of a tensor in
// order.
//
// Whoever drives the context calls it, one thread at a time (driver.h). It owns the mail, the executor and the
// protocol; it decides nothing itself, but carries out what the protocol decides.
#ifndef RINGTRAIN_RUN_COORDINATOR_H_
#define RINGTRAIN_RUN_COORDINATOR_H_

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "base/log.h"
#include "base/mutex.h"
#include "base/writer.h"
#include "observe/flight_record.h"
#include "run/executor.h"
#include "run/promise_board.h"
#include "run/submission.h"
#include "transport/mail.h"
#include "transport/progress.h"
#include "transport/wire.h"
#include "world/process_sets.h"
#include "world/protocol.h"

namespace ringtrain {

// Ranks with which this one finds fault; another host by its lowest rank, which speaks for it.
struct Suspects {
  std::vector<int> silent;  // it has found the world to have ended by their silence
  std::vector<int>
      unheard;  // it had not heard them for half of that bound when it looked last; itself, if it was stopped
  std::vector<int> missing;  // an operation has waited for them until it was given up
};

class Coordinator {
 public:
  Coordinator(const World& world, const Options& options, Wire& wire, const Progress& progress, HostMemory* memory,
              SubmissionTable* table, Residuals* residuals, ProcessSetTable* process_sets, Counters* counters,
              LatenessTable* lateness, Timeline* timeline, TrafficTable* traffic, Log* log, Writer* writer);
  ~Coordinator();

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

  // Ends the world on all ranks with this cause, unless it has ended already. The driver's thread; any other calls
  // RequestAbort.
  void Abort(const Status& last);
  void RequestAbort(const std::string& cause);
  // Ends this rank's part if this rank or another of its host has asked for an abort; the driver's thread. Step does so
  // first.
  void HeedAbort();

  // How the world ends if this rank's memory runs out.
  const Status& no_memory() const { return no_memory_; }

  // Where to ask for what a stall needs of this process's Python (rt_ask_through); any thread.
  void AskThrough(int pipe) { requests_pipe_.store(pipe); }
  Suspects suspects();  // any thread
  // Nobody shall expect this rank for that long. Any thread; the driver passes it on.
  void RequestLongPhase(Nanoseconds duration) { long_phase_.store(duration, std::memory_order_release); }
  // Ranks from this one on take the state over. Any thread; what looks for the dead passes it on.
  void AwaitStateFrom(int first) { joins_from_.store(first, std::memory_order_relaxed); }

 private:
  bool TryStep();
  template <typename Action>
  void Guarded(Action action);
  void EndForLackOfMemory();
  void EndHere();
  void HeedWhatAsksForAnEnd();
  void LeaveOthers();
  bool WriteNotice(const char* words);
  void TakeSubmissions(bool* moved);
  void LookAtPromises(bool* moved);
  bool ReceiveMail(bool* moved);
  bool TakeMail(bool* moved);
  void AwaitLastWords();
  void AdvanceBatches(bool* moved);
  void CheckLongPhase();
  void InsistOnStacks();
  std::string RequestedCause();

  SignsOfLife Signs() const;
  bool Died(int rank) const;
  void LookForTheDead();
  void NoteSilent(Nanoseconds now);
  bool Tick();
  void RemoveProcessSets();
  void RecordStall();
  std::string FlightRecord(const std::string& because) const;
  void LeaveFlightRecord(std::string record);
  void SendFrame(int rank, Frame frame);
  Status NoteCause(const Status& cause);
  void ShowStacks(const std::string& awaited);

  // ---- what the protocol decides ----
  // In order; what follows from one of the effects comes behind those that were decided before. So the functions for
  // one effect append to effects_ and do not call this.
  void CarryOut();
  void CarryOut(rank_effect::Send& send) { SendFrame(send.rank, std::move(send.frame)); }
  void CarryOut(rank_effect::Start& start);
  void CarryOut(rank_effect::Promise& promise);
  void CarryOut(rank_effect::Finish& finish);
  void CarryOut(rank_effect::Fail& fail);
  void CarryOut(rank_effect::AddProcessSet& added);
  void CarryOut(rank_effect::RemoveProcessSet& removed) { removals_.push_back(removed.process_set); }
  void CarryOut(rank_effect::Warn& warn) { log_->Warning(warn.text); }
  void CarryOut(rank_effect::Count& count);
  void CarryOut(rank_effect::ShowStacks& show);
  void CarryOut(rank_effect::Beat&) { life(world_.rank).Beat(); }
  void CarryOut(rank_effect::NoteCause& note) { protocol_.CauseNoted(NoteCause(note.cause), &effects_); }
  void CarryOut(rank_effect::Wake& wake) { memory_->doorbell(world_.local_rank_of[wake.rank]).Ring(); }
  void CarryOut(rank_effect::End& end);
  LifeSign& life(int rank) const { return memory_->control().place(world_.local_rank_of[rank]).life; }

  const World& world_;
  const Options& options_;
  Wire& wire_;
  const Progress& progress_;
  HostMemory* const memory_;
  SubmissionTable* const table_;
  ProcessSetTable* const process_sets_;
  Counters* const counters_;
  LatenessTable* const lateness_;
  Log* const log_;
  Writer* const writer_;

  const FlightFile flight_file_;
  Nanoseconds looks_for_stalls_ = 0;  // next
  uint64_t stalled_ = 0;              // number of the operation whose stall was written down last
  Mail mail_;
  PromiseBoard board_;
  Executor executor_;
  Protocol protocol_;
  const Status no_memory_;     // made while there is memory for its words
  RankEffects effects_;        // decided and not carried out yet; empty between two steps
  RankEffects carried_out_;    // at the moment
  std::vector<int> removals_;  // process sets that go as soon as none of their batches is under way
  Nanoseconds last_active_ = 0;

  Mutex request_mutex_;
  std::atomic<bool> abort_requested_{false};
  std::string requested_cause_ RT_GUARDED_BY(request_mutex_);
  Suspects suspects_ RT_GUARDED_BY(request_mutex_);
  Nanoseconds looked_at_ RT_GUARDED_BY(request_mutex_) = kNever;  // last, while the world runs
  std::atomic<int> joins_from_{INT32_MAX};
  std::atomic<Nanoseconds> long_phase_{-1};  // asked for and not passed on yet
  std::atomic<int> requests_pipe_{-1};
  using Time = std::atomic<Nanoseconds>;
  const std::shared_ptr<Time> insist_on_stacks_at_ = std::make_shared<Time>(kNever);  // the writer's, too
};

}  // namespace ringtrain
#endif  // RINGTRAIN_RUN_COORDINATOR_H_
