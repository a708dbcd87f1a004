// Schedule: batches that start without a message, because all members know them and their order. Sans-I/O, as the
// negotiator, which owns these objects.
//
// A loop over the same operations makes the coordinator decide the same again and again. Once it has seen a cycle of
// batches so often (Repetition), it sends the cycle to all members, in the order of its verdicts, and from there on
// nobody announces what belongs to it. Each member keeps a counter instead: "I am ready for the first p batches of this
// schedule, and will not withdraw". A batch starts on a member when the counters of all members, as it knows them, have
// passed it (promises.h). So nothing begins that not all are ready for, and nothing need ever be taken back.
//
// Whatever does not fit ends it. The member keeps its counter where it is and tells the coordinator; the coordinator
// has all do so; C is the least of the counters. Batches below C run everywhere, since all have promised them; what is
// ready beyond C is announced as if it had just been submitted. Two things fit and end it all the same, after a while:
// an operation that is ready and cannot be promised, since ranks may submit in orders that wait for each other, and a
// promise that others do not follow, since the coordinator must know whom to report.
#ifndef RINGTRAIN_AGREE_SCHEDULE_H_
#define RINGTRAIN_AGREE_SCHEDULE_H_

#include <cstdint>
#include <deque>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "agree/response_cache.h"
#include "base/clock.h"

namespace ringtrain {

// Batches of cached operations, in their order; each operation is in it once.
using Cycle = std::vector<std::vector<ResponseCache::Id>>;

// Finds the cycle in what a coordinator decides. Two cycles are equal if they have the same operations: which of them
// share a batch is a matter of time, and changes no result.
class Repetition {
 public:
  // A batch of cached operations has been decided, to be run by all members.
  void Note(const std::vector<ResponseCache::Id>& batch);
  // Something has been decided that is no part of a cycle.
  void Forget();
  // A cycle that has come often enough has just ended.
  bool found() const { return batches_.empty() && repeats_ >= patience_; }
  // What is to be repeated: of the last three the one with neither the most batches nor the fewest.
  const Cycle& cycle() const;
  // A schedule has ended after so many batches: if that was soon, the next one is tried later.
  void Ended(uint64_t batches);

 private:
  static constexpr uint64_t kLeast = 3, kMost = 1024;  // equal cycles before a schedule
  static constexpr size_t kKept = 3;

  void EndCycle();

  Cycle batches_;           // of the cycle that has begun
  std::deque<Cycle> last_;  // those before it that are equal, the newest first
  std::unordered_set<ResponseCache::Id> ids_, last_ids_;
  uint64_t repeats_ = 0, patience_ = kLeast;
};

// One member's side of a schedule. Batches are counted from the schedule's beginning.
class BatchSchedule {
 public:
  // longest_wait: for others to follow a promise, in nanoseconds.
  BatchSchedule(uint32_t number, Cycle cycle, Nanoseconds longest_wait, Nanoseconds now);

  uint32_t number() const { return number_; }
  // This member is ready for it. False if it is not part of the schedule.
  bool Take(Nanoseconds now, ResponseCache::Id id);
  // Promises what has become ready; true if anything has. Not once it is frozen.
  bool Promise(Nanoseconds now);
  uint64_t promised() const { return promised_; }
  uint64_t started() const { return started_; }
  const std::vector<ResponseCache::Id>& batch(uint64_t number) const { return cycle_[PlaceOf(number)]; }
  // The next batch, which starts here.
  const std::vector<ResponseCache::Id>& StartNext(Nanoseconds now);

  // No more promises: it is about to end.
  void Freeze() { frozen_ = true; }
  bool frozen() const { return frozen_; }
  // When this member gives it up, because something waits too long; kNever if nothing waits.
  Nanoseconds due() const;

 private:
  // Ready and not to be promised. A backward pass whose batches take longer than this needs no schedule.
  static constexpr Nanoseconds kStuck = 50 * INT64_C(1000000);

  size_t PlaceOf(uint64_t batch) const { return static_cast<size_t>(batch % cycle_.size()); }

  const uint32_t number_;
  const Cycle cycle_;
  const Nanoseconds longest_wait_;
  std::unordered_map<ResponseCache::Id, size_t> place_of_;  // of its batch in the cycle
  std::vector<size_t> ready_;                               // by batch of the cycle: operations that wait here
  size_t unpromised_ = 0;                                   // operations that wait here and are not promised
  uint64_t promised_ = 0, started_ = 0;
  Nanoseconds unpromised_since_ = 0, unstarted_since_ = 0;
  bool frozen_ = false;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_AGREE_SCHEDULE_H_
