// The C ABI of elastic/authority.h and elastic/membership.h: translation only.
#include <sys/random.h>

#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/without_memory.h"
#include "elastic/authority.h"
#include "elastic/membership.h"
#include "include/ringtrain.h"

using ringtrain::ControlFrame;
using ringtrain::ControlType;
using ringtrain::Nanoseconds;
using ringtrain::Process;
using ringtrain::Uid;
namespace authority_action = ringtrain::authority_action;
namespace membership_action = ringtrain::membership_action;

struct rt_authority {
  ringtrain::Authority authority;
  ringtrain::AuthorityActions actions;  // that follow from the last event
  size_t given = 0;                     // of them
  std::string uid, frame;               // of the one that was given last
};
struct rt_membership {
  rt_membership(const Process& me, const char* program) : uid(me.uid), membership(me, program) {}
  const Uid uid;
  ringtrain::Membership membership;
  ringtrain::MembershipActions actions;
  size_t given = 0;
  std::string frame;
  std::vector<std::string> uids;
  std::vector<rt_member> members;
};

namespace {

constexpr size_t kUidDigits = 32;

// The number of actions that follow from `act(&actions)`.
template <typename Decider, typename Act>
int32_t ActionsOf(Decider* decider, Act act) {
  decider->actions.clear();
  decider->given = 0;
  return Or<int32_t>(-1, [&] {
    act(&decider->actions);
    return static_cast<int32_t>(decider->actions.size());
  });
}

// The next one of them, by `into`.
template <typename Decider, typename Action, typename Into>
int32_t Next(Decider* decider, Action* action, Into into) {
  if (decider->given == decider->actions.size()) return 0;
  *action = {};
  return Or<int32_t>(-1, [&] { return std::visit(into, decider->actions[decider->given]), ++decider->given, 1; });
}

Nanoseconds InNanoseconds(double seconds) {
  return seconds > 9e9 ? ringtrain::kNever : static_cast<Nanoseconds>(seconds * 1e9);
}

double InSeconds(Nanoseconds time) {
  return time == ringtrain::kNever ? std::numeric_limits<double>::infinity() : static_cast<double>(time) / 1e9;
}

uint64_t Unguessable() {
  uint64_t number = 0;
  if (getrandom(&number, sizeof number, 0) != sizeof number)
    throw std::runtime_error("the kernel gives no random bytes");
  return number;
}

std::string TextOf(const char* text) { return text == nullptr ? "" : text; }

std::string TextOf(const Uid& uid) {
  char text[kUidDigits + 1];
  std::snprintf(text, sizeof text, "%016" PRIx64 "%016" PRIx64, uid.high, uid.low);
  return text;
}

// False for what is no uid.
bool UidIn(const std::string& text, Uid* uid) {
  constexpr char kDigits[] = "0123456789abcdef";
  if (text.size() != kUidDigits || text.find_first_not_of(kDigits) != std::string::npos) return false;
  uid->high = std::strtoull(text.substr(0, kUidDigits / 2).c_str(), nullptr, 16);
  uid->low = std::strtoull(text.substr(kUidDigits / 2).c_str(), nullptr, 16);
  return true;
}

bool ProcessIn(const char* host, int32_t slot, const char* uid, Process* process) {
  process->host = host;
  process->slot = slot;
  return UidIn(uid, &process->uid);
}

bool FrameIn(const void* bytes, size_t size, ControlFrame* frame) {
  return ControlFrame::Decode(std::string(static_cast<const char*>(bytes), size), frame);
}

template <typename Beginning>
rt_authority* AuthorityOf(const char* hosts, const rt_authority_options& options, Beginning begin) {
  return Or<rt_authority*>(nullptr, [&]() -> rt_authority* {
    ringtrain::AuthorityOptions given;
    std::istringstream lines(hosts);
    for (std::string line; std::getline(lines, line);) {
      const size_t bar = line.rfind('|');
      if (bar == std::string::npos) return nullptr;
      given.hosts[line.substr(0, bar)] = std::atoi(line.c_str() + bar + 1);
    }
    given.minimum = options.minimum;
    given.reset_limit = options.reset_limit;
    given.silence = InNanoseconds(options.silence);
    given.grace = InNanoseconds(options.grace);
    given.wait = InNanoseconds(options.wait);
    given.first_pause = InNanoseconds(options.first_pause);
    given.longest_pause = InNanoseconds(options.longest_pause);
    given.random = Unguessable;
    auto made = std::make_unique<rt_authority>(rt_authority{ringtrain::Authority(std::move(given)), {}, 0, {}, {}});
    begin(&made->authority);
    return made.release();
  });
}

int32_t KindOf(const ControlFrame& frame) {
  if (frame.type == ControlType::kBeat) return RT_DO_BEAT;
  const bool to_a_host = !(Uid() < frame.process.uid);
  if (frame.type == ControlType::kAsk && to_a_host) return RT_DO_ASK;
  return frame.type == ControlType::kEvict ? RT_DO_EVICT : RT_DO_SEND;
}

template <typename Action>
void SetFrame(const std::string& bytes, Action* action) {
  action->frame = bytes.data();
  action->frame_bytes = bytes.size();
}

struct IntoAuthorityAction {
  rt_authority* of;
  rt_authority_action* action;

  void operator()(const authority_action::Write& write) const {
    action->kind = RT_DO_WRITE;
    SetFrame(write.record, action);
  }
  void operator()(const authority_action::Send& send) const {
    action->kind = KindOf(send.frame);
    action->host = send.host.c_str();
    of->uid = TextOf(send.frame.process.uid);
    action->uid = of->uid.c_str();
    of->frame = send.frame.Encode();
    SetFrame(of->frame, action);
  }
  void operator()(const authority_action::Start& start) const {
    action->kind = RT_DO_START;
    action->host = start.host.c_str();
    action->slot = start.slot;
  }
  void operator()(const authority_action::LetGo& let_go) const {
    action->kind = RT_DO_LET_GO;
    action->host = let_go.host.c_str();
  }
  void operator()(const authority_action::Say& say) const {
    action->kind = RT_DO_SAY;
    action->text = say.text.c_str();
  }
  void operator()(const authority_action::End& end) const {
    action->kind = RT_DO_END;
    action->well = end.well;
    action->text = end.text.c_str();
  }
};

struct IntoMembershipAction {
  rt_membership* of;
  rt_membership_action* action;

  void operator()(const membership_action::Send& send) const {
    action->kind = RT_DO_SEND;
    of->frame = send.frame.Encode();
    SetFrame(of->frame, action);
  }
  void operator()(const membership_action::Abandon&) const { action->kind = RT_DO_ABANDON; }
  void operator()(const membership_action::Connect& connect) const {
    const ControlFrame& form = connect.form;
    action->kind = RT_DO_CONNECT;
    action->world = form.epoch.count;
    SetFrame(form.key, action);
    of->uids.clear();
    of->members.clear();
    of->uids.reserve(form.members.size());  // what points to them stays right
    for (const ringtrain::Member& each : form.members) {
      const Process& process = each.process;
      if (process.uid == of->uid) action->rank = static_cast<int32_t>(of->members.size());
      of->uids.push_back(TextOf(process.uid));
      of->members.push_back(
          {of->uids.back().c_str(), process.host.c_str(), process.slot, each.joins ? 1 : 0, process.address.c_str()});
    }
    action->members = of->members.data();
    action->member_count = static_cast<int32_t>(of->members.size());
  }
  void operator()(const membership_action::Run&) const { action->kind = RT_DO_RUN; }
  void operator()(const membership_action::Pause&) const { action->kind = RT_DO_PAUSE; }
  void operator()(const membership_action::Depart&) const { action->kind = RT_DO_DEPART; }
  void operator()(const membership_action::Fence& fence) const {
    action->kind = RT_DO_FENCE;
    action->text = fence.cause.c_str();
  }
};

// Of ranks of the present world.
ringtrain::Uids UidsOf(const rt_membership& membership, const int32_t* ranks, int32_t count) {
  const std::vector<ringtrain::Member>& members = membership.membership.members();
  ringtrain::Uids uids;
  for (const int32_t* rank = ranks; rank < ranks + count; ++rank)
    if (*rank >= 0 && static_cast<size_t>(*rank) < members.size())
      uids.push_back(members[static_cast<size_t>(*rank)].process.uid);
  return uids;
}

}  // namespace

// ---- the authority ----

rt_authority* rt_authority_begin(const char* hosts, const rt_authority_options* options, double now) {
  return AuthorityOf(hosts, *options, [&](ringtrain::Authority* made) { made->Begin(InNanoseconds(now)); });
}

rt_authority* rt_authority_resume(const char* hosts, const rt_authority_options* options, const void* record,
                                  size_t record_bytes, double now) {
  return AuthorityOf(hosts, *options, [&](ringtrain::Authority* made) {
    made->Resume(InNanoseconds(now), std::string(static_cast<const char*>(record), record_bytes));
  });
}

void rt_authority_free(rt_authority* authority) { delete authority; }

int32_t rt_authority_next(rt_authority* authority, rt_authority_action* action) {
  return Next(authority, action, IntoAuthorityAction{authority, action});
}

int32_t rt_authority_host_came(rt_authority* authority, double now, const char* host) {
  return ActionsOf(authority, [&](auto* actions) { authority->authority.HostCame(InNanoseconds(now), host, actions); });
}

int32_t rt_authority_host_present(rt_authority* authority, double now, const char* host, const char* const* uids,
                                  int32_t count, const void* record, size_t record_bytes, int32_t finished) {
  return ActionsOf(authority, [&](auto* actions) {
    ControlFrame present;
    present.type = ControlType::kPresent;
    present.finished = finished != 0;
    Uid uid;
    for (const char* const* each = uids; each < uids + count; ++each)
      if (UidIn(*each, &uid)) present.uids.push_back(uid);
    present.record.assign(static_cast<const char*>(record), record_bytes);
    authority->authority.Arrived(InNanoseconds(now), host, present, actions);
  });
}

int32_t rt_authority_host_lost(rt_authority* authority, double now, const char* host, const char* cause) {
  return ActionsOf(authority, [&](auto* actions) {
    authority->authority.HostLost(InNanoseconds(now), host, TextOf(cause), actions);
  });
}

int32_t rt_authority_host_heard(rt_authority* authority, double now, const char* host) {
  return ActionsOf(authority,
                   [&](auto* actions) { authority->authority.Arrived(InNanoseconds(now), host, {}, actions); });
}

int32_t rt_authority_host_added(rt_authority* authority, const char* host, int32_t slots) {
  return Done([&] { authority->authority.HostAdded(host, slots); });
}

int32_t rt_authority_host_leaves(rt_authority* authority, double now, const char* host, const char* cause) {
  return ActionsOf(authority, [&](auto* actions) {
    authority->authority.HostLeaves(InNanoseconds(now), host, TextOf(cause), actions);
  });
}

int32_t rt_authority_process_leaves(rt_authority* authority, double now, const char* host, int32_t slot,
                                    const char* uid) {
  return ActionsOf(authority, [&](auto* actions) {
    ControlFrame frame;
    if (!ProcessIn(host, slot, uid, &frame.process)) return;
    frame.type = ControlType::kLeave;
    authority->authority.Arrived(InNanoseconds(now), host, frame, actions);
  });
}

int32_t rt_authority_process_came(rt_authority* authority, double now, const char* host, int32_t slot,
                                  const char* uid) {
  return ActionsOf(authority, [&](auto* actions) {
    Process process;
    if (ProcessIn(host, slot, uid, &process)) authority->authority.ProcessCame(InNanoseconds(now), process, actions);
  });
}

int32_t rt_authority_process_gone(rt_authority* authority, double now, const char* host, int32_t slot, const char* uid,
                                  const char* cause) {
  return ActionsOf(authority, [&](auto* actions) {
    Process process;
    if (ProcessIn(host, slot, uid, &process))
      authority->authority.ProcessGone(InNanoseconds(now), process, TextOf(cause), actions);
  });
}

int32_t rt_authority_arrived(rt_authority* authority, double now, const char* host, const void* frame, size_t bytes) {
  return ActionsOf(authority, [&](auto* actions) {
    ControlFrame decoded;
    if (FrameIn(frame, bytes, &decoded)) authority->authority.Arrived(InNanoseconds(now), host, decoded, actions);
  });
}

int32_t rt_authority_process_ended(rt_authority* authority, double now, const char* host, int32_t slot, const char* uid,
                                   int32_t exit_code) {
  return ActionsOf(authority, [&](auto* actions) {
    ControlFrame frame;
    if (!ProcessIn(host, slot, uid, &frame.process)) return;
    frame.exit_code = exit_code;
    if (exit_code == 0) {
      frame.type = ControlType::kLeave;
      frame.finished = true;
      authority->authority.Arrived(InNanoseconds(now), host, frame, actions);
    }
    frame.type = ControlType::kDead;
    authority->authority.Arrived(InNanoseconds(now), host, frame, actions);
  });
}

int32_t rt_authority_tick(rt_authority* authority, double now) {
  return ActionsOf(authority, [&](auto* actions) { authority->authority.Tick(InNanoseconds(now), actions); });
}

double rt_authority_next_timer(rt_authority* authority) { return InSeconds(authority->authority.next_timer()); }

// ---- a rank's membership ----

rt_membership* rt_membership_open(const char* uid, const char* host, int32_t slot, const char* address,
                                  const char* program) {
  return Or<rt_membership*>(nullptr, [&]() -> rt_membership* {
    Process me;
    if (!ProcessIn(host, slot, uid, &me)) return nullptr;
    me.address = address;
    return new rt_membership(me, program);
  });
}

void rt_membership_free(rt_membership* membership) { delete membership; }

int32_t rt_membership_next(rt_membership* membership, rt_membership_action* action) {
  return Next(membership, action, IntoMembershipAction{membership, action});
}

int32_t rt_membership_listens_at(rt_membership* membership, const char* address) {
  return Done([&] { membership->membership.ListensAt(address); });
}

int32_t rt_membership_begin(rt_membership* membership) {
  return ActionsOf(membership, [&](auto* actions) { membership->membership.Begin(actions); });
}

int32_t rt_membership_arrived(rt_membership* membership, const void* frame, size_t bytes) {
  return ActionsOf(membership, [&](auto* actions) {
    ControlFrame decoded;
    if (FrameIn(frame, bytes, &decoded)) membership->membership.Arrived(decoded, actions);
  });
}

int32_t rt_membership_connected(rt_membership* membership, uint64_t count, int32_t well) {
  return ActionsOf(membership, [&](auto* actions) { membership->membership.Connected(count, well != 0, actions); });
}

int32_t rt_membership_world_ended(rt_membership* membership) {
  return ActionsOf(membership, [&](auto* actions) { membership->membership.WorldEnded(actions); });
}

int32_t rt_membership_suspects(rt_membership* membership, int32_t why, const int32_t* ranks, int32_t count) {
  return ActionsOf(membership, [&](auto* actions) {
    ringtrain::Uids uids = UidsOf(*membership, ranks, count);
    if (why == RT_SILENT)
      membership->membership.Suspect(std::move(uids), actions);
    else if (why == RT_UNHEARD)
      membership->membership.Unheard(std::move(uids));
    else if (why == RT_REFUSED)
      membership->membership.Refuse(uids, actions);
    else
      membership->membership.Missing(uids, actions);
  });
}

int32_t rt_membership_finished(rt_membership* membership) {
  return ActionsOf(membership, [&](auto* actions) { membership->membership.Finished(actions); });
}

int32_t rt_membership_got_state(rt_membership* membership) {
  return Done([&] { membership->membership.GotState(); });
}

void rt_membership_admits(rt_membership* membership, int32_t admits) { membership->membership.Admits(admits != 0); }
