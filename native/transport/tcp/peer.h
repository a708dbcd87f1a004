// Peer: another rank, or this one: what travels between the two, the lanes for it, and the line that these lie on.
// Knows nothing of other peers, of threads, or of who waits for what; connections.h does, and holds its lock around
// each call.
#ifndef RINGTRAIN_TRANSPORT_TCP_PEER_H_
#define RINGTRAIN_TRANSPORT_TCP_PEER_H_

#include <algorithm>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "transport/tcp/arrivals.h"
#include "transport/tcp/plan.h"
#include "transport/tcp/lane.h"
#include "transport/tcp/line.h"

namespace ringtrain {

// Lanes are numbered: the control lane is 0, those for data follow.
class Peer {
 public:
  Peer(const TcpPlan& plan, int rank);

  int rank() const { return rank_; }
  Exchange& exchange() { return exchange_; }
  bool left() const { return left_; }  // it has said so: the end of its connections is no loss
  bool lost() const { return lost_; }

  // ---- lanes ----
  bool SendsOn(size_t lane) const { return lane == 0 ? control_out_ != nullptr : data_out_[lane - 1] != nullptr; }
  bool ReceivesOn(size_t lane) const { return lane == 0 ? control_in_ != nullptr : data_in_[lane - 1] != nullptr; }
  void AddLane(Connection connection, bool sends);
  // Keeps a connection open on which nothing is sent or read.
  void KeepSilent(Socket socket) { silent_.push_back(std::move(socket)); }
  // Whether the control lane must be called; true once.
  bool CallsControl() { return !std::exchange(called_control_, true); }
  // Whether a data lane must be called, which one, for what is to be sent.
  bool CallsMore() const { return called_data_ < used_; }
  int NextToCall() { return static_cast<int>(++called_data_); }
  // Takes what the peer says on a lane against its direction.
  LaneMove Listen(size_t lane);
  void NoteWritable(size_t lane) { (lane == 0 ? control_out_->writable : data_out_[lane - 1]->writable) = true; }
  void NoteEnd(size_t lane);  // of one that is received on

  // ---- what travels ----
  void AddFrame(std::string frame);
  int unsent() const { return unsent_; }  // frames that are not yet in the kernel's hands
  // What is to be called, or sent on the control lane.
  bool HasControl() const { return unsent_ > 0 || exchange_.has_control(); }
  // Returns how many frames are in the kernel's hands that were not; *move says how it went.
  int SendControl(LaneMove* move);
  // A piece each in turn, on all lanes for data; lost(lane, move) hears of one that is. Whether there is more to do.
  template <typename Lost>
  bool SendPieces(Lost lost);
  // What this rank sends to itself.
  void MoveWithin();
  // From a lane; *news: a frame is whole.
  LaneMove Receive(size_t lane, Arrivals* arrivals, bool* news);

  // ---- the line ----
  // Measures the way from time to time, and uses the connections that it needs.
  void LookAtLine();
  bool measured() const { return line_.round_trip() > 0; }
  std::string LineText() const;  // as rt_lines has it
  double RoundTrip();            // of the control lanes, in seconds
  // Seconds since the peer's kernel was heard of on a lane to it, and on any other connection with it.
  double SinceAnswer(size_t lane) const;
  double SinceAnswerBeside(size_t lane) const;

  // ---- the end ----
  // Takes what has come on the control lane, and what the peer says against the other one's direction.
  void TakeRest(Arrivals* arrivals, bool* news);
  // Returns how many frames are not sent.
  int StopSending();
  // Whether some of what it sent before it left is on its way still.
  bool AwaitsLast() const;
  void Lose();
  // Lets go of all messages. The lanes for data stay open, and silent.
  void Abandon();
  void SayLeave();
  // Until the peer's kernel has what was said.
  void AwaitKernel(Nanoseconds deadline);

  // Where it stands in the lists of connections.h.
  bool dirty = false, engaged = false;
  std::vector<bool> readable;  // by lane

 private:
  const char* TakeControl(const RecordHeader& header, const std::string& payload, Arrivals* arrivals, bool* news);
  void Tune(size_t place);
  void ControlCongestion(const Socket& socket) const;

  const TcpPlan& plan_;
  const int rank_;
  Exchange exchange_;
  std::deque<std::string> frames_;  // to be sent once there is a lane
  int unsent_ = 0;
  FrameJoiner joiner_;
  std::unique_ptr<ControlSender> control_out_;
  std::unique_ptr<ControlReceiver> control_in_;
  std::vector<std::unique_ptr<PieceSender>> data_out_;  // by lane, from 1; those that it needs are called
  Line line_;                                           // that these lie on
  size_t used_;                                         // how many of them, from the first
  uint32_t piece_bytes_ = Exchange::kPieceBytes;
  Nanoseconds look_again_ = 0;
  size_t turn_ = 0;                                      // of which of these it is
  std::vector<std::unique_ptr<PieceReceiver>> data_in_;  // likewise
  std::vector<Socket> silent_;                           // of data lanes that carry nothing any more
  bool called_control_ = false;
  size_t called_data_ = 0;  // how many lanes
  bool left_ = false, lost_ = false;
};

// Where there are several a piece each in turn: of what the first has room for, the others would get nothing. The next
// time begins behind the lane of the last piece, or the first would have more of each message.
template <typename Lost>
bool Peer::SendPieces(Lost lost) {
  const size_t lanes = std::max(used_, called_data_), most = lanes > 1 ? piece_bytes_ : PieceSender::kBytesInTurn;
  bool more = true;
  for (size_t moved = 0; more && moved < PieceSender::kBytesInTurn; moved += most) {
    more = false;
    for (size_t i = 0, first = turn_; i < lanes && !lost_; ++i) {
      const size_t lane = (first + i) % lanes;
      if (exchange_.sends()) turn_ = (lane + 1) % lanes;
      PieceSender* const sender = data_out_[lane].get();
      const LaneMove move = sender != nullptr ? sender->Move(most) : LaneMove();
      if (move.lost) lost(lane + 1, move);
      more |= move.more;
    }
  }
  return more && !lost_;
}

}  // namespace ringtrain
#endif  // RINGTRAIN_TRANSPORT_TCP_PEER_H_
