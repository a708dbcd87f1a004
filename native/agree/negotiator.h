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
// 2. The coordinator counts members, not messages. When every member that has not joined is there, it matches the
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

#include <deque>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <variant>
#include <vector>

#include "agree/frame.h"
#include "agree/member_set.h"
#include "agree/promises.h"
#include "agree/request.h"
#include "agree/response_cache.h"
#include "agree/schedule.h"
#include "agree/stall_watch.h"
#include "base/clock.h"
#include "observe/lateness.h"

namespace ringtrain {

namespace event {
struct Submitted {  // this rank is ready for it; no other of that name is pending here
  Request request;
};
struct Refused {  // this rank refused it: its peers shall fail
  Refusal refusal;
};
struct Arrived {  // a frame of a member
  int member;
  Frame frame;
};
struct BatchFinished {};  // the oldest unfinished Execute is done here
struct Left {             // a member shuts down and will submit no more
  int member;
  bool gone = false;  // it no longer serves the others either
};
struct LongPhase {       // this rank will submit nothing for that long, and wants nobody to complain
  Nanoseconds duration;  // from now; 0: it is back
};
struct StoodStill {};  // this process was stopped, and runs again
struct Seen {  // what the members of this host have promised, in the order of members_here(); watches() asks for it
  std::vector<PromiseSign> signs;
};
struct GivesUp {};  // this rank is about to serve the others no longer, and has kept what it promised
struct Tick {};     // time has passed; sends what has gathered. Due after every group of events and at next_timer().
}  // namespace event
using Event = std::variant<event::Submitted, event::Refused, event::Arrived, event::BatchFinished, event::Left,
                           event::LongPhase, event::StoodStill, event::Seen, event::GivesUp, event::Tick>;

namespace effect {
struct Send {
  int member;
  Frame frame;
};
struct Execute {  // run these as one batch; joined: by member
  std::vector<Response> responses;
  std::vector<bool> joined;
  bool scheduled = false;  // no verdict said so
};
struct Promise {  // write it into the host's memory, and then look at what the others have there: event::Seen
  PromiseSign sign;
};
struct Ring {  // what these members of this host wait for may have come
  std::vector<int> members;
};
struct Fail {  // this rank's pending operation of that name ends with this status
  std::string name;
  Status status;
  std::vector<int> missing = {};  // ranks for which it has waited until it was given up
};
struct Warn {
  std::string text;
};
struct Abort {  // the members no longer agree; the world cannot go on
  std::string cause;
};
struct Count {
  int hits = 0, misses = 0;     // requests of this rank that went out as ids of the response cache, and in full
  std::vector<Late> late = {};  // ranks that submitted last since this was told before, on the coordinator
};
}  // namespace effect
using Effect = std::variant<effect::Send, effect::Execute, effect::Promise, effect::Ring, effect::Fail, effect::Warn,
                            effect::Abort, effect::Count>;
using Effects = std::vector<Effect>;

struct NegotiatorOptions {
  int process_set = 0;
  std::vector<int> members;     // global ranks, ascending
  int me = 0;                   // member
  std::vector<int> hosts = {};  // by member: any numbers that are equal for members of one host; empty: all on one
  int fanout = Promises::kFanout;
  bool schedules = false;  // the coordinator has what repeats itself run by schedules
  size_t cache_capacity = 1024;
  size_t fusion_threshold_bytes = 64 << 20;
  Nanoseconds stall_warning = 30 * INT64_C(1000000000);
  Nanoseconds stall_abort = 600 * INT64_C(1000000000);  // kNever: not at all
};

class Negotiator {
 public:
  explicit Negotiator(NegotiatorOptions options);

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
  void Resend(const std::vector<ResponseCache::Id>& unknown);
  void Apply(const Frame& verdicts, Effects* effects);
  void ApplyBatch(const Verdict& verdict, Effects* effects);
  void NoteHeard(const Mine& mine);
  bool IsAnswer(const Response& response, ResponseCache::Id cached, Mines::const_iterator mine) const;
  std::string Subject(const Request& request) const;
  Status CoordinatorGone(const Request& request) const;
  std::vector<std::string> NamesOfMine() const;

  // ---- a schedule: negotiator_schedule.cc ----
  void BeginSchedule(Nanoseconds now, const Frame& frame, Effects* effects);
  void TakeIntoSchedule(Nanoseconds now, const Mine& mine, Effects* effects);
  void KeepSchedule(Nanoseconds now, Effects* effects);
  void ShowPromise(Nanoseconds now, Effects* effects);
  void PassPromises(Effects* effects);
  void StartAgreed(Nanoseconds now, uint64_t agreed, Effects* effects);
  void StartScheduled(Nanoseconds now, Effects* effects);
  void HearPromise(Nanoseconds now, int member, const Frame& frame, Effects* effects);
  void Deviate(Nanoseconds now, Effects* effects);
  void HearHalt(Nanoseconds now, int member, const Frame& frame, Effects* effects);
  void NoteHalted(Nanoseconds now, int member, uint64_t promised, Effects* effects);
  void EndOnAll(Nanoseconds now, uint64_t batches, Effects* effects);
  void EndSchedule(Nanoseconds now, const Frame& frame, Effects* effects);
  void NoteRepetition(const Verdict& verdict);
  bool MayBeginSchedule() const;
  void ProposeSchedule(Nanoseconds now, Effects* effects);
  Frame MakeScheduleFrame(FrameType type, uint64_t count) const;
  bool IsStale(uint32_t schedule) const { return schedule < newest_schedule_; }

  // ---- coordinator ----
  struct Arrival {  // one request of some members, all in the same words
    MemberSet members;
    ResponseCache::Id id = ResponseCache::kNone;
    // Of the id: by the time all are there it may have been evicted. Whoever needs a member's request makes it then.
    std::shared_ptr<const Response> response;
    Request request;  // unless id
  };
  struct Entry {  // a name that some members have submitted
    std::string name;
    std::vector<Arrival> arrivals;  // no member is in two of them
    MemberSet present;              // who is in any
    int refused = -1;               // by whose own rank, which has raised already
    StallWatch::Clock clock;
    int last = 0;  // member that submitted last
    Nanoseconds last_at = 0, last_but_one_at = 0;
    std::list<std::string>::iterator place;  // in order_
    const Request& any() const;              // some member's request, but for what is the member's own
  };
  struct Ready {
    Agreed agreed;
    std::vector<int> joined;  // members without a contribution
  };
  using Entries = std::unordered_map<std::string, Entry>;
  bool coordinates() const { return options_.me == 0; }
  void Receive(Nanoseconds now, int member, const Frame& ready, Effects* effects);
  void ReceiveIds(Nanoseconds now, int member, const std::vector<ResponseCache::Id>& ids,
                  std::vector<ResponseCache::Id>* unknown, Effects* effects);
  void AskAgain(int member, const std::vector<ResponseCache::Id>& unknown, Effects* effects);
  void Arrive(Nanoseconds now, int member, const std::string& name, Arrival arrival, Effects* effects);
  void Join(int member, const Request& request, Effects* effects);
  void FailHopelessJoin(Effects* effects);
  void Refuse(int member, const Refusal& refusal, Effects* effects);
  bool TakeUndeliveredFailure(int member, const std::string& name, Refusal* failure);
  void CancelOwed(int member);
  void Withdraw(int member, Effects* effects);
  Entry Take(Entries::iterator entry);
  void CompleteIfReady(const std::string& name, Effects* effects);
  void CompleteAll(Effects* effects);
  void Complete(Entry entry, Effects* effects);
  static ResponseCache::Id IdOfAll(const Entry& entry);
  std::vector<const Request*> RequestsOf(const Entry& entry, std::deque<Request>* made) const;
  void NoteLast(const Entry& entry);
  void NoteLast(int member, Nanoseconds waited, const std::string& name);
  void FailEntry(const Entry& entry, const Refusal& failure, Effects* effects);
  void GiveUp(const Entry& entry, const std::string& text, Effects* effects);
  void Tell(int member, Verdict verdict, Effects* effects);
  void Decide(Effects* effects);
  void Start(const std::vector<int>& batch, Effects* effects);
  void Broadcast(const Frame& frame, Effects* effects);
  void SendToOthers(const Frame& frame, Effects* effects) const;
  static bool DiffersByMember(const Frame& frame);
  Frame FrameFor(int member, Frame frame) const;
  void CheckStalls(Nanoseconds now, Effects* effects);
  void Report(const Entry& entry, const std::string& text, Effects* effects);
  Nanoseconds DueAt(const Entry& entry) const;
  bool IsMissing(const Entry& entry, int member) const;
  std::vector<int> Missing(const Entry& entry) const;
  std::vector<int> Submitters(const Entry& entry) const;
  Frame MakeFrame(FrameType type) const;
  int member_count() const { return static_cast<int>(options_.members.size()); }

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

  Repetition repetition_;                        // what follows is the coordinator's
  std::vector<std::optional<uint64_t>> halted_;  // by member: what it has promised, once it promises no more; empty
                                                 // unless the schedule ends
  Entries entries_;
  std::list<std::string> order_;  // names of entries_ by first arrival
  std::map<std::string, std::vector<std::pair<int, Refusal>>>
      undelivered_failures_;  // members that will hear of a failure when they submit
  std::vector<Ready> ready_to_run_;
  MemberSet joined_, left_;
  StallWatch stalls_;
  std::vector<int> unanswered_;      // by member: requests that it was asked to send again
  std::vector<Request> held_joins_;  // by member: behind those requests; no name if there is none
  std::vector<bool> held_goodbyes_;  // by member: behind those requests
  std::string join_name_;            // of the join under way
  std::map<int, Late> late_;         // by rank, since it was told before
  int batches_under_way_ = 0;
  ResponseCache::Id next_id_ = 1;
  int next_process_set_ = 1;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_AGREE_NEGOTIATOR_H_
