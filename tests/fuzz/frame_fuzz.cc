// Frames of the negotiation: what is decoded must be bounded by its bytes, and be the same when it is encoded and
// decoded again. Requests in it are checked as if this rank had submitted them: shapes, splits, the ranks of new
// process sets.
#include "agree/frame.h"
#include "fuzz.h"

namespace ringtrain {
namespace {

constexpr size_t kMaxIds = size_t{1} << 20;  // the highest cache_capacity
constexpr FrameType kLastType = FrameType::kGone;

Request Sample(Operation operation) {
  Request request;
  request.operation = operation;
  request.name = "layer.weight";
  request.tensors = {{DType::kFloat32, {6, 10}}};
  request.root = 1;
  request.splits = {1, 2, 3};
  return request;
}

Frame Sample(FrameType type) {
  Frame frame;
  frame.type = type;
  frame.ids = {1, 2, 3, 7, 8, 1000};
  for (Operation operation : {Operation::kAllreduce, Operation::kAllgather, Operation::kAlltoall,
                              Operation::kAddProcessSet, Operation::kRemoveProcessSet})
    frame.requests.push_back(Sample(operation));
  frame.refusals = {{"x", StatusCode::kInvalidArgument, "no"}};
  frame.verdicts.resize(2);
  frame.verdicts[0].batch = {{7, true, {}}, {8, false, {Sample(Operation::kAllgather), {4, 5, 6}, 1, {9, 0}, {}}}};
  frame.verdicts[0].joined = {1, 3};
  frame.verdicts[1].failure = frame.refusals[0];
  frame.text = "rank 3 failed";
  frame.flag = true;
  frame.milliseconds = 60000;
  return frame;
}

}  // namespace

std::vector<std::string> Seeds() {
  std::vector<std::string> seeds;
  for (int type = 1; type <= static_cast<int>(kLastType); ++type)
    seeds.push_back(Sample(static_cast<FrameType>(type)).Encode());
  return seeds;
}

}  // namespace ringtrain

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace ringtrain;
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  Frame frame, again;
  if (!Frame::Decode(bytes, &frame)) return 0;
  Expect(frame.ids.size() <= kMaxIds, "no more ids than a cache may have");
  Expect(frame.requests.size() <= size && frame.refusals.size() <= size && frame.verdicts.size() <= size,
         "a byte at least for each item");
  const std::string encoded = frame.Encode();
  Expect(Frame::Decode(encoded, &again) && again.Encode() == encoded, "a frame that can be encoded and decoded again");
  for (const Request& request : frame.requests) {
    const Status status = Check(request, {0, 1, 2});
    Expect(status.ok() || !status.message().empty(), "a reason for what is refused");
  }
  return 0;
}
