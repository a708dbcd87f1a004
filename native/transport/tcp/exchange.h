// Exchange: the messages between this rank and one other. It matches them, decides which may travel, cuts them into
// pieces, and says where the bytes of a piece go. Pure: lanes carry what it gives (piece_stream.h), connections.cc
// moves it.
//
// Messages of different tags share a lane, and are received in another order than they are sent in. If a lane stopped
// at a message that nobody has asked for yet, one behind it might be what its receiver needs first, and both ranks
// would wait for ever; and a peer that does not read for long counts as dead to TCP_USER_TIMEOUT. So a lane is always
// read, and what comes always has a place:
//   - a message above kSmallBytes leaves when its receiver has posted the receive and said so (kReady), which it does
//     at once: it knows the size. Its bytes go straight from the sender's memory to the receiver's;
//   - a smaller one leaves at once, on credit, and waits at the receiver, if need be, in memory of at most kNearCredit
//     for each peer. The sender keeps account, and is given credit back (kReturned). Without credit it asks (kAsk) and
//     waits for kReady;
//   - on a long line kReady would take as long as the bytes. There messages of any size leave on credit, of up to
//     kCredit. A receive that is posted by then has them straight in its memory, as ever.
// A sender of a large message asks too unless kReady has come before, so that a receiver that expects another size
// finds out.
#ifndef RINGTRAIN_TRANSPORT_TCP_EXCHANGE_H_
#define RINGTRAIN_TRANSPORT_TCP_EXCHANGE_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>

#include "transport/tcp/record.h"

namespace ringtrain {

// A message that this rank sends or receives: its owner's memory, and how far it is.
struct Message {
  enum State : uint32_t { kUnderWay, kComplete, kWrongSize };

  char* data = nullptr;
  uint32_t bytes = 0;
  int peer = 0;
  uint32_t tag = 0;
  bool receives = false;
  std::atomic<uint32_t> state{kUnderWay};  // the last thing that an exchange does to it
  uint32_t found = 0;                      // bytes of a message of the wrong size

  // The exchange's own.
  bool on_credit = false;  // sent before its receiver has said that it is ready
  uint32_t sequence = 0;
  uint32_t cut = 0;    // bytes of a sent message that pieces have been made of
  uint32_t moved = 0;  // bytes that have left
};

struct Piece {
  RecordHeader header;
  const char* data = nullptr;
  Message* message = nullptr;
};

class Exchange {
 public:
  static constexpr uint32_t kSmallBytes = 64 << 10;
  static constexpr uint32_t kPieceBytes = 256 << 10;  // at most
  static constexpr uint32_t kNearCredit = 1 << 20;
  static constexpr uint32_t kCredit = 8 << 20;

  explicit Exchange(uint64_t epoch) : epoch_(epoch) {}

  void StartSend(Message* message);
  void StartReceive(Message* message);

  // The next control record for the peer; false if there is none.
  bool NextControl(RecordHeader* header);
  bool has_control() const { return !control_.empty(); }
  // A control record of the peer about messages. Returns a fault of the peer, or nullptr.
  const char* HearControl(const RecordHeader& header);

  // The next piece to send, small messages first; false if none may leave now.
  bool NextPiece(Piece* piece);
  bool sends() const { return !small_.empty() || !large_.empty(); }
  // From now on pieces have at most so many bytes, up to kPieceBytes.
  void CutInto(uint32_t piece_bytes) { piece_bytes_ = piece_bytes; }
  // The line is a long one.
  void NoteFar() { is_far_ = true; }
  // All of its bytes are in the kernel's hands.
  void PieceLeft(const Piece& piece);

  // Where the payload of an arriving piece goes; nullptr if it is thrown away. Returns a fault of the peer, or nullptr.
  const char* Place(const RecordHeader& header, char** memory);
  // All of its payload is there.
  void PieceArrived(const RecordHeader& header);

  // Lets go of all messages; nothing more is sent or expected.
  void Abandon();
  // Whether a message above kSmallBytes is under way, which takes more than one look.
  bool bulky() const { return bulky_ > 0; }
  // Whether a receive is posted and not complete.
  bool receives() const;
  // Whether a message has ended since this was asked last.
  bool TakeNews() { return std::exchange(news_, false); }

 private:
  using Key = uint64_t;  // tag and sequence
  struct Incoming {
    Message* message = nullptr;  // once its receive is posted
    bool told = false;           // kReady was sent
    bool announced = false;      // total is known
    bool on_credit = false;      // it has come so, and counts in staged_
    bool came = false;           // a piece of it
    bool whole = false;          // all of it has arrived
    bool refused = false;        // of the wrong size: what comes is thrown away
    uint32_t total = 0;
    uint32_t placed = 0;  // bytes for which a place was asked
    uint32_t arrived = 0;
    std::string staged;  // all of it, if its first piece came before its receive was posted
  };
  using IncomingMap = std::unordered_map<Key, Incoming>;

  static Key KeyOf(uint32_t tag, uint32_t sequence) { return Key{tag} << 32 | sequence; }
  static uint64_t Cost(uint32_t bytes) { return uint64_t{bytes} + 64; }
  bool MayLeaveOnCredit(uint32_t bytes) const;
  static bool IsPast(const std::unordered_map<uint32_t, uint32_t>& next, const RecordHeader& header);
  void Tell(RecordType type, uint32_t tag, uint32_t sequence, uint32_t total);
  void End(Message* message, Message::State state);
  void Ready(IncomingMap::iterator incoming);
  void Finish(IncomingMap::iterator incoming);
  void RefuseSize(IncomingMap::iterator incoming);
  void ReturnCredit(const Incoming& incoming);

  const uint64_t epoch_;
  bool news_ = false;
  int bulky_ = 0;
  std::deque<RecordHeader> control_;

  // Sending.
  bool is_far_ = false;
  uint32_t piece_bytes_ = kPieceBytes;
  std::unordered_map<uint32_t, uint32_t> next_send_;  // sequence by tag
  std::deque<Message*> small_, large_;                // may leave
  std::map<Key, Message*> waiting_;                   // for kReady
  std::set<Key> granted_;                             // kReady came first
  uint32_t credit_ = kCredit;

  // Receiving.
  std::unordered_map<uint32_t, uint32_t> next_receive_;  // sequence by tag
  IncomingMap incoming_;
  uint32_t staged_ = 0;    // cost of what has come on credit, and is not returned
  uint32_t returned_ = 0;  // to be returned
};

}  // namespace ringtrain
#endif  // RINGTRAIN_TRANSPORT_TCP_EXCHANGE_H_
