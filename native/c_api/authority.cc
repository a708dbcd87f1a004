// The C ABI of elastic/authority.h.
#include "elastic/authority.h"

#include <sys/random.h>

#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

#include "c_api/control.h"
#include "c_api/translate.h"
#include "include/ringtrain.h"

using ringtrain::ActionsOf;
using ringtrain::ControlFrame;
using ringtrain::ControlType;
using ringtrain::FrameIn;
using ringtrain::InNanoseconds;
using ringtrain::InSeconds;
using ringtrain::Next;
using ringtrain::Process;
using ringtrain::ProcessIn;
using ringtrain::SetFrame;
using ringtrain::TextOf;
using ringtrain::Uid;
using ringtrain::UidIn;
namespace authority_action = ringtrain::authority_action;

struct rt_authority {
  ringtrain::Authority authority;
  ringtrain::AuthorityActions actions;  // that follow from the last event
  size_t given = 0;                     // of them
  std::string uid, frame;               // of the one that was given last
};

namespace {

uint64_t Unguessable() {
  uint64_t number = 0;
  if (getrandom(&number, sizeof number, 0) != sizeof number)
    throw std::runtime_error("the kernel gives no random bytes");
  return number;
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

}  // namespace

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
