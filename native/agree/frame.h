// Frame: a negotiation message between two ranks. Every frame names its epoch; those of another are refused.
#ifndef RINGTRAIN_AGREE_FRAME_H_
#define RINGTRAIN_AGREE_FRAME_H_

#include <string>
#include <utility>
#include <vector>

#include "agree/request.h"
#include "agree/response_cache.h"
#include "base/clock.h"

namespace ringtrain {

enum class FrameType : uint8_t {
  kReady = 1,       // member to coordinator: what is ready here
  kVerdicts = 2,    // coordinator to members: what to do
  kResend = 3,      // coordinator to member: these cached ids are unknown, send the requests
  kAbort = 4,       // anyone to anyone: the world has failed, with this text
  kGoodbye = 5,     // this rank is shutting down; flag: and serves the others no longer
  kAllGoodbye = 6,  // rank 0 to all: nobody waits for anyone any more; flag: all have said goodbye
  kBeat = 7,        // one host to another: its ranks live; flag: and leave, so that nobody need listen any longer
  kStalled = 8,     // coordinator to member: the others wait for you; show where your Python is. text: for what
  kLongPhase = 9,   // member to coordinator: do not expect me for so many milliseconds
  kSchedule = 10,   // coordinator to members: from here on this cycle of batches, without a word (schedule.h)
  kPromise = 11,    // one host to another: so many batches of the schedule all on this side have promised
  kHalt = 12,  // member to coordinator: the schedule ends, and so much is promised here; coordinator to members: say so
  kHalted = 13,  // coordinator to members: so many batches of the schedule run, then it is over
  // Between the two ranks of a send (pairing.h).
  kOffer = 14,    // sender: a tensor of this kind, or the tensor itself; flag: it is in here
  kAccept = 15,   // receiver: send the offer of this number
  kDecline = 16,  // receiver: it fails on both sides, with this text
  kTaken = 17,    // receiver: so many bytes that came in offers have been taken
  kAwait = 18,    // I wait for a tensor of yours, or for you to take mine
  kGone = 19      // receiver of kAwait: I leave, and neither send nor take any more
};

// A submission that its own rank refused: its peers' operation of that name fails with the same text.
struct Refusal {
  std::string name;
  StatusCode code = StatusCode::kInvalidArgument;
  std::string text;
  std::vector<int> missing = {};  // ranks for which it has waited until it was given up
};

// One operation of a batch: cached, or in full and to be cached under `id` unless that is kNone.
struct Agreed {
  ResponseCache::Id id = ResponseCache::kNone;
  bool cached = false;
  Response response;
};

// What the coordinator decided about one or more names: a batch to run, or why a name fails.
struct Verdict {
  std::vector<Agreed> batch;  // empty for a failure
  std::vector<int> joined;    // of a batch: members that have joined and contribute nothing to it
  Refusal failure;
};

struct Frame {
  FrameType type = FrameType::kReady;
  uint32_t epoch = 0;
  int process_set = 0;
  std::vector<ResponseCache::Id> ids;  // kReady, kResend: ascending
  std::vector<Request> requests;       // kReady
  int resent = 0;                      // kReady: how many of them answer a kResend
  std::vector<Refusal> refusals;       // kReady
  std::vector<Verdict> verdicts;       // kVerdicts
  // kAbort, kStalled, kDecline; kOffer: the tensor's bytes; kPromise: contributions that go ahead (ahead.h)
  std::string text;
  bool flag = false;          // kGoodbye, kAllGoodbye, kBeat, kOffer
  uint64_t milliseconds = 0;  // kLongPhase
  uint32_t schedule = 0;      // kReady: the last one that the member has begun; kSchedule .. kHalted: which
  std::vector<std::vector<ResponseCache::Id>> cycle;  // kSchedule
  // kPromise, kHalt, kHalted: batches; kOffer .. kDecline: the offer's number; kTaken: bytes
  uint64_t count = 0;
  int last = 0;            // kPromise: the member on this side that came last
  Nanoseconds gap = 0;     // kPromise: by which it came behind the one before it
  int64_t tag = 0;         // kOffer
  TensorSpec tensor = {};  // kOffer

  // Whether it can be of one member of this process set to another: what it has of members are members, and its lists
  // have their lengths. Frames of the same ringtrain always do.
  bool Fits(const std::vector<int>& members) const;

  std::string Encode() const;
  // False for bytes that are no frame.
  static bool Decode(const std::string& bytes, Frame* frame);
};

}  // namespace ringtrain
#endif  // RINGTRAIN_AGREE_FRAME_H_
