// Ahead: contributions so small that they go with the promise of their batch (schedule.h), between the two members of a
// set on two hosts. When a member hears that the other has promised, it has what the other contributes, and the batch
// takes the time of one way instead of two. Sans-I/O.
//
// Whether a contribution has gone ahead is known where it was sent and where it came, by the schedule's number and the
// batch's, so the rest go as ever: each way by itself. What has gone ahead of a batch that the schedule ended before is
// dropped on both sides, as the promise is, and the operations contribute anew.
//
// A member that has stopped promising (BatchSchedule::Freeze) may tell a promise that it made before, but then without
// contributions: the other may begin the batch by the schedule's end, which that frame does not come before.
#ifndef RINGTRAIN_AGREE_AHEAD_H_
#define RINGTRAIN_AGREE_AHEAD_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "agree/request.h"
#include "collectives/ahead.h"

namespace ringtrain {

// Whether all members send what they contribute to this batch ahead, where it can be done: their caches are equal, and
// so is what follows.
bool GoesAhead(const std::vector<const Response*>& batch);

// A batch that is promised, and to be sent ahead.
struct PromisedBatch {
  uint64_t number = 0;  // of the schedule's
  std::vector<Response> responses;
};

// What one member of a set has sent ahead, and what has come to it.
class AheadOf {
 public:
  // Appends a contribution to what a promise of the schedule carries.
  void Send(uint32_t schedule, uint64_t batch, const std::string& contribution, std::string* carried);
  // What a promise has carried. False if it cannot be read.
  bool Receive(uint32_t schedule, const std::string& carried);
  // The batch begins. What belongs to batches before it is forgotten.
  Ahead Take(uint32_t schedule, uint64_t batch);

 private:
  std::map<std::pair<uint32_t, uint64_t>, Ahead> batches_;  // by schedule and number
};

}  // namespace ringtrain
#endif  // RINGTRAIN_AGREE_AHEAD_H_
