// RankLoop: one rank's side of the work, step by step. Read this file's .cc first: Step shows the way of a tensor in
// order.
//
// Whoever drives the context calls it, one thread at a time (driver.h). It owns the mail, the executor and the
// protocol; it decides nothing itself, but carries out what the protocol decides.
#ifndef RINGTRAIN_RUN_RANK_LOOP_H_
#define RINGTRAIN_RUN_RANK_LOOP_H_

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "run/abort_request.h"
#include "run/books.h"
#include "run/executor.h"
#include "run/flight_recorder.h"
#include "run/point_to_point.h"
#include "run/promise_board.h"
#include "run/stack_requests.h"
#include "run/suspicions.h"
#include "transport/mail.h"
#include "transport/transport.h"
#include "world/process_sets.h"
#include "world/protocol.h"

namespace ringtrain {

class RankLoop {
 public:
  RankLoop(const World& world, const Books& books, Transport& transport, HostMemory* memory, Residuals* residuals,
           ProcessSetTable* process_sets);

  // Does what can be done without waiting. True if anything moved.
  bool Step();

  // Something of this rank is pending: it must be driven until this is false.
  bool HasWork() const;
  // What it waits for cannot ring the doorbell: the driver must look again soon.
  bool MustPoll() const;
  Nanoseconds next_timer() const { return std::min(protocol_.next_timer(), point_to_point_.next_timer()); }
  // How long a rank with nothing pending may sleep before it shows the others that it lives.
  Nanoseconds idle_period() const { return protocol_.idle_period(); }

  // Tells the others that this rank will submit no more; ready_to_close() once nobody waits for anybody.
  void SayGoodbye();
  bool ready_to_close() const { return protocol_.released() && !executor_.busy() && !point_to_point_.moving(); }
  // All ranks have said goodbye, so that what is collective may be done.
  bool closed_cleanly() const { return protocol_.clean(); }
  // This rank waits no longer: those who wait for it fail, and if it is rank 0 nobody need wait for the others either.
  void GiveUpWaiting();

  // Ends the world on all ranks with this cause, unless it has ended already. The driver's thread; any other calls
  // RequestAbort.
  void Abort(const Status& last);
  void RequestAbort(const std::string& cause) { abort_request_.Make(cause); }
  // Ends this rank's part if this rank or another of its host has asked for an abort; the driver's thread. Step does so
  // first.
  void HeedAbort();

  // How the world ends if this rank's memory runs out.
  const Status& no_memory() const { return no_memory_; }

  // Where to ask for what a stall needs of this process's Python (rt_ask_through); any thread.
  void AskThrough(int pipe) { stack_requests_.AskThrough(pipe); }
  Suspects suspects() const { return suspicions_.Of(world_.rank, protocol_); }  // any thread
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
  void TakeSubmissions(bool* moved);
  void LookAtPromises(bool* moved);
  bool ReceiveMail(bool* moved);
  bool TakeMail(bool* moved);
  void AwaitLastWords();
  void AdvanceBatches(bool* moved);
  void AdvancePointToPoint(bool* moved);
  void CheckLongPhase();

  void LookForTheDead();
  bool Tick();
  void RemoveProcessSets();
  void SendFrame(int rank, Frame frame);
  Status NoteCause(const Status& cause);

  // ---- what the protocol decides ----
  // In order; what follows from one of the effects comes behind those that were decided before. So the functions for
  // one effect append to effects_ and do not call this.
  void CarryOut();
  void CarryOut(rank_effect::Send& send);
  void CarryOut(rank_effect::Start& start);
  void CarryOut(rank_effect::Promise& promise);
  void CarryOut(rank_effect::Finish& finish);
  void CarryOut(rank_effect::Fail& fail);
  void CarryOut(rank_effect::AddProcessSet& added);
  void CarryOut(rank_effect::RemoveProcessSet& removed) { removals_.push_back(removed.process_set); }
  void CarryOut(rank_effect::Warn& warn) { books_.log->Warning(warn.text); }
  void CarryOut(rank_effect::Count& count);
  void CarryOut(rank_effect::ShowStacks& show);
  void CarryOut(rank_effect::Beat&) { memory_->control().place(world_.local_rank()).life.Beat(); }
  void CarryOut(rank_effect::NoteCause& note) { protocol_.CauseNoted(NoteCause(note.cause), &effects_); }
  void CarryOut(rank_effect::Wake& wake) { memory_->doorbell(world_.local_rank_of[wake.rank]).Ring(); }
  void CarryOut(rank_effect::End& end);
  AbortNotice& notice() const { return memory_->control().abort; }

  const World& world_;
  const Books& books_;
  Wire& wire_;
  const Progress& progress_;
  HostMemory* const memory_;
  SubmissionTable* const table_;
  ProcessSetTable* const process_sets_;

  FlightRecorder flight_recorder_;
  StackRequests stack_requests_;
  Mail mail_;
  PromiseBoard board_;
  Executor executor_;
  PointToPoint point_to_point_;
  Protocol protocol_;
  const Status no_memory_;     // made while there is memory for its words
  RankEffects effects_;        // decided and not carried out yet; empty between two steps
  RankEffects carried_out_;    // at the moment
  std::vector<int> removals_;  // process sets that go as soon as none of their batches is under way
  Nanoseconds last_active_ = 0;

  AbortRequest abort_request_;
  Suspicions suspicions_;
  std::atomic<int> joins_from_{INT32_MAX};
  std::atomic<Nanoseconds> long_phase_{-1};  // asked for and not passed on yet
};

}  // namespace ringtrain
#endif  // RINGTRAIN_RUN_RANK_LOOP_H_
