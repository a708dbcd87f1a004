#include "core/membership.h"

#include <algorithm>
#include <utility>

namespace ringtrain {
namespace {

ControlFrame Of(ControlType type) {
  ControlFrame frame;
  frame.type = type;
  return frame;
}

void Append(TransactionEffects effects, MembershipActions* actions) {
  for (TransactionEffect& effect : effects) actions->emplace_back(std::move(effect));
}

std::string SecondsText(Nanoseconds time) { return std::to_string(time / 1000000000) + " s"; }

}  // namespace

Membership::Membership(Process me, std::string program, const MembershipOptions& options, Transaction* transaction)
    : me_(std::move(me)), program_(std::move(program)), options_(options), transaction_(transaction) {}

// ---- events ----

void Membership::Begin(Nanoseconds now, MembershipActions* actions) {
  heard_ = last_tick_ = now;
  state_ = State::kReady;
  TellReady(actions);
}

void Membership::Arrived(Nanoseconds now, const ControlFrame& frame, MembershipActions* actions) {
  heard_ = now;
  if (state_ == State::kStarting || over()) return;
  switch (frame.type) {
    case ControlType::kStop:
      return Stop(frame, actions);
    case ControlType::kForm:
      return Form(now, frame, actions);
    case ControlType::kGo:
      return Go(frame.epoch, frame.at_release, actions);
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
  if (stop.epoch < newest_) return;
  if (!stop.at_release) return Halt(stop.epoch, actions);
  if (state_ == State::kMember && stop.epoch == epoch_) transaction_->PauseAtRelease();
}

// Everything of the old world, and of one that was to come, is over. The answer can be asked for again.
void Membership::Halt(const EpochId& epoch, MembershipActions* actions) {
  if (state_ == State::kMember || form_) actions->push_back(membership_action::Abandon{});
  newest_ = epoch;
  form_.reset();
  if (holds_state()) state_ = State::kStopped;
  ControlFrame report = Of(ControlType::kReport);
  report.epoch = epoch;
  report.standing = transaction_->Stop();
  if (!admits_) report.standing.stage = std::max(report.standing.stage, WindowStage::kBegun);
  report.holds_state = holds_state() && !lacks_state_;
  report.uids = quiet_;
  Send(std::move(report), actions);
}

void Membership::Form(Nanoseconds now, const ControlFrame& form, MembershipActions* actions) {
  if (form.epoch.count <= newest_.count || state_ == State::kMember) return;
  const auto mine = std::find_if(form.members.begin(), form.members.end(),
                                 [&](const Member& member) { return member.process.uid == me_.uid; });
  if (mine == form.members.end()) return Fence("a world was formed without this rank.", actions);
  TransactionEffects effects;
  if (holds_state() && !transaction_->Settle(form.settlement, UidsOf(form.members), &effects))
    return Fence("the world was to be formed at a step that this rank does not hold.", actions);
  Append(std::move(effects), actions);
  newest_ = form.epoch;
  form_ = form;
  formed_ = false;
  joins_ = mine->joins;
  reached_.clear();
  donors_.clear();
  for (const Member& member : form.members)
    if (!member.joins && !options_.state_in_world) donors_.insert(member.process.uid);
  reach_by_ = now + options_.silence;
  actions->push_back(membership_action::Connect{form});
}

void Membership::Reached(const EpochId& epoch, const Uid& peer, MembershipActions* actions) {
  if (!form_ || form_->epoch != epoch || !reached_.insert(peer).second) return;
  const bool peer_joins = !options_.state_in_world && donors_.count(peer) == 0;
  if (peer_joins && !joins_) actions->push_back(membership_action::GiveState{peer});
  TellFormed(actions);
}

void Membership::TookState(const EpochId& epoch, const Uid& donor, const StepProgress& progress,
                           MembershipActions* actions) {
  if (!form_ || form_->epoch != epoch || !joins_) return;
  if (progress.released != form_->settlement.released)
    return Fence("the donors of its state are at different steps.", actions);
  transaction_->Adopt(progress);
  donors_.erase(donor);
  TellFormed(actions);
}

// Once for each form: when all members are reached and, if this rank joins, all donors have given.
void Membership::TellFormed(MembershipActions* actions) {
  if (formed_ || reached_.size() < form_->members.size() || (joins_ && !donors_.empty())) return;
  formed_ = true;
  reach_by_ = kNever;
  ControlFrame formed = Of(ControlType::kFormed);
  formed.epoch = form_->epoch;
  Send(std::move(formed), actions);
}

void Membership::PeerRuns(const EpochId& epoch, MembershipActions* actions) { Go(epoch, false, actions); }

void Membership::Go(const EpochId& epoch, bool pauses, MembershipActions* actions) {
  if (!form_ || form_->epoch != epoch || !formed_) return;
  state_ = State::kMember;
  epoch_ = epoch;
  lacks_state_ = joins_ && options_.state_in_world;
  members_ = std::move(form_->members);
  form_.reset();
  quiet_.clear();
  silent_.clear();
  actions->push_back(membership_action::Run{});
  TransactionEffects effects;
  transaction_->Run(UidsOf(members_), pauses, &effects);
  Append(std::move(effects), actions);
}

void Membership::Look(Uids quiet, Uids silent, MembershipActions* actions) {
  quiet_ = std::move(quiet);
  if (silent.empty()) return;
  silent_ = std::move(silent);
  TellSilent(actions);
}

void Membership::TellSilent(MembershipActions* actions) const {
  if (state_ != State::kMember || silent_.empty()) return;
  ControlFrame suspect = Of(ControlType::kSuspect);
  suspect.epoch = epoch_;
  suspect.uids = silent_;
  Send(std::move(suspect), actions);
}

void Membership::Missing(Uids uids, MembershipActions* actions) const {
  if (state_ != State::kMember || uids.empty()) return;
  ControlFrame suspect = Of(ControlType::kSuspect);
  suspect.epoch = epoch_;
  suspect.uids = std::move(uids);
  suspect.hangs = true;
  Send(std::move(suspect), actions);
}

void Membership::Paused(MembershipActions* actions) {
  if (state_ == State::kMember) Halt(epoch_, actions);
}

void Membership::CannotConnect(MembershipActions* actions) {
  if (!form_ || formed_) return;
  ControlFrame suspect = Of(ControlType::kSuspect);
  suspect.epoch = form_->epoch;
  Send(std::move(suspect), actions);
}

void Membership::Noticed(MembershipActions* actions) { Send(Of(ControlType::kLeave), actions); }

void Membership::Finished(MembershipActions* actions) {
  if (over()) return;
  ControlFrame leave = Of(ControlType::kLeave);
  leave.finished = true;
  Send(std::move(leave), actions);
  state_ = State::kLeaving;
  actions->push_back(membership_action::Depart{});
}

// ---- time ----

void Membership::Tick(Nanoseconds now, MembershipActions* actions) {
  if (state_ == State::kStarting || over()) return;
  // Whoever was stopped itself has not listened: the authority gets the time once more.
  if (now - last_tick_ > options_.grace / 2) heard_ = now;
  last_tick_ = now;
  if (now - heard_ >= options_.grace)
    return Fence("nothing was heard of the launcher for " + SecondsText(options_.grace) + ".", actions);
  SuspectUnreached(now, actions);
}

void Membership::SuspectUnreached(Nanoseconds now, MembershipActions* actions) {
  if (!form_ || now < reach_by_) return;
  reach_by_ = kNever;
  ControlFrame suspect = Of(ControlType::kSuspect);
  suspect.epoch = form_->epoch;
  for (const Member& member : form_->members)
    if (member.process.uid != me_.uid && reached_.count(member.process.uid) == 0)
      suspect.uids.push_back(member.process.uid);
  if (!suspect.uids.empty()) Send(std::move(suspect), actions);
}

Nanoseconds Membership::next_timer() const {
  if (state_ == State::kStarting || over()) return kNever;
  const Nanoseconds reach_by = form_ ? reach_by_ : kNever;
  return std::min({heard_ + options_.grace, last_tick_ + options_.grace / 4, reach_by});
}

// ----

Membership::Arrival Membership::WhenToTake(const EpochId& epoch) const {
  if (state_ == State::kMember && epoch == epoch_) return Arrival::kTake;
  if (over() || epoch.count <= newest_.count) return form_ && epoch == form_->epoch ? Arrival::kKeep : Arrival::kRefuse;
  return Arrival::kKeep;  // of a world of which this rank has not heard yet
}

void Membership::TellReady(MembershipActions* actions) const {
  ControlFrame ready = Of(ControlType::kReady);
  ready.epoch = epoch_;
  ready.program = program_;
  ready.stopped = state_ != State::kMember;
  Send(std::move(ready), actions);
}

void Membership::Fence(std::string cause, MembershipActions* actions) {
  state_ = State::kFenced;
  transaction_->Stop();
  actions->push_back(membership_action::Fence{std::move(cause)});
}

void Membership::Send(ControlFrame frame, MembershipActions* actions) const {
  frame.process = me_;
  actions->push_back(membership_action::Send{std::move(frame)});
}

}  // namespace ringtrain
