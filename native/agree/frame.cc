#include "agree/frame.h"

#include <algorithm>
#include <limits>

#include "agree/check.h"

namespace ringtrain {
namespace {

// Ids come in runs: after warm-up a whole step's tensors are one or two of them, so a run costs less than a bit for
// each name.
void EncodeRuns(const std::vector<ResponseCache::Id>& ids, Encoder* encoder) {
  std::vector<std::pair<uint64_t, uint64_t>> runs;  // distance from the end of the last one, length
  uint64_t next = 0;
  for (ResponseCache::Id id : ids) {
    if (!runs.empty() && id == next)
      ++runs.back().second;
    else
      runs.emplace_back(id - next, 1);
    next = id + 1;
  }
  encoder->Unsigned(runs.size());
  for (const auto& run : runs) {
    encoder->Unsigned(run.first);
    encoder->Unsigned(run.second);
  }
}

constexpr uint64_t kMaxMilliseconds = uint64_t{1} << 40;  // thirty years, which fit into nanoseconds
// The highest values of the options, as the table has them.
struct Highest {
#define RT_OPTION(name, type, initial, lowest, highest, agrees, horovod, sentence) \
  static constexpr char name[] = highest;
#include "tables/options.def"
#undef RT_OPTION
};
constexpr uint64_t ValueOf(const char* digits) {
  uint64_t value = 0;
  for (; *digits != '\0'; ++digits) value = value * 10 + static_cast<uint64_t>(*digits - '0');
  return value;
}
constexpr uint64_t kMaxIds = ValueOf(Highest::cache_capacity);

std::vector<ResponseCache::Id> DecodeRuns(Decoder* decoder) {
  std::vector<ResponseCache::Id> ids;
  uint64_t next = 0;
  for (size_t run = decoder->Count(); run > 0 && decoder->ok(); --run) {
    next += decoder->Unsigned();
    uint64_t length = decoder->Unsigned();
    if (length > kMaxIds - ids.size()) {
      decoder->Refuse();
      break;
    }
    for (; length > 0; --length) ids.push_back(next++);
  }
  return ids;
}

constexpr int kMaxMembers = 1 << 20;

uint32_t DecodeNumber(Decoder* decoder) {
  return static_cast<uint32_t>(decoder->AtMost(std::numeric_limits<uint32_t>::max()));
}

void EncodeCycle(const std::vector<std::vector<ResponseCache::Id>>& cycle, Encoder* encoder) {
  encoder->Unsigned(cycle.size());
  for (const auto& batch : cycle) {
    encoder->Unsigned(batch.size());
    for (ResponseCache::Id id : batch) encoder->Unsigned(id);
  }
}

// A batch has an operation at least, and the cycle each of them once.
std::vector<std::vector<ResponseCache::Id>> DecodeCycle(Decoder* decoder) {
  std::vector<std::vector<ResponseCache::Id>> cycle(decoder->Count());
  std::vector<ResponseCache::Id> ids;
  for (auto& batch : cycle) {
    batch.resize(decoder->Count());
    for (ResponseCache::Id& id : batch) ids.push_back(id = decoder->Unsigned());
    if (batch.empty()) decoder->Refuse();
  }
  std::sort(ids.begin(), ids.end());
  if (cycle.empty() || std::adjacent_find(ids.begin(), ids.end()) != ids.end()) decoder->Refuse();
  return cycle;
}

void EncodeRefusal(const Refusal& refusal, Encoder* encoder) {
  encoder->Text(refusal.name);
  encoder->Byte(static_cast<uint8_t>(refusal.code));
  encoder->Text(refusal.text);
  encoder->SignedList({refusal.missing.begin(), refusal.missing.end()});
}

Refusal DecodeRefusal(Decoder* decoder) {
  Refusal refusal;
  refusal.name = decoder->Text();
  refusal.code = static_cast<StatusCode>(decoder->Byte());
  refusal.text = decoder->Text();
  for (int64_t rank : decoder->SignedList()) refusal.missing.push_back(static_cast<int>(rank));
  if (Text(refusal.code) == nullptr) decoder->Refuse();
  return refusal;
}

void EncodeVerdict(const Verdict& verdict, Encoder* encoder) {
  encoder->Unsigned(verdict.batch.size());
  if (verdict.batch.empty()) EncodeRefusal(verdict.failure, encoder);
  for (const Agreed& agreed : verdict.batch) {
    encoder->Byte(agreed.cached);
    encoder->Unsigned(agreed.id);
    if (!agreed.cached) ringtrain::Encode(agreed.response, encoder);
  }
  encoder->SignedList({verdict.joined.begin(), verdict.joined.end()});
}

Verdict DecodeVerdict(Decoder* decoder) {
  Verdict verdict;
  verdict.batch.resize(decoder->Count());
  if (verdict.batch.empty()) verdict.failure = DecodeRefusal(decoder);
  for (Agreed& agreed : verdict.batch) {
    agreed.cached = decoder->Flag();
    agreed.id = decoder->Unsigned();
    if (!agreed.cached) agreed.response = DecodeResponse(decoder);
  }
  for (int64_t member : decoder->SignedList()) verdict.joined.push_back(static_cast<int>(member));
  return verdict;
}

}  // namespace

bool Frame::Fits(const std::vector<int>& process_set_members) const {
  const auto size = static_cast<int>(process_set_members.size());
  const auto is_right = [&](const Request& request) { return ringtrain::Fits(request, process_set_members); };
  const auto is_member = [&](int member) { return member >= 0 && member < size; };
  bool fits = std::all_of(requests.begin(), requests.end(), is_right);
  for (const Verdict& verdict : verdicts) {
    fits = fits && std::all_of(verdict.joined.begin(), verdict.joined.end(), is_member);
    for (const Agreed& agreed : verdict.batch)
      fits = fits && (agreed.cached || ringtrain::Fits(agreed.response, process_set_members));
  }
  return fits;
}

std::string Frame::Encode() const {
  Encoder encoder;
  encoder.Byte(static_cast<uint8_t>(type));
  encoder.Unsigned(epoch);
  encoder.Signed(process_set);
  switch (type) {
    case FrameType::kReady:
      encoder.Unsigned(schedule);
      EncodeRuns(ids, &encoder);
      encoder.Unsigned(resent);
      encoder.Unsigned(requests.size());
      for (const Request& request : requests) ringtrain::Encode(request, &encoder);
      encoder.Unsigned(refusals.size());
      for (const Refusal& refusal : refusals) EncodeRefusal(refusal, &encoder);
      break;
    case FrameType::kVerdicts:
      encoder.Unsigned(verdicts.size());
      for (const Verdict& verdict : verdicts) EncodeVerdict(verdict, &encoder);
      break;
    case FrameType::kResend:
      EncodeRuns(ids, &encoder);
      break;
    case FrameType::kAbort:
    case FrameType::kStalled:
      encoder.Text(text);
      break;
    case FrameType::kGoodbye:
    case FrameType::kAllGoodbye:
    case FrameType::kBeat:
      encoder.Byte(flag);
      break;
    case FrameType::kLongPhase:
      encoder.Unsigned(std::min(milliseconds, kMaxMilliseconds));
      break;
    case FrameType::kSchedule:
      encoder.Unsigned(schedule);
      EncodeCycle(cycle, &encoder);
      break;
    case FrameType::kPromise:
      encoder.Unsigned(schedule);
      encoder.Unsigned(count);
      encoder.Unsigned(static_cast<uint64_t>(last));
      encoder.Unsigned(static_cast<uint64_t>(std::clamp<Nanoseconds>(gap, 0, kMaxMilliseconds)));
      encoder.Text(text);
      break;
    case FrameType::kHalt:
    case FrameType::kHalted:
      encoder.Unsigned(schedule);
      encoder.Unsigned(count);
      break;
    case FrameType::kOffer:
      encoder.Unsigned(count);
      encoder.Signed(tag);
      ringtrain::Encode(tensor, &encoder);
      encoder.Byte(flag);
      encoder.Text(text);
      break;
    case FrameType::kDecline:
      encoder.Unsigned(count);
      encoder.Text(text);
      break;
    case FrameType::kAccept:
    case FrameType::kTaken:
      encoder.Unsigned(count);
      break;
    case FrameType::kAwait:
    case FrameType::kGone:
      break;
  }
  return encoder.Take();
}

bool Frame::Decode(const std::string& bytes, Frame* frame) {
  Decoder decoder(bytes);
  frame->type = static_cast<FrameType>(decoder.Byte());
  frame->epoch = static_cast<uint32_t>(decoder.AtMost(std::numeric_limits<uint32_t>::max()));
  frame->process_set = decoder.Int();
  switch (frame->type) {
    case FrameType::kReady:
      frame->schedule = DecodeNumber(&decoder);
      frame->ids = DecodeRuns(&decoder);
      frame->resent = static_cast<int>(decoder.Count());
      frame->requests.resize(decoder.Count());
      for (Request& request : frame->requests) request = DecodeRequest(&decoder);
      frame->refusals.resize(decoder.Count());
      for (Refusal& refusal : frame->refusals) refusal = DecodeRefusal(&decoder);
      break;
    case FrameType::kVerdicts:
      frame->verdicts.resize(decoder.Count());
      for (Verdict& verdict : frame->verdicts) verdict = DecodeVerdict(&decoder);
      break;
    case FrameType::kResend:
      frame->ids = DecodeRuns(&decoder);
      break;
    case FrameType::kAbort:
    case FrameType::kStalled:
      frame->text = decoder.Text();
      break;
    case FrameType::kGoodbye:
    case FrameType::kAllGoodbye:
    case FrameType::kBeat:
      frame->flag = decoder.Flag();
      break;
    case FrameType::kLongPhase:
      frame->milliseconds = decoder.AtMost(kMaxMilliseconds);
      break;
    case FrameType::kSchedule:
      frame->schedule = DecodeNumber(&decoder);
      frame->cycle = DecodeCycle(&decoder);
      break;
    case FrameType::kPromise:
      frame->schedule = DecodeNumber(&decoder);
      frame->count = decoder.Unsigned();
      frame->last = static_cast<int>(decoder.AtMost(kMaxMembers));
      frame->gap = static_cast<Nanoseconds>(decoder.AtMost(kMaxMilliseconds));
      frame->text = decoder.Text();
      break;
    case FrameType::kHalt:
    case FrameType::kHalted:
      frame->schedule = DecodeNumber(&decoder);
      frame->count = decoder.Unsigned();
      break;
    case FrameType::kOffer:
      frame->count = decoder.Unsigned();
      frame->tag = decoder.Signed();
      frame->tensor = DecodeTensor(&decoder);
      frame->flag = decoder.Flag();
      frame->text = decoder.Text();
      if (!IsPossible(frame->tensor) || (frame->flag && frame->text.size() != frame->tensor.bytes())) decoder.Refuse();
      break;
    case FrameType::kDecline:
      frame->count = decoder.Unsigned();
      frame->text = decoder.Text();
      break;
    case FrameType::kAccept:
    case FrameType::kTaken:
      frame->count = decoder.Unsigned();
      break;
    case FrameType::kAwait:
    case FrameType::kGone:
      break;
    default:
      decoder.Refuse();
  }
  return decoder.ok() && decoder.AtEnd();
}

}  // namespace ringtrain
