// Pairing: which send of one rank belongs to which receive of another. The two ranks agree on that, and no others: no
// coordinator hears of it.
//
//     sender                                   receiver
//     kOffer: there is a tensor of this kind   waits for a receive of that sender, tag and process set
//                                              kAccept: send it. Or kDecline: it is of another kind
//     sends it behind what was accepted before
//
// A small tensor travels in its offer, and the sender is done; what the receiver has not taken of those yet is bounded,
// and kTaken says what it has. The rule is MPI's: sends of one rank with one tag are taken in their order, by receives
// in theirs; a receive from any rank takes what came first (MPI: A Message-Passing Interface Standard 4.1, 3.5).
//
// Sans-I/O, as the negotiator is: time, frames and tensors' contents are handed in and out. Sends and receives have
// numbers, which their owner gives, each once.
#ifndef RINGTRAIN_AGREE_PAIRING_H_
#define RINGTRAIN_AGREE_PAIRING_H_

#include <deque>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <variant>
#include <vector>

#include "agree/frame.h"

namespace ringtrain {

namespace pair_effect {
struct Tell {  // send the frame
  int rank;
  Frame frame;
};
struct StartSend {  // its bytes to the receiver, behind those that were started before
  uint64_t send;
  int to;
};
struct StartReceive {  // its bytes come from there, behind those that were started before
  uint64_t receive;
  int from;
};
struct Deliver {  // the bytes are here
  uint64_t receive;
  int from;
  std::string bytes;
};
struct Sent {  // the sender has its memory back
  uint64_t send;
};
struct Keep {  // it has waited: copy the tensor and end the send, which goes on with the copy
  uint64_t send;
};
struct Fail {
  uint64_t number;
  Status status;
};
}  // namespace pair_effect
using PairEffect = std::variant<pair_effect::Tell, pair_effect::StartSend, pair_effect::StartReceive,
                                pair_effect::Deliver, pair_effect::Sent, pair_effect::Keep, pair_effect::Fail>;
using PairEffects = std::vector<PairEffect>;

// One send or receive, as its rank wants it.
struct PairRequest {
  uint64_t number = 0;
  int other = kAnyRank;  // rank; kAnyRank: a receive from any of `members`
  int process_set = 0;
  int64_t tag = 0;
  TensorSpec tensor = {};
  std::string subject = {};       // for errors
  std::vector<int> members = {};  // the others of the process set
};

class Pairing {
 public:
  // Bytes that travel in an offer, at most, and those of all offers to one rank that it has not taken yet.
  static constexpr size_t kMostInOffer = 8 << 10, kMostUntaken = 1 << 20;
  static constexpr Nanoseconds kKeepAfter = 100 * INT64_C(1000000), kAskAfter = 1000 * INT64_C(1000000);

  // bytes: of the tensor.
  void Send(Nanoseconds now, PairRequest request, const char* bytes, PairEffects* effects);
  void Receive(Nanoseconds now, PairRequest request, PairEffects* effects);
  // One of kOffer .. kGone.
  void Arrived(int from, Frame frame, PairEffects* effects);
  // kNever while nothing waits that has not been looked at.
  Nanoseconds next_timer() const { return next_timer_; }
  void Tick(Nanoseconds now, PairEffects* effects);
  // This rank will neither send nor receive any more.
  void Leave(PairEffects* effects);
  // Whether a send or a receive waits for the other rank.
  bool waits() const { return !offered_.empty() || !posted_.empty(); }

 private:
  using Place = std::tuple<int, int64_t, int>;  // process set, tag, sender or kAnyRank
  struct Waiting {
    PairRequest request = {};
    Nanoseconds since = 0;
    uint64_t order = 0;
    bool kept = false, asked = false;
  };
  struct Offer {
    int from = 0;
    Frame frame = {};
    uint64_t order = 0;
  };

  void Match(const Waiting& receive, Offer offer, PairEffects* effects);
  void Take(const Waiting& receive, Offer* offer, PairEffects* effects);
  bool TakeOfferFor(const PairRequest& request, Offer* offer);
  bool TakeReceiveFor(const Offer& offer, Waiting* receive);
  bool MayCome(const PairRequest& request) const;
  void FailWhatCannotCome(int gone, PairEffects* effects);
  void AskFor(Waiting* waiting, PairEffects* effects);
  void LookAgain(Nanoseconds when) { next_timer_ = std::min(next_timer_, when); }

  std::map<uint64_t, Waiting> offered_;          // sends that wait, by number
  std::map<Place, std::deque<Waiting>> posted_;  // receives that wait
  std::map<Place, std::deque<Offer>> offers_;    // that wait for a receive, by sender
  std::map<int, size_t> untaken_;                // by receiver: bytes in offers
  std::map<int, size_t> taken_;                  // by sender: bytes that it has not been told of
  std::set<int> askers_, gone_;
  uint64_t order_ = 0;
  Nanoseconds next_timer_ = kNever;
  bool leaves_ = false;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_AGREE_PAIRING_H_
