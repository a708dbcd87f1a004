// The C ABI of elastic/membership.h.
#include "elastic/membership.h"

#include <string>
#include <utility>
#include <vector>

#include "c_api/control.h"
#include "include/ringtrain.h"

using ringtrain::ActionsOf;
using ringtrain::ControlFrame;
using ringtrain::FrameIn;
using ringtrain::Next;
using ringtrain::Process;
using ringtrain::ProcessIn;
using ringtrain::SetFrame;
using ringtrain::TextOf;
using ringtrain::Uid;
namespace membership_action = ringtrain::membership_action;

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
