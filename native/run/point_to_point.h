// PointToPoint: sends and receives of this rank under way, from their submission to the handles. What belongs to what,
// the pairing decides (agree/pairing.h); the bytes go by a stream for each rank and direction (collectives/stream.h).
// The driver's thread only. Nothing here waits.
#ifndef RINGTRAIN_RUN_POINT_TO_POINT_H_
#define RINGTRAIN_RUN_POINT_TO_POINT_H_

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "agree/pairing.h"
#include "collectives/stream.h"
#include "run/books.h"
#include "transport/host_memory.h"
#include "transport/world.h"

namespace ringtrain {

class PointToPoint {
 public:
  PointToPoint(const World& world, const Books& books, Wire& wire, HostMemory* memory);

  static bool Takes(const Request& request) { return Find(request.operation)->layout == Layout::kPair; }
  static bool Takes(const Frame& frame) { return frame.type >= FrameType::kOffer; }

  // members: of its process set.
  void Submitted(std::shared_ptr<Submission> submission, std::vector<int> members);
  void Arrived(int from, Frame frame) { pairing_.Arrived(from, std::move(frame), &effects_); }
  // This rank will submit no more.
  void Leave() { pairing_.Leave(&effects_); }
  // Moves all that can be moved. Appends frames that are to be sent.
  Status Advance(bool* moved, std::vector<std::pair<int, Frame>>* frames);

  Nanoseconds next_timer() const { return pairing_.next_timer(); }
  // Somebody must look.
  bool busy() const { return moving() || pairing_.waits() || !effects_.empty(); }
  // Bytes are on their way.
  bool moving() const { return under_way_ > 0; }
  // The world has failed: touches no memory of the submissions any more.
  void Abandon();

 private:
  struct Transfer {
    std::shared_ptr<Submission> submission;
    std::unique_ptr<char[]> kept;  // of a send that has ended for its submitter
    char* data = nullptr;
  };
  struct Streams {
    std::unique_ptr<StreamEnd> out, in;
  };

  Status CarryOut(pair_effect::Tell& tell);
  Status CarryOut(const pair_effect::StartSend& start);
  Status CarryOut(const pair_effect::StartReceive& start);
  Status CarryOut(const pair_effect::Deliver& deliver);
  Status CarryOut(const pair_effect::Sent& sent);
  Status CarryOut(const pair_effect::Keep& keep);
  Status CarryOut(const pair_effect::Fail& fail);
  Status Start(uint64_t number, int other, bool sends);
  Status OpenStream(int other, bool sends, std::unique_ptr<StreamEnd>* stream);
  void Finish(uint64_t number, const Status& status);

  const World& world_;
  const Books& books_;
  Wire& wire_;
  HostMemory* const memory_;
  Pairing pairing_;
  PairEffects effects_;  // decided and not carried out yet
  std::vector<std::pair<int, Frame>>* frames_ = nullptr;
  std::map<uint64_t, Transfer> transfers_;
  std::map<int, Streams> streams_;  // by the other rank
  uint64_t numbers_ = 0;
  int under_way_ = 0;  // transfers in streams
};

}  // namespace ringtrain
#endif  // RINGTRAIN_RUN_POINT_TO_POINT_H_
