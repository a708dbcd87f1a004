#include "elastic/control.h"

#include "base/bytes.h"

namespace ringtrain {
namespace {

constexpr uint64_t kMaxSlot = 1 << 16;

// A frame's fields in their order, once for both ways: of an Encoder and of a Decoder the same calls are made.
struct Writer {
  Encoder encoder;
  bool ok() const { return true; }
  void Number(const uint64_t& value) { encoder.Unsigned(value); }
  void Small(const int& value) { encoder.Signed(value); }
  void Slot(const int& value) { encoder.Unsigned(static_cast<uint64_t>(value)); }
  void Flag(const bool& value) { encoder.Byte(value); }
  void Text(const std::string& value) { encoder.Text(value); }
  template <typename T>
  size_t Count(const std::vector<T>& values) {
    encoder.Unsigned(values.size());
    return values.size();
  }
};

struct Reader {
  Decoder decoder;
  bool ok() const { return decoder.ok(); }
  void Number(uint64_t& value) { value = decoder.Unsigned(); }
  void Small(int& value) { value = decoder.Int(); }
  void Slot(int& value) { value = static_cast<int>(decoder.AtMost(kMaxSlot)); }
  void Flag(bool& value) { value = decoder.Flag(); }
  void Text(std::string& value) { value = decoder.Text(); }
  template <typename T>
  size_t Count(std::vector<T>& values) {
    values.resize(decoder.Count());
    return values.size();
  }
};

template <typename Way, typename U>
void Fields(Way& way, U& uid, const Uid*) {
  way.Number(uid.high);
  way.Number(uid.low);
}

template <typename Way, typename Id>
void Fields(Way& way, Id& epoch, const EpochId*) {
  way.Number(epoch.count);
  way.Number(epoch.nonce);
}

template <typename Way, typename P>
void Fields(Way& way, P& process, const Process*) {
  Fields(way, process.uid, static_cast<const Uid*>(nullptr));
  way.Text(process.host);
  way.Slot(process.slot);
  way.Text(process.address);
}

template <typename Way, typename M>
void Fields(Way& way, M& member, const Member*) {
  Fields(way, member.process, static_cast<const Process*>(nullptr));
  way.Flag(member.joins);
}

template <typename Way, typename T>
void Of(Way& way, T& value) {
  Fields(way, value, static_cast<const std::remove_const_t<T>*>(nullptr));
}

template <typename Way, typename List>
void Each(Way& way, List& list) {
  const size_t count = way.Count(list);
  for (size_t i = 0; i < count && way.ok(); ++i) Of(way, list[i]);
}

// False for a type that there is not.
template <typename Way, typename Frame>
bool Body(Way& way, Frame& frame) {
  switch (frame.type) {
    case ControlType::kReady:
      Of(way, frame.process), Of(way, frame.epoch);
      way.Text(frame.program), way.Flag(frame.stopped);
      return true;
    case ControlType::kDead:
      Of(way, frame.process);
      way.Small(frame.exit_code);
      return true;
    case ControlType::kSuspect:
      Of(way, frame.epoch), Of(way, frame.process), Each(way, frame.uids), way.Flag(frame.hangs),
          way.Flag(frame.refused);
      return true;
    case ControlType::kReport:
      Of(way, frame.epoch), Of(way, frame.process);
      way.Flag(frame.admits), way.Flag(frame.holds_state), Each(way, frame.uids);
      return true;
    case ControlType::kForm:
      Of(way, frame.epoch), Each(way, frame.members);
      way.Text(frame.key);
      return true;
    case ControlType::kFormed:
      Of(way, frame.epoch), Of(way, frame.process);
      return true;
    case ControlType::kStop:
    case ControlType::kGo:
      Of(way, frame.epoch);
      way.Flag(frame.at_release);
      return true;
    case ControlType::kLeave:
      Of(way, frame.process);
      way.Flag(frame.finished);
      return true;
    case ControlType::kEvict:
      Of(way, frame.process);
      way.Text(frame.text);
      return true;
    case ControlType::kPresent:
      Each(way, frame.uids);
      way.Text(frame.record), way.Flag(frame.finished);
      return true;
    case ControlType::kAsk:
    case ControlType::kBeat:
      return true;
  }
  return false;
}

}  // namespace

std::string ControlFrame::Encode() const {
  Writer writer;
  writer.encoder.Byte(static_cast<uint8_t>(type));
  Body(writer, *this);
  return writer.encoder.Take();
}

bool ControlFrame::Decode(const std::string& bytes, ControlFrame* frame) {
  Reader reader{Decoder(bytes)};
  frame->type = static_cast<ControlType>(reader.decoder.Byte());
  return Body(reader, *frame) && reader.decoder.ok() && reader.decoder.AtEnd();
}

Uids UidsOf(const std::vector<Member>& members) {
  Uids uids;
  for (const Member& member : members) uids.push_back(member.process.uid);
  return uids;
}

}  // namespace ringtrain
