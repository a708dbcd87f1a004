// What goes into a negotiator and comes out of it (negotiator.h), and what it is told at its beginning.
#ifndef RINGTRAIN_AGREE_NEGOTIATION_H_
#define RINGTRAIN_AGREE_NEGOTIATION_H_

#include <string>
#include <variant>
#include <vector>

#include "agree/ahead.h"
#include "agree/frame.h"
#include "agree/promises.h"
#include "agree/request.h"
#include "agree/schedule.h"
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
  std::vector<PromisedBatch> ahead = {};  // kPromise: those whose contributions shall go with it
};
struct Execute {  // run these as one batch; joined: by member
  std::vector<Response> responses;
  std::vector<bool> joined;
  bool scheduled = false;  // no verdict said so
  uint32_t schedule = 0;   // if it is: of which, and its number there
  uint64_t batch = 0;
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
  Nanoseconds stall_warning = 30 * kSecond;
  Nanoseconds stall_abort = 600 * kSecond;  // kNever: not at all

  int member_count() const { return static_cast<int>(members.size()); }
  bool coordinates() const { return me == 0; }
  // "allreduce 'x'", and where it is if not in the world.
  std::string Subject(const Request& request) const {
    return request.Subject() + (process_set == 0 ? "" : " of process set " + std::to_string(process_set));
  }
  Frame MakeFrame(FrameType type) const {
    Frame frame;
    frame.type = type;
    frame.process_set = process_set;
    return frame;
  }
};

}  // namespace ringtrain
#endif  // RINGTRAIN_AGREE_NEGOTIATION_H_
