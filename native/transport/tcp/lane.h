// Lanes: what a rank does with one connection to or from another, with non-blocking calls. Records are record.h's,
// pieces piece_stream.h's; here bytes move between those and the kernel.
//
// Each lane carries records in one direction, from the rank that called to the one that answered. So nobody's calls
// cross, and a rank that leaves closes what it sends on behind its last byte, whatever still lies in what it receives
// on. One thing goes the other way: a rank that leaves says so on the control lanes that it receives on, too, by 16
// bytes that only this connection's other end can have made. A connection that ends without has been lost.
#ifndef RINGTRAIN_TRANSPORT_TCP_LANE_H_
#define RINGTRAIN_TRANSPORT_TCP_LANE_H_

#include <errno.h>

#include <string>
#include <utility>
#include <vector>

#include "transport/tcp/piece_stream.h"
#include "transport/tcp/socket.h"

namespace ringtrain {

// How a lane's move ended.
struct LaneMove {
  bool more = false;  // it could go on at once: it stopped so that others have their turn
  bool lost = false;  // the connection has ended, for this cause ("connection reset by")
  std::string cause;
  bool timed_out = false;  // what was sent has found no answer
  int lack = 0;            // the errno of what this host or process lacks; the connection is as it was

  static LaneMove Lost(int error) {
    if (IsLack(error)) return {false, true, "", false, error};
    return {false, true, ConnectionCause(error), error == ETIMEDOUT, 0};
  }
  // The peer does not keep to the protocol.
  static LaneMove Fault(const char* fault) {
    return {false, true, std::string("a record that ") + fault + ", from", false, 0};
  }
};

// Sends control records.
class ControlSender {
 public:
  ControlSender(Socket socket, const HmacKey& key)
      : socket_(std::move(socket)), sealer_(key), leave_(key.Of("leave")) {}
  Socket& socket() { return socket_; }
  void Add(const RecordHeader& header, const char* payload) { sealer_.Seal(header, payload, &bytes_); }
  bool empty() const { return bytes_.empty(); }
  LaneMove Move();
  // Takes what the peer says against the direction: *left, if it leaves.
  LaneMove Listen(bool* left);
  bool writable = true;  // as far as is known

 private:
  Socket socket_;
  RecordSealer sealer_;
  const Digest leave_;
  std::string bytes_;  // sealed; the first sent_ have left
  size_t sent_ = 0;
  std::string heard_;  // of what goes against the direction
};

// Receives them.
class ControlReceiver {
 public:
  struct Record {
    RecordHeader header;
    std::string payload;
  };

  ControlReceiver(Socket socket, const HmacKey& key)
      : socket_(std::move(socket)), opener_(key), leave_(key.Of("leave")) {}
  Socket& socket() { return socket_; }
  // Appends the records that have come.
  LaneMove Move(std::vector<Record>* records);
  // Tells the peer that this rank leaves.
  void SayLeave() const;
  bool ended = false;  // the kernel says so: there is an end to be read behind what has come

 private:
  Socket socket_;
  RecordOpener opener_;
  const Digest leave_;
};

// Sends pieces of messages. ahead: bytes that it may take of the exchange before they leave.
class PieceSender {
 public:
  static constexpr size_t kBytesInTurn = 2 << 20;  // before other peers have their turn
  PieceSender(Socket socket, Exchange* exchange, size_t ahead)
      : socket_(std::move(socket)), writer_(exchange), ahead_(ahead) {}
  Socket& socket() { return socket_; }
  // Sends `most` bytes, or some more, unless there are fewer or no room.
  LaneMove Move(size_t most);
  // Whether the peer has closed it.
  LaneMove Listen() const;
  void TakeAhead(size_t bytes) { ahead_ = bytes; }
  bool writable = true;

 private:
  Socket socket_;
  PieceWriter writer_;
  size_t ahead_;
};

// Receives them.
class PieceReceiver {
 public:
  PieceReceiver(Socket socket, Exchange* exchange) : socket_(std::move(socket)), reader_(exchange) {}
  Socket& socket() { return socket_; }
  LaneMove Move();
  bool ended = false;  // as above

 private:
  Socket socket_;
  PieceReader reader_;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_TRANSPORT_TCP_LANE_H_
