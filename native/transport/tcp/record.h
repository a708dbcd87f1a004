// Records: what travels over a TCP connection after its hello. Pure: bytes in, records out, and the other way around.
//
// A record is a header of fixed size and its payload. There is one format for all lanes. On lane 0, the control lane,
// each record is sealed: 16 bytes of HMAC-SHA-256 follow it, over its place in the connection, its header and its
// payload, under a key that belongs to this connection and its direction. So none can be changed, repeated, left out
// or moved. On the other lanes pieces of tensors travel without a seal, as MPI's do.
#ifndef RINGTRAIN_TRANSPORT_TCP_RECORD_H_
#define RINGTRAIN_TRANSPORT_TCP_RECORD_H_

#include <cstdint>
#include <string>

#include "transport/tcp/hello.h"

namespace ringtrain {

enum class RecordType : uint8_t {
  kFrame = 1,     // control: part of a frame; offset and total tell which
  kPiece = 2,     // data: part of a message that its receiver is ready for
  kReady = 3,     // control: the receive of this message is posted, its pieces may come
  kAsk = 4,       // control: a message of `total` bytes waits for its kReady
  kReturned = 5,  // control: `total` is credit, given back
  kLeave = 6,     // control: the sender leaves of its own will; nothing follows
  kOnCredit = 7,  // data: part of a message that its receiver may not be ready for
};

struct RecordHeader {
  static constexpr size_t kBytes = 32;

  RecordType type = RecordType::kFrame;
  uint32_t length = 0;    // bytes of payload
  uint64_t epoch = 0;     // of the world that it belongs to
  uint32_t tag = 0;       // of the message
  uint32_t sequence = 0;  // of the message among those of its pair of ranks and tag
  uint32_t offset = 0;    // of the payload in the message or frame
  uint32_t total = 0;     // bytes of the whole message or frame

  void Encode(char* to) const;
  // False if the bytes are no header.
  static bool Decode(const char* from, RecordHeader* header);
  // Whether the payload lies within its whole.
  bool Fits() const { return uint64_t{offset} + length <= total; }
};

// The sending end of a control lane.
class RecordSealer {
 public:
  explicit RecordSealer(const HmacKey& key) : key_(key) {}
  // Appends the sealed record to `to`.
  void Seal(const RecordHeader& header, const char* payload, std::string* to);

 private:
  const HmacKey key_;
  uint64_t count_ = 0;
};

// The receiving end.
class RecordOpener {
 public:
  static constexpr uint32_t kMostPayload = 64 << 10;
  static constexpr size_t kSealBytes = 16;

  explicit RecordOpener(const HmacKey& key) : key_(key) {}
  // Bytes that have come, in pieces of any size.
  void Feed(const char* data, size_t bytes) { bytes_.append(data, bytes); }
  // Takes the next record; false if none is whole, or something is wrong, after which no record comes any more.
  bool Next(RecordHeader* header, std::string* payload);
  // What is wrong, as the end of a sentence; nullptr while nothing is.
  const char* fault() const { return fault_; }

 private:
  bool Wait();
  bool Fail(const char* fault);

  const HmacKey key_;
  uint64_t count_ = 0;
  std::string bytes_;  // those before read_ have been taken
  size_t read_ = 0;
  const char* fault_ = nullptr;
};

// Cuts a frame into records and puts it together again.
template <typename Emit>
void CutFrame(const std::string& frame, uint64_t epoch, Emit emit) {
  RecordHeader header;
  header.epoch = epoch;
  header.total = static_cast<uint32_t>(frame.size());
  do {
    const size_t left = frame.size() - header.offset;
    header.length = static_cast<uint32_t>(left < RecordOpener::kMostPayload ? left : RecordOpener::kMostPayload);
    emit(header, frame.data() + header.offset);
    header.offset += header.length;
  } while (header.offset < frame.size());
}

class FrameJoiner {
 public:
  static constexpr size_t kMostBytes = size_t{64} << 20;  // of a frame

  // False if the record does not continue what has come; *whole tells that `frame` is now the whole frame.
  bool Add(const RecordHeader& header, const std::string& payload, std::string* frame, bool* whole);

 private:
  std::string bytes_;
  uint32_t total_ = 0;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_TRANSPORT_TCP_RECORD_H_
