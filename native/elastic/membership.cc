#include "elastic/membership.h"

#include <algorithm>
#include <utility>

namespace ringtrain {
namespace {

ControlFrame Of(ControlType type) {
  ControlFrame frame;
  frame.type = type;
  return frame;
}

}  // namespace

// ---- the authority ----

void Membership::Begin(MembershipActions* actions) {
  state_ = State::kReady;
  TellReady(actions);
}

void Membership::Arrived(const ControlFrame& frame, MembershipActions* actions) {
  if (state_ == State::kStarting || over()) return;
  switch (frame.type) {
    case ControlType::kStop:
      return Stop(frame, actions);
    case ControlType::kForm:
      return Form(frame, actions);
    case ControlType::kGo:
      return Go(frame, actions);
    case ControlType::kAsk:
      TellReady(actions);
      return TellSilent(actions);  // whom it was told to may be gone
    case ControlType::kLeave:
      state_ = State::kLeaving;
      actions->push_back(membership_action::Depart{});
      return;
    case ControlType::kEvict:
      return Fence(frame.text, actions);
    default:
      return;
  }
}

// A later launcher may know less than this rank has heard: what counts is that nothing older is acted on.
void Membership::Stop(const ControlFrame& stop, MembershipActions* actions) {
  if (stop.at_release && state_ == State::kMember && stop.epoch == epoch_)
    actions->push_back(membership_action::Pause{});
  if (!stop.at_release && !(stop.epoch < newest_)) Halt(stop.epoch, actions);
}

// Everything of the old world, and of one that was to come, is over. The answer can be asked for again.
void Membership::Halt(const EpochId& epoch, MembershipActions* actions) {
  if (state_ == State::kMember || form_) actions->push_back(membership_action::Abandon{});
  newest_ = epoch;
  form_.reset();
  if (has_begun()) state_ = State::kStopped;
  ControlFrame report = Of(ControlType::kReport);
  report.epoch = epoch;
  report.admits = admits_;
  report.holds_state = holds_state_;
  report.uids = unheard_;
  Send(std::move(report), actions);
}

void Membership::Form(const ControlFrame& form, MembershipActions* actions) {
  if (form.epoch.count <= newest_.count || state_ == State::kMember) return;
  const auto is_me = [&](const Member& member) { return member.process.uid == me_.uid; };
  if (std::none_of(form.members.begin(), form.members.end(), is_me))
    return Fence("a world was formed without this rank.", actions);
  newest_ = form.epoch;
  form_ = form;
  formed_ = false;
  actions->push_back(membership_action::Connect{form});
}

void Membership::Go(const ControlFrame& go, MembershipActions* actions) {
  if (!form_ || form_->epoch != go.epoch || !formed_) return;
  state_ = State::kMember;
  epoch_ = go.epoch;
  members_ = std::move(form_->members);
  form_.reset();
  silent_.clear();
  unheard_.clear();
  actions->push_back(membership_action::Run{});
  if (go.at_release) actions->push_back(membership_action::Pause{});
}

// ---- worlds ----

void Membership::Connected(uint64_t count, bool well, MembershipActions* actions) {
  if (!form_ || form_->epoch.count != count || formed_) return;
  formed_ = well;
  ControlFrame answer = Of(well ? ControlType::kFormed : ControlType::kSuspect);
  answer.epoch = form_->epoch;
  Send(std::move(answer), actions);
}

void Membership::Suspect(Uids silent, MembershipActions* actions) {
  if (silent.empty()) return;
  silent_ = std::move(silent);
  TellSilent(actions);
}

void Membership::Unheard(Uids unheard) {
  if (state_ == State::kMember) unheard_ = std::move(unheard);
}

void Membership::TellSilent(MembershipActions* actions) const { TellSuspects(silent_, Fault::kSilent, actions); }

void Membership::Missing(const Uids& uids, MembershipActions* actions) const {
  TellSuspects(uids, Fault::kHangs, actions);
}

void Membership::Refuse(const Uids& uids, MembershipActions* actions) const {
  TellSuspects(uids, Fault::kRefused, actions);
}

void Membership::TellSuspects(const Uids& uids, Fault fault, MembershipActions* actions) const {
  if (state_ != State::kMember || uids.empty()) return;
  ControlFrame suspect = Of(ControlType::kSuspect);
  suspect.epoch = epoch_;
  suspect.uids = uids;
  suspect.hangs = fault == Fault::kHangs;
  suspect.refused = fault == Fault::kRefused;
  Send(std::move(suspect), actions);
}

// ---- the program ----

void Membership::WorldEnded(MembershipActions* actions) {
  if (state_ == State::kMember) Halt(epoch_, actions);
}

void Membership::Finished(MembershipActions* actions) {
  if (over()) return;
  ControlFrame leave = Of(ControlType::kLeave);
  leave.finished = true;
  Send(std::move(leave), actions);
  state_ = State::kLeaving;
  actions->push_back(membership_action::Depart{});
}

// ----

void Membership::TellReady(MembershipActions* actions) const {
  ControlFrame ready = Of(ControlType::kReady);
  ready.epoch = epoch_;
  ready.program = program_;
  ready.stopped = state_ != State::kMember;
  Send(std::move(ready), actions);
}

void Membership::Fence(std::string cause, MembershipActions* actions) {
  state_ = State::kFenced;
  actions->push_back(membership_action::Fence{std::move(cause)});
}

void Membership::Send(ControlFrame frame, MembershipActions* actions) const {
  frame.process = me_;
  actions->push_back(membership_action::Send{std::move(frame)});
}

}  // namespace ringtrain
