// Arbiter: what the coordinator of a process set does beside what each member does (negotiator.h): it counts who is
// ready for what, matches requests, decides what runs, finds out who is waited for, and when a schedule may begin.
// Sans-I/O, as the negotiator that owns it.
//
// What it decides it sends to the members, in frames. Its own member hears them at once, and not by a frame: applying
// one verdict may evict from the cache what the next one would have named by id.
#ifndef RINGTRAIN_AGREE_ARBITER_H_
#define RINGTRAIN_AGREE_ARBITER_H_

#include <list>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "agree/entry.h"
#include "agree/member_set.h"
#include "agree/negotiation.h"
#include "agree/response_cache.h"
#include "agree/stall_watch.h"
#include "agree/undelivered.h"

namespace ringtrain {

// The arbiter's own member.
class OwnMember {
 public:
  // Verdicts, or a request to send some once more.
  virtual void Hear(const Frame& frame, Effects* effects) = 0;

 protected:
  ~OwnMember() = default;
};

class Arbiter {
 public:
  // options, cache: of its member, whose verdicts keep the cache equal on all. They outlive it, as own does.
  Arbiter(const NegotiatorOptions& options, const ResponseCache& cache, OwnMember* own);

  // ---- events ----
  void Refuse(int member, const std::vector<Refusal>& refusals, Effects* effects);
  // What a member is ready for. True if a goodbye that waited for it counts now: Left follows.
  bool Receive(Nanoseconds now, int member, const Frame& ready, Effects* effects);
  // A member shuts down; gone: it serves the others no longer.
  void Left(int member, bool gone, Effects* effects);
  void LongPhase(int member, Nanoseconds until) { stalls_.LongPhase(member, until); }
  void StoodStill(Nanoseconds now) { stalls_.StoodStill(now); }
  void BatchFinished() { --batches_under_way_; }

  // ---- time ----
  // When CheckStalls is due; kNever if nothing waits.
  Nanoseconds next_timer() const;
  void CheckStalls(Nanoseconds now, Effects* effects);
  // Starts what is ready, while there is a free place for a batch.
  void Decide(Effects* effects);
  // Who came last, since it was told before.
  void TellLate(Effects* effects);

  // ---- schedules ----
  // Whether batches repeat themselves, and nothing waits for members that will not come, or for an answer.
  bool FindsCycle() const;
  // The batches of the cycle: from here on members run them by a schedule, with all that they are ready for.
  std::vector<std::vector<ResponseCache::Id>> TakeCycle();
  void ScheduleEnded(uint64_t batches) { repetition_.Ended(batches); }
  // A batch of the schedule, for whose operation this member came last.
  void BatchStarted() { ++batches_under_way_; }
  void NoteLast(int member, Nanoseconds waited, const std::string& name);
  void SendToOthers(const Frame& frame, Effects* effects) const;

 private:
  struct Ready {
    Agreed agreed;
    std::vector<int> joined;  // members without a contribution
  };
  using Entries = std::unordered_map<std::string, Entry>;
  void ReceiveIds(Nanoseconds now, int member, const std::vector<ResponseCache::Id>& ids,
                  std::vector<ResponseCache::Id>* unknown, Effects* effects);
  void AskAgain(int member, const std::vector<ResponseCache::Id>& unknown, Effects* effects);
  void Arrive(Nanoseconds now, int member, const std::string& name, Arrival arrival, Effects* effects);
  void Join(int member, const Request& request, Effects* effects);
  void FailHopelessJoin(Effects* effects);
  void Refuse(int member, const Refusal& refusal, Effects* effects);
  void Withdraw(int member, Effects* effects);
  Entry Take(Entries::iterator entry);
  void CompleteIfReady(const std::string& name, Effects* effects);
  void CompleteAll(Effects* effects);
  void Complete(Entry entry, Effects* effects);
  void FailEntry(const Entry& entry, const Refusal& failure, Effects* effects);
  void Tell(int member, Verdict verdict, Effects* effects);
  void Start(const std::vector<int>& batch, Effects* effects);
  void NoteRepetition(const Verdict& verdict);
  void Broadcast(const Frame& frame, Effects* effects);
  void Report(const Entry& entry, const std::string& text, Effects* effects);
  Nanoseconds DueAt(const Entry& entry) const;
  bool IsMissing(const Entry& entry, int member) const;
  std::vector<int> Missing(const Entry& entry) const;
  bool IsOutnumbered(const Entry& entry) const;
  std::vector<int> Submitters(const Entry& entry) const;
  int member_count() const { return options_.member_count(); }

  const NegotiatorOptions& options_;
  const ResponseCache& cache_;
  OwnMember* const own_;

  Repetition repetition_;
  Entries entries_;
  std::list<std::string> order_;  // names of entries_ by first arrival
  std::list<Entry> given_up_;     // whose members have submitted nothing since
  UndeliveredFailures undelivered_;
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
#endif  // RINGTRAIN_AGREE_ARBITER_H_
