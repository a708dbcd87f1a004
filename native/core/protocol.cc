#include "core/protocol.h"

#include <algorithm>

namespace ringtrain {
namespace {

Nanoseconds FromSeconds(double seconds) { return static_cast<Nanoseconds>(seconds * 1e9); }

std::vector<int> RanksOf(const World& world) {
  std::vector<int> ranks;
  for (const std::vector<int>& host : world.hosts) ranks.insert(ranks.end(), host.begin(), host.end());
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

}  // namespace

Protocol::Protocol(const World& world, const Options& options, Performer* performer)
    : world_(world), options_(options), performer_(performer), liveness_(world, options.dead_after_seconds) {
  AddProcessSet(0, 0, RanksOf(world));
}

// ---- events ----

void Protocol::Submitted(Nanoseconds now, int process_set, const Request& request) {
  Feed(now, process_set, event::Submitted{request});
}

void Protocol::Refused(Nanoseconds now, int process_set, Refusal refusal) {
  Feed(now, process_set, event::Refused{std::move(refusal)});
}

void Protocol::Arrived(Nanoseconds now, int from, Frame frame) {
  switch (frame.type) {
    case FrameType::kAbort:
      return Abort(Status::PeerLost(frame.text));
    case FrameType::kGoodbye:
      return HearGoodbye(now, from, frame.flag);
    case FrameType::kBeat:  // the transport has counted it
      if (frame.flag) liveness_.Forget(from);
      return;
    case FrameType::kStalled:
      return performer_->ShowStacks(frame.text);
    case FrameType::kAllGoodbye:
      all_goodbye_ = true;
      clean_ = frame.flag;
      return;
    default:
      break;
  }
  const int process_set = frame.process_set;
  if (!Knows(process_set)) {
    // Another member has learnt of the set before this one; or it is gone, and this is a refusal that nobody has waited for.
    if (process_set <= newest_process_set_) return;
    early_frames_[process_set].emplace_back(from, std::move(frame));
    return;
  }
  Feed(now, process_set, event::Arrived{MemberOf(process_set, from), std::move(frame)});
}

void Protocol::BatchFinished(Nanoseconds now, int process_set) { Feed(now, process_set, event::BatchFinished{}); }

void Protocol::LongPhase(Nanoseconds now, Nanoseconds duration) {
  for (int process_set : ProcessSets()) Feed(now, process_set, event::LongPhase{duration});
}

void Protocol::LookForTheDead(Nanoseconds now) {
  if (now < next_look()) return;
  performer_->Beat();
  SendBeats(false);
  const Status verdict = liveness_.Look(now, *performer_);
  if (!verdict.ok()) Abort(verdict);
}

bool Protocol::Tick(Nanoseconds now) {
  RunHeldRemovals(now);
  bool moved = false;
  for (int process_set : ProcessSets()) {
    auto found = negotiators_.find(process_set);
    if (found == negotiators_.end()) continue;  // removed by what has just been done
    Effects effects;
    found->second.OnEvent(now, event::Tick{}, &effects);
    moved |= !effects.empty();  // control operations finish at once, and more may be ready behind them
    Follow(now, process_set, &effects);
  }
  return moved;
}

void Protocol::Feed(Nanoseconds now, int process_set, const Event& event) {
  auto found = negotiators_.find(process_set);
  if (found == negotiators_.end()) return;
  Effects effects;
  found->second.OnEvent(now, event, &effects);
  Follow(now, process_set, &effects);
}

bool Protocol::pending() const {
  return std::any_of(negotiators_.begin(), negotiators_.end(), [](const auto& entry) { return entry.second.pending(); });
}

Nanoseconds Protocol::next_stall() const {
  Nanoseconds next = kNever;
  for (const auto& entry : negotiators_) next = std::min(next, entry.second.next_timer());
  return next;
}

std::vector<int> Protocol::ProcessSets() const {
  std::vector<int> process_sets;
  for (const auto& entry : negotiators_) process_sets.push_back(entry.first);
  return process_sets;
}

int Protocol::MemberOf(int process_set, int rank) const {
  const std::vector<int>& members = negotiators_.at(process_set).members();
  return static_cast<int>(std::lower_bound(members.begin(), members.end(), rank) - members.begin());
}

// ---- what follows ----

void Protocol::Follow(Nanoseconds now, int process_set, Effects* effects) {
  for (Effect& effect : *effects) std::visit([&](auto& what) { Follow(now, process_set, what); }, effect);
}

void Protocol::Follow(Nanoseconds, int process_set, effect::Send& send) {
  performer_->Send(negotiators_.at(process_set).members()[static_cast<size_t>(send.member)], std::move(send.frame));
}

void Protocol::Follow(Nanoseconds now, int process_set, effect::Execute& execute) {
  if (aborted_) return;
  const bool control = Find(execute.responses[0].request.operation)->output == Output::kNone;  // which is never fused
  if (control) return RunControl(now, process_set, execute);
  performer_->Start(process_set, execute);
}

void Protocol::Follow(Nanoseconds, int process_set, effect::Fail& fail) { performer_->Fail(process_set, fail.name, fail.status); }

void Protocol::Follow(Nanoseconds, int, effect::Warn& warn) { performer_->Warn(warn.text); }

void Protocol::Follow(Nanoseconds, int, effect::Abort& abort) { Abort(Status::Internal(abort.cause)); }

void Protocol::Follow(Nanoseconds, int process_set, effect::Count& count) { performer_->Count(process_set, count); }

// ---- process sets ----

void Protocol::RunControl(Nanoseconds now, int process_set, const effect::Execute& control) {
  const Response& response = control.responses[0];
  const std::vector<int64_t>& list = response.request.splits;
  // A rank that had joined may still be busy with a batch of the set for which nobody here waits: the set goes after it.
  if (response.request.operation == Operation::kRemoveProcessSet && performer_->Busy(static_cast<int>(list[0]))) {
    held_removals_.emplace_back(process_set, control);
    return;
  }
  if (response.request.operation == Operation::kAddProcessSet) AddProcessSet(now, response.result, {list.begin(), list.end()});
  if (response.request.operation == Operation::kRemoveProcessSet) RemoveProcessSet(static_cast<int>(list[0]));
  performer_->Finish(process_set, control);
  Feed(now, process_set, event::BatchFinished{});
}

void Protocol::RunHeldRemovals(Nanoseconds now) {
  if (held_removals_.empty()) return;
  for (const auto& held : std::exchange(held_removals_, {})) RunControl(now, held.first, held.second);
}

void Protocol::AddProcessSet(Nanoseconds now, int process_set, const std::vector<int>& members) {
  performer_->AddProcessSet(process_set, members);
  newest_process_set_ = process_set;
  auto me = std::find(members.begin(), members.end(), world_.rank);
  if (me == members.end()) {
    early_frames_.erase(process_set);
    return;
  }
  NegotiatorOptions options;
  options.process_set = process_set;
  options.members = members;
  options.me = static_cast<int>(me - members.begin());
  options.cache_capacity = static_cast<size_t>(options_.cache_capacity);
  options.fusion_threshold_bytes = static_cast<size_t>(options_.fusion_threshold_bytes);
  options.stall_warning = FromSeconds(options_.stall_warning_seconds);
  options.stall_abort = options_.stall_abort_seconds == 0 ? kNever : FromSeconds(options_.stall_abort_seconds);
  negotiators_.emplace(process_set, Negotiator(std::move(options)));
  auto early = early_frames_.find(process_set);
  if (early == early_frames_.end()) return;
  const std::vector<std::pair<int, Frame>> frames = std::move(early->second);
  early_frames_.erase(early);
  for (const auto& frame : frames) Feed(now, process_set, event::Arrived{MemberOf(process_set, frame.first), frame.second});
}

void Protocol::RemoveProcessSet(int process_set) {
  negotiators_.erase(process_set);
  performer_->RemoveProcessSet(process_set);
}

// ---- the end ----

void Protocol::SayGoodbye(Nanoseconds now) {
  Tick(now);  // what was submitted or refused before goes ahead, so that nobody takes it for left out
  TellGoodbye(false);
}

void Protocol::TellGoodbye(bool gone) {
  // Whoever decides for me, and everyone for whom I decide.
  std::set<int> concerned = {lowest_rank()};
  for (const auto& entry : negotiators_) {
    const std::vector<int>& members = entry.second.members();
    concerned.insert(members[0]);
    if (members[0] == world_.rank) concerned.insert(members.begin(), members.end());
  }
  for (int rank : concerned) {
    Frame goodbye;
    goodbye.type = FrameType::kGoodbye;
    goodbye.flag = gone;
    performer_->Send(rank, std::move(goodbye));
  }
}

void Protocol::HearGoodbye(Nanoseconds now, int rank, bool gone) {
  for (int process_set : ProcessSets()) {
    const std::vector<int>& members = negotiators_.at(process_set).members();
    if (std::binary_search(members.begin(), members.end(), rank)) Feed(now, process_set, event::Left{MemberOf(process_set, rank), gone});
  }
  if (world_.rank != lowest_rank() || gone) return;
  goodbyes_.insert(rank);
  if (goodbyes_.size() == everyone().size()) TellAllGoodbye(true);
}

void Protocol::TellAllGoodbye(bool clean) {
  for (int rank : everyone()) {
    Frame all;
    all.type = FrameType::kAllGoodbye;
    all.flag = clean;
    performer_->Send(rank, std::move(all));
  }
}

void Protocol::GiveUpWaiting(Nanoseconds now) {
  Tick(now);
  TellGoodbye(true);
  SendBeats(true);
  if (world_.rank == lowest_rank() && !all_goodbye_) TellAllGoodbye(false);
}

void Protocol::SendBeats(bool last) {
  for (int rank : liveness_.listeners()) {
    Frame beat;
    beat.type = FrameType::kBeat;
    beat.flag = last;
    performer_->Send(rank, std::move(beat));
  }
}

void Protocol::Abort(const Status& last) {
  if (std::exchange(aborted_, true)) return;
  const Status cause = performer_->NoteCause(last);
  for (int rank : everyone()) {
    if (rank == world_.rank) continue;
    if (world_.host_of[rank] == world_.host_of[world_.rank]) {
      performer_->Wake(rank);
      continue;
    }
    Frame abort;
    abort.type = FrameType::kAbort;
    abort.text = cause.message();
    performer_->Send(rank, std::move(abort));
  }
  // The peers first, the submitters last: whoever hears of it may free the tensors.
  performer_->End(cause);
}

}  // namespace ringtrain
