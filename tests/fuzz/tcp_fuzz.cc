// What comes over a TCP connection: a hello of a stranger, records under a seal, pieces of messages. The first byte
// says which; the rest comes in steps of a few bytes, as the network likes. Memory stays bounded, and nothing is
// written but where a receive was posted.
#include <algorithm>
#include <memory>

#include "fuzz.h"
#include "transport/tcp/piece_stream.h"

namespace ringtrain {
namespace {

constexpr uint64_t kEpoch = 1;
constexpr uint32_t kPostedBytes = 100000;

HmacKey Key() { return {"key", 3}; }

void HearStranger(const std::string& bytes, size_t step) {
  for (bool knows_secret : {true, false}) {
    HelloAnswerer answerer(knows_secret ? Key() : HmacKey("other", 5), 1, 4, kEpoch, 2, Nonce{9});
    for (size_t begin = 0; begin < bytes.size(); begin += step) {
      const std::string piece = bytes.substr(begin, std::min(step, answerer.wanted()));
      answerer.Hear(reinterpret_cast<const uint8_t*>(piece.data()), piece.size());
      Expect(answerer.wanted() <= Hello::kMostBytes, "a hello of bounded size");
      Expect(answerer.Say().size() <= Hello::kMostBytes, "an answer of bounded size");
    }
    Expect(knows_secret || answerer.state() != Hello::State::kProven, "nothing proven without the secret");
  }
}

void OpenRecords(const std::string& bytes, size_t step) {
  RecordOpener opener(Key());
  FrameJoiner joiner;
  Exchange exchange(kEpoch);
  RecordSealer sealer(Key());
  std::string again;
  for (size_t begin = 0; begin < bytes.size(); begin += step) {
    opener.Feed(bytes.data() + begin, std::min(step, bytes.size() - begin));
    RecordHeader header;
    std::string payload, frame;
    while (opener.Next(&header, &payload)) {
      Expect(payload.size() == header.length && payload.size() <= RecordOpener::kMostPayload, "a payload as announced");
      sealer.Seal(header, payload.data(), &again);
      bool whole = false;
      if (header.type != RecordType::kFrame) exchange.HearControl(header);
      if (header.type == RecordType::kFrame && joiner.Add(header, payload, &frame, &whole) && whole)
        Expect(frame.size() == header.total, "a frame as announced");
    }
  }
  Expect(again == bytes.substr(0, again.size()), "a record that would be sealed as it was");
}

void ReceivePieces(const std::string& bytes, size_t step) {
  Exchange exchange(kEpoch);
  auto memory = std::make_unique<char[]>(kPostedBytes);
  Message receives[2];
  for (Message& receive : receives) {
    receive.data = memory.get();
    receive.bytes = &receive == receives ? kPostedBytes : 5;
    receive.tag = static_cast<uint32_t>(&receive - receives);
    exchange.StartReceive(&receive);
  }
  PieceReader reader(&exchange);
  for (size_t begin = 0; begin < bytes.size();) {
    iovec spans[PieceReader::kMostSpans];
    const int count = reader.Room(spans);
    size_t moved = 0;
    for (int span = 0; span < count; ++span) {
      const size_t chunk = std::min({spans[span].iov_len, step - moved, bytes.size() - begin - moved});
      std::copy_n(bytes.data() + begin + moved, chunk, static_cast<char*>(spans[span].iov_base));
      moved += chunk;
      if (chunk < spans[span].iov_len) break;
    }
    Expect(moved > 0, "room for what comes");
    begin += moved;
    if (reader.Took(moved) != nullptr) return;
    for (RecordHeader header; exchange.NextControl(&header);) Expect(header.epoch == kEpoch, "an answer of this epoch");
  }
  for (const Message& receive : receives)
    Expect(receive.state != Message::kComplete || receive.moved == receive.bytes || receive.moved == 0,
           "a message that is whole when it is complete");
}

std::string Header(RecordType type, uint32_t length, uint32_t total, uint32_t tag) {
  RecordHeader header;
  header.type = type;
  header.length = length;
  header.total = total;
  header.tag = tag;
  header.epoch = kEpoch;
  std::string bytes(RecordHeader::kBytes, '\0');
  header.Encode(&bytes[0]);
  return bytes;
}

}  // namespace

std::vector<std::string> Seeds() {
  HelloCaller caller(Key(), {2, 1, kEpoch, 1}, Nonce{7});
  HelloAnswerer answerer(Key(), 1, 4, kEpoch, 2, Nonce{9});
  std::string hello = caller.Say();
  answerer.Hear(reinterpret_cast<const uint8_t*>(hello.data()), hello.size());
  const std::string challenge = answerer.Say();
  caller.Hear(reinterpret_cast<const uint8_t*>(challenge.data()), challenge.size());
  hello += caller.Say();

  RecordSealer sealer(Key());
  std::string sealed;
  const std::string frame(200, 'f');
  CutFrame(frame, kEpoch,
           [&](const RecordHeader& header, const char* payload) { sealer.Seal(header, payload, &sealed); });
  for (RecordType type : {RecordType::kReady, RecordType::kAsk, RecordType::kReturned, RecordType::kLeave}) {
    RecordHeader header;
    header.type = type;
    header.epoch = kEpoch;
    sealer.Seal(header, "", &sealed);
  }
  const std::string pieces = Header(RecordType::kPiece, 5, 5, 1) + "five." + Header(RecordType::kPiece, 3, 3, 7) +
                             "abc" + Header(RecordType::kPiece, 1000, kPostedBytes, 0) + std::string(1000, 'p');
  return {"\x08" + hello, "\x11" + sealed, "\x32" + pieces, "\x02" + pieces};
}

}  // namespace ringtrain

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace ringtrain;
  if (size == 0) return 0;
  const std::string bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  const size_t step = 1 + size_t{data[0]} / 4 * 16;
  const int kind = data[0] % 4;
  if (kind == 0) HearStranger(bytes, step);
  if (kind == 1) OpenRecords(bytes, step);
  if (kind >= 2) ReceivePieces(bytes, step);
  return 0;
}
