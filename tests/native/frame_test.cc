// Frames: what is encoded is decoded again, and bytes that are no frame are refused. Failures print the seed.
#include "agree/frame.h"

#include <limits>
#include <random>

#include "check.h"

namespace ringtrain {
namespace {

class RandomFrame {
 public:
  explicit RandomFrame(uint64_t seed) : random_(seed) {}

  Frame Make() {
    Frame frame;
    frame.type = static_cast<FrameType>(1 + Pick(9));
    frame.epoch = static_cast<uint32_t>(random_());
    frame.process_set = static_cast<int>(Pick(5000));
    switch (frame.type) {
      case FrameType::kReady:
        frame.ids = Ids();
        for (size_t count = Pick(4); count > 0; --count) frame.requests.push_back(MakeRequest());
        frame.resent = static_cast<int>(Pick(frame.requests.size() + 1));
        for (size_t count = Pick(3); count > 0; --count)
          frame.refusals.push_back({Name(), StatusCode::kInvalidArgument, Name(), {1, 3}});
        break;
      case FrameType::kVerdicts:
        for (size_t count = Pick(4); count > 0; --count) frame.verdicts.push_back(MakeVerdict());
        break;
      case FrameType::kResend:
        frame.ids = Ids();
        break;
      case FrameType::kLongPhase:
        frame.milliseconds = Pick(1 << 20);
        break;
      case FrameType::kStalled:
      case FrameType::kAbort:
        frame.text = Name();
        break;
      default:
        frame.flag = Pick(2) == 1;
    }
    return frame;
  }

 private:
  size_t Pick(size_t bound) { return std::uniform_int_distribution<size_t>(0, bound - 1)(random_); }

  std::string Name() {
    std::string name(Pick(4) == 0 ? Pick(300) : Pick(9), ' ');
    for (char& byte : name) byte = static_cast<char>(random_());
    return name;
  }

  std::vector<ResponseCache::Id> Ids() {
    std::vector<ResponseCache::Id> ids;
    ResponseCache::Id next = 0;
    for (size_t count = Pick(40); count > 0; --count) {
      next += Pick(3) == 0 ? 1 + Pick(1 << 20) : 1;
      ids.push_back(next);
    }
    return ids;
  }

  int64_t Number() {
    constexpr int64_t kNumbers[] = {
        0, 1, -1, 127, 128, -12345, std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::min()};
    return kNumbers[Pick(8)];
  }

  Request MakeRequest() {
    Request request;
    request.name = Name();
    request.operation = static_cast<Operation>(Pick(9));
    request.reduction = Reduction::kMax;
    request.prescale = static_cast<double>(Number());
    request.postscale = 1.0 / 3;
    request.weight = Number();
    request.compression = static_cast<Compression>(Pick(3));
    request.root = static_cast<int>(Pick(10)) - 1;
    request.device = static_cast<int>(Pick(3)) - 1;
    request.cacheable = Pick(2) == 0;
    for (size_t count = Pick(4); count > 0; --count) {
      request.tensors.push_back({static_cast<DType>(Pick(10)), {}});
      for (size_t dimensions = Pick(5); dimensions > 0; --dimensions) request.tensors.back().shape.push_back(Number());
    }
    for (size_t count = Pick(4); count > 0; --count) request.splits.push_back(Number());
    return request;
  }

  Verdict MakeVerdict() {
    Verdict verdict;
    if (Pick(3) == 0)
      verdict.failure = {Name(), StatusCode::kMismatch, Name()};
    else
      verdict.batch.resize(1 + Pick(4));
    for (Agreed& agreed : verdict.batch) {
      agreed.id = Pick(1 << 20);
      agreed.cached = Pick(2) == 0;
      if (agreed.cached) continue;
      agreed.response.request = MakeRequest();
      agreed.response.result = static_cast<int>(Pick(5)) - 1;
      for (size_t count = Pick(5); count > 0; --count) agreed.response.rows.push_back(Number());
      for (size_t count = Pick(5); count > 0; --count) agreed.response.weights.push_back(Number());
    }
    for (size_t count = Pick(4); count > 0; --count) verdict.joined.push_back(static_cast<int>(Pick(100)));
    return verdict;
  }

  std::mt19937_64 random_;
};

bool Same(const Refusal& a, const Refusal& b) {
  return a.name == b.name && a.code == b.code && a.text == b.text && a.missing == b.missing;
}

bool Same(const Verdict& a, const Verdict& b) {
  bool same = a.joined == b.joined && Same(a.failure, b.failure) && a.batch.size() == b.batch.size();
  for (size_t index = 0; same && index < a.batch.size(); ++index) {
    const Agreed &x = a.batch[index], &y = b.batch[index];
    same = x.id == y.id && x.cached == y.cached && x.response.request == y.response.request &&
           x.response.rows == y.response.rows && x.response.weights == y.response.weights &&
           x.response.devices == y.response.devices && x.response.result == y.response.result;
  }
  return same;
}

bool Same(const Frame& a, const Frame& b) {
  bool same = a.type == b.type && a.epoch == b.epoch && a.process_set == b.process_set && a.ids == b.ids &&
              a.requests == b.requests && a.resent == b.resent && a.refusals.size() == b.refusals.size() &&
              a.verdicts.size() == b.verdicts.size() && a.text == b.text && a.flag == b.flag;
  for (size_t index = 0; same && index < a.refusals.size(); ++index) same = Same(a.refusals[index], b.refusals[index]);
  for (size_t index = 0; same && index < a.verdicts.size(); ++index) same = Same(a.verdicts[index], b.verdicts[index]);
  return same;
}

RT_TEST(random_frames_come_back_as_they_were) {
  for (uint64_t seed = 1; seed <= 3000; ++seed) {
    const Frame frame = RandomFrame(seed).Make();
    Frame decoded;
    if (RT_CHECK(Frame::Decode(frame.Encode(), &decoded)) && RT_CHECK(Same(frame, decoded))) continue;
    std::fprintf(stderr, "seed %d\n", static_cast<int>(seed));
    return;
  }
}

RT_TEST(truncated_frames_are_refused_at_every_length) {
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    const std::string bytes = RandomFrame(seed).Make().Encode();
    for (size_t length = 0; length < bytes.size(); ++length) {
      Frame decoded;
      if (RT_CHECK(!Frame::Decode(bytes.substr(0, length), &decoded))) continue;
      std::fprintf(stderr, "seed %d length %d\n", static_cast<int>(seed), static_cast<int>(length));
      return;
    }
  }
}

RT_TEST(frames_with_something_behind_them_are_refused) {
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    Frame decoded;
    RT_CHECK(!Frame::Decode(RandomFrame(seed).Make().Encode() + '\0', &decoded));
  }
}

// A flipped byte may leave a frame that means something else; it must not do harm, and what is accepted can be written
// again.
RT_TEST(flipped_bytes_do_no_harm) {
  for (uint64_t seed = 1; seed <= 25; ++seed) {
    const std::string bytes = RandomFrame(seed).Make().Encode();
    for (size_t place = 0; place < bytes.size(); ++place)
      for (int flip : {0x01, 0x80, 0xff}) {
        std::string flipped = bytes;
        flipped[place] = static_cast<char>(flipped[place] ^ flip);
        Frame decoded, again;
        if (Frame::Decode(flipped, &decoded)) RT_CHECK(Frame::Decode(decoded.Encode(), &again));
      }
  }
}

// What a field cannot hold is no other value of it.
RT_TEST(values_out_of_range_are_refused) {
  const auto decodes = [](FrameType type, uint64_t epoch, int64_t process_set, uint64_t value) {
    Encoder encoder;
    encoder.Byte(static_cast<uint8_t>(type));
    encoder.Unsigned(epoch);
    encoder.Signed(process_set);
    encoder.Unsigned(value);
    Frame frame;
    return Frame::Decode(encoder.Take(), &frame);
  };
  RT_CHECK(decodes(FrameType::kBeat, 7, 1, 1) && !decodes(FrameType::kBeat, 7, 1, 2));
  RT_CHECK(!decodes(FrameType::kBeat, (uint64_t{1} << 32) + 7, 1, 1));
  RT_CHECK(!decodes(FrameType::kBeat, 7, (int64_t{1} << 32) + 1, 1));
  RT_CHECK(decodes(FrameType::kLongPhase, 7, 1, uint64_t{1} << 40));
  RT_CHECK(!decodes(FrameType::kLongPhase, 7, 1, (uint64_t{1} << 40) + 1));
}

RT_TEST(long_phases_of_any_length_can_be_read) {
  Frame frame, decoded;
  frame.type = FrameType::kLongPhase;
  frame.milliseconds = std::numeric_limits<uint64_t>::max();
  RT_CHECK(Frame::Decode(frame.Encode(), &decoded) && decoded.milliseconds == uint64_t{1} << 40);
}

RT_TEST(runs_of_ids_cost_a_few_bytes) {
  Frame frame;
  for (ResponseCache::Id id = 100; id < 100100; ++id) frame.ids.push_back(id);
  RT_CHECK(frame.Encode().size() < 20);
}

RT_TEST(a_few_bytes_cannot_ask_for_much_memory) {
  Frame frame;
  frame.ids = {1};
  std::string bytes = frame.Encode();
  const size_t length = bytes.find(std::string("\x01\x01\x01", 3));  // one run, from 1, of length 1
  RT_REQUIRE(length != std::string::npos);
  bytes.replace(length + 2, 1, "\xff\xff\xff\xff\xff\xff\xff\x7f");
  Frame decoded;
  RT_CHECK(!Frame::Decode(bytes, &decoded));
}

}  // namespace
}  // namespace ringtrain
