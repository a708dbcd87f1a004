// Control frames of an elastic job: what is decoded must be bounded by its bytes, be the same when it is encoded and
// decoded again, and do no harm to those who are told it.
#include "elastic/authority.h"
#include "elastic/control.h"
#include "elastic/membership.h"
#include "fuzz.h"

namespace ringtrain {
namespace {

constexpr ControlType kLastType = ControlType::kBeat;
const Process kMe = {{1, 2}, "a", 0, "a:7000"};

ControlFrame Sample(ControlType type) {
  ControlFrame frame;
  frame.type = type;
  frame.epoch = {3, 4};
  frame.process = kMe;
  frame.program = "digest";
  frame.admits = false;
  frame.uids = {{1, 2}, {5, 6}};
  frame.members = {{kMe, false}, {{{5, 6}, "b", 1, "b:7000"}, true}};
  frame.key = std::string(32, 'k');
  frame.text = "it has not answered";
  return frame;
}

// A member of a world, which hears the frame.
void Tell(const ControlFrame& frame) {
  Membership membership(kMe, "digest");
  MembershipActions actions;
  membership.Begin(&actions);
  ControlFrame form = Sample(ControlType::kForm), go = Sample(ControlType::kGo);
  form.epoch = go.epoch = {1, 1};
  form.members.resize(1);
  membership.Arrived(form, &actions);
  membership.Connected(form.epoch.count, true, &actions);
  membership.Arrived(go, &actions);
  Expect(membership.state() == Membership::State::kMember, "a member");
  membership.Arrived(frame, &actions);
}

}  // namespace

std::vector<std::string> Seeds() {
  std::vector<std::string> seeds;
  for (int type = 1; type <= static_cast<int>(kLastType); ++type)
    seeds.push_back(Sample(static_cast<ControlType>(type)).Encode());
  return seeds;
}

}  // namespace ringtrain

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace ringtrain;
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  ControlFrame frame, again;
  if (!ControlFrame::Decode(bytes, &frame)) return 0;
  Expect(frame.uids.size() <= size && frame.members.size() <= size, "a byte at least for each item");
  Expect(frame.process.slot >= 0 && frame.process.slot <= 1 << 16, "a slot that there may be");
  const std::string encoded = frame.Encode();
  Expect(ControlFrame::Decode(encoded, &again) && again.Encode() == encoded, "a frame that can be decoded again");
  Tell(frame);
  AuthorityOptions options;
  options.hosts = {{"a", 1}};
  options.random = [] { return uint64_t{1}; };
  Authority authority(options);
  AuthorityActions actions;
  authority.Resume(0, bytes);
  authority.HostCame(0, "a", &actions);
  authority.Arrived(1, "a", frame, &actions);
  authority.Tick(2, &actions);
  return 0;
}
