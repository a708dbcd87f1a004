// Negotiator: how the members of one process set come to do the same operations in the same order. Sans-I/O.
//
// Events go in, effects come out; there is no thread, clock, socket, environment or random number inside, and no
// iteration over an unordered container, so the same code runs under MPI, between threads, and in a simulator, and
// replays bit for bit.
//
// The four steps of an operation:
//
// 1. A member tells the coordinator, the set's lowest member, what has become ready here (kReady): an id where the
//    response cache knows the request, else the request itself.
// 2. The coordinator (arbiter.h) counts members, not messages. When every member that has not joined is there, it
// matches the
//    requests. What fits becomes ready to run; what does not fails on every member with one text.
// 3. While fewer than two of its batches are under way, it fuses all that is ready and tells every member (kVerdicts).
//    Waiting for a free place, not for a clock, is what lets operations gather for fusion.
// 4. Every member, the coordinator too, applies the verdicts in the order in which they come, and so keeps an equal
//    cache.
//
// A member with nothing of its own pending sends nothing and need not be awake: without its submission nothing can run.
//
// After some steps with the same operations steps 1 to 3 fall away: a schedule (schedule.h) has the batches start by
// what each member promises. negotiator_schedule.cc has how one begins and ends.
#ifndef RINGTRAIN_AGREE_NEGOTIATOR_H_
#define RINGTRAIN_AGREE_NEGOTIATOR_H_

#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "agree/arbiter.h"
#include "agree/negotiation.h"
#include "agree/promises.h"
#include "agree/response_cache.h"
#include "agree/schedule.h"
#include "base/clock.h"

namespace ringtrain {

class Negotiator final : private OwnMember {
 public:
  explicit Negotiator(NegotiatorOptions options);
  Negotiator(const Negotiator&) = delete;  // its arbiter refers to it
  Negotiator& operator=(const Negotiator&) = delete;

  // Appends what follows from the event to *effects.
  void OnEvent(Nanoseconds now, const Event& event, Effects* effects);

  // This rank waits for something: it must be driven.
  bool pending() const { return !mine_.empty(); }
  // When Tick is due at the latest, kNever if nothing is timed.
  Nanoseconds next_timer() const;
  const std::vector<int>& members() const { return options_.members; }

  // ---- a schedule ----
  // It must be told of what members_here() promise, whenever that changes.
  bool watches() const { return schedule_.has_value(); }
  const std::vector<int>& members_here() const { return promises_.here(); }
  // Batches are promised and have not started: this member must not leave.
  bool owes() const { return schedule_ && schedule_->promised() > schedule_->started(); }

 private:
  // ---- member ----
  struct Mine {
    Request request;
    ResponseCache::Id id;  // under which it was announced, or kNone
    bool counted = false;  // among hits_ or misses_
    uint64_t frame = 0;    // number of the ready frame that announced it first
  };
  using Mines = std::unordered_map<std::string, Mine>;
  void On(Nanoseconds now, const event::Submitted& event, Effects* effects);
  void On(Nanoseconds now, const event::Refused& event, Effects* effects);
  void On(Nanoseconds now, const event::Arrived& event, Effects* effects);
  void On(Nanoseconds now, const event::BatchFinished& event, Effects* effects);
  void On(Nanoseconds now, const event::Left& event, Effects* effects);
  void On(Nanoseconds now, const event::LongPhase& event, Effects* effects);
  void On(Nanoseconds now, const event::StoodStill& event, Effects* effects);
  void On(Nanoseconds now, const event::Seen& event, Effects* effects);
  void On(Nanoseconds now, const event::GivesUp& event, Effects* effects);
  void On(Nanoseconds now, const event::Tick& event, Effects* effects);
  void AddToReady(Mine* mine);
  void Announce(Nanoseconds now, Effects* effects);
  void Receive(Nanoseconds now, int member, const Frame& ready, Effects* effects);
  void Hear(const Frame& frame, Effects* effects) override;
  void Resend(const std::vector<ResponseCache::Id>& unknown);
  void Apply(const Frame& verdicts, Effects* effects);
  void ApplyBatch(const Verdict& verdict, Effects* effects);
  void NoteHeard(const Mine& mine);
  bool IsAnswer(const Response& response, ResponseCache::Id cached, Mines::const_iterator mine) const;
  Status CoordinatorGone(const Request& request) const;
  std::vector<std::string> NamesOfMine() const;

  // ---- a schedule: negotiator_schedule.cc ----
  void BeginSchedule(Nanoseconds now, const Frame& frame, Effects* effects);
  void TakeIntoSchedule(Nanoseconds now, const Mine& mine, Effects* effects);
  void KeepSchedule(Nanoseconds now, Effects* effects);
  void ShowPromise(Nanoseconds now, Effects* effects);
  void PassPromises(Effects* effects);
  std::vector<PromisedBatch> BatchesAhead(uint64_t begin, uint64_t end) const;
  void StartAgreed(Nanoseconds now, uint64_t agreed, Effects* effects);
  void StartScheduled(Nanoseconds now, Effects* effects);
  void HearPromise(Nanoseconds now, int member, const Frame& frame, Effects* effects);
  void Deviate(Nanoseconds now, Effects* effects);
  void HearHalt(Nanoseconds now, int member, const Frame& frame, Effects* effects);
  void NoteHalted(Nanoseconds now, int member, uint64_t promised, Effects* effects);
  void EndOnAll(Nanoseconds now, uint64_t batches, Effects* effects);
  void EndSchedule(Nanoseconds now, const Frame& frame, Effects* effects);
  void ProposeSchedule(Nanoseconds now, Effects* effects);
  Frame MakeScheduleFrame(FrameType type, uint64_t count) const;
  bool IsStale(uint32_t schedule) const { return schedule < newest_schedule_; }

  const NegotiatorOptions options_;
  ResponseCache cache_;
  bool coordinator_gone_ = false;

  Mines mine_;                 // submitted here, no verdict yet
  Frame ready_;                // gathers until the next Tick
  int hits_ = 0, misses_ = 0;  // not told yet

  std::optional<BatchSchedule> schedule_;  // while one is under way
  Promises promises_;
  uint32_t newest_schedule_ = 0;      // that this member has begun
  std::optional<uint64_t> rings_at_;  // once the least counter here has risen above, the others are rung
  bool has_refused_ = false;          // and the coordinator may not have heard of it when a schedule begins
  uint64_t refused_in_ = 0;           // number of the ready frame that said so
  uint64_t ready_frames_ = 0;         // sent

  std::optional<Arbiter> arbiter_;               // of the coordinator
  std::vector<std::optional<uint64_t>> halted_;  // the coordinator's, by member: what it has promised, once it promises
                                                 // no more; empty unless the schedule ends
};

}  // namespace ringtrain
#endif  // RINGTRAIN_AGREE_NEGOTIATOR_H_
