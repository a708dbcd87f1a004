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

Protocol::Protocol(const World& world, const Options& options)
    : world_(world), options_(options), liveness_(world, options.dead_after_seconds) {}

// ---- events ----

void Protocol::Begin(Nanoseconds now, RankEffects* effects) { AddProcessSet(now, 0, RanksOf(world_), effects); }

void Protocol::Submitted(Nanoseconds now, int process_set, const Request& request, RankEffects* effects) {
  Feed(now, process_set, event::Submitted{request}, effects);
}

void Protocol::Refused(Nanoseconds now, int process_set, Refusal refusal, RankEffects* effects) {
  Feed(now, process_set, event::Refused{std::move(refusal)}, effects);
}

void Protocol::Arrived(Nanoseconds now, int from, Frame frame, RankEffects* effects) {
  if (frame.type == FrameType::kAbort) silent_.insert(from);
  if (aborted_ && frame.type != FrameType::kVerdicts) return;
  switch (frame.type) {
    case FrameType::kAbort:
      return HearEnd(Status::PeerLost(frame.text), effects);
    case FrameType::kGoodbye:
      return HearGoodbye(now, from, frame.flag, effects);
    case FrameType::kBeat:  // the transport has counted it
      if (!frame.flag) return;
      liveness_.Forget(from);
      left_.insert(from);
      return;
    case FrameType::kStalled:
      return void(effects->push_back(rank_effect::ShowStacks{std::move(frame.text)}));
    case FrameType::kAllGoodbye:
      all_goodbye_ = true;
      clean_ = frame.flag;
      return;
    default:
      break;
  }
  const int process_set = frame.process_set;
  if (!Knows(process_set)) {
    // Another member has learnt of the set before this one; or it is gone, and this is a refusal that nobody has waited
    // for.
    if (process_set <= newest_process_set_) return;
    early_frames_[process_set].emplace_back(from, std::move(frame));
    return;
  }
  Feed(now, process_set, event::Arrived{MemberOf(process_set, from), std::move(frame)}, effects);
}

void Protocol::BatchFinished(Nanoseconds now, int process_set, RankEffects* effects) {
  --batches_under_way_;
  Feed(now, process_set, event::BatchFinished{}, effects);
}

// A rank that has left is no loss, nor is any once all have said goodbye and nothing of this rank is under way.
void Protocol::ConnectionLost(int rank, const std::string& cause, RankEffects* effects) {
  silent_.insert(rank);
  const bool needs_nobody = clean() && !pending() && batches_under_way_ == 0;
  if (left_.count(rank) > 0 || needs_nobody) return;
  HearEnd(liveness_.ConnectionLost(rank, cause), effects);
}

void Protocol::LongPhase(Nanoseconds now, Nanoseconds duration, RankEffects* effects) {
  for (int process_set : ProcessSets()) Feed(now, process_set, event::LongPhase{duration}, effects);
}

void Protocol::Look(Nanoseconds now, const SignsOfLife& seen, RankEffects* effects) {
  for (int rank : world_.my_host())
    if (rank != world_.rank && seen[rank].died) silent_.insert(rank);
  looks_again_ = kNever;
  if (aborted_) return;
  effects->push_back(rank_effect::Beat{});
  SendBeats(false, effects);
  const Status verdict = liveness_.Look(now, seen);
  if (!verdict.ok()) HearEnd(verdict, effects);
}

bool Protocol::Tick(Nanoseconds now, RankEffects* effects) {
  bool moved = false;
  if (aborted_) return moved;
  for (int process_set : ProcessSets()) {
    Effects from;
    negotiators_.at(process_set).OnEvent(now, event::Tick{}, &from);
    moved |= !from.empty();  // control operations finish at once, and more may be ready behind them
    Follow(now, process_set, &from, effects);
  }
  return moved;
}

void Protocol::Feed(Nanoseconds now, int process_set, const Event& event, RankEffects* effects) {
  auto found = negotiators_.find(process_set);
  if (found == negotiators_.end()) return;
  Effects from;
  found->second.OnEvent(now, event, &from);
  Follow(now, process_set, &from, effects);
}

bool Protocol::pending() const {
  return std::any_of(negotiators_.begin(), negotiators_.end(),
                     [](const auto& entry) { return entry.second.pending(); });
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

void Protocol::Follow(Nanoseconds now, int process_set, Effects* from, RankEffects* effects) {
  for (Effect& effect : *from) std::visit([&](auto& what) { Follow(now, process_set, what, effects); }, effect);
}

void Protocol::Follow(Nanoseconds, int process_set, effect::Send& send, RankEffects* effects) {
  const int rank = negotiators_.at(process_set).members()[static_cast<size_t>(send.member)];
  effects->push_back(rank_effect::Send{rank, std::move(send.frame)});
}

void Protocol::Follow(Nanoseconds now, int process_set, effect::Execute& execute, RankEffects* effects) {
  if (aborted_) return;
  const bool control = Find(execute.responses[0].request.operation)->output == Output::kNone;  // which is never fused
  if (control) return RunControl(now, process_set, std::move(execute), effects);
  ++batches_under_way_;
  effects->push_back(rank_effect::Start{process_set, std::move(execute)});
}

void Protocol::Follow(Nanoseconds, int process_set, effect::Fail& fail, RankEffects* effects) {
  effects->push_back(rank_effect::Fail{process_set, std::move(fail.name), std::move(fail.status)});
}

void Protocol::Follow(Nanoseconds, int, effect::Warn& warn, RankEffects* effects) {
  effects->push_back(rank_effect::Warn{std::move(warn.text)});
}

void Protocol::Follow(Nanoseconds, int, effect::Abort& abort, RankEffects* effects) {
  Abort(Status::Internal(abort.cause), effects);
}

void Protocol::Follow(Nanoseconds, int process_set, effect::Count& count, RankEffects* effects) {
  effects->push_back(rank_effect::Count{process_set, std::move(count)});
}

// ---- process sets ----

void Protocol::RunControl(Nanoseconds now, int process_set, effect::Execute control, RankEffects* effects) {
  const Response& response = control.responses[0];
  const std::vector<int64_t>& list = response.request.splits;
  if (response.request.operation == Operation::kRemoveProcessSet) {
    // A rank that had joined may still be busy with a batch of the set for which nobody here waits: the set goes after
    // it.
    const int removed = static_cast<int>(list[0]);
    removals_.emplace(removed, Removal{process_set, std::move(control)});
    effects->push_back(rank_effect::RemoveProcessSet{removed});
    return;
  }
  if (response.request.operation == Operation::kAddProcessSet)
    AddProcessSet(now, response.result, {list.begin(), list.end()}, effects);
  FinishControl(now, process_set, std::move(control), effects);
}

void Protocol::FinishControl(Nanoseconds now, int process_set, effect::Execute control, RankEffects* effects) {
  effects->push_back(rank_effect::Finish{process_set, std::move(control)});
  Feed(now, process_set, event::BatchFinished{}, effects);
}

void Protocol::ProcessSetRemoved(Nanoseconds now, int process_set, RankEffects* effects) {
  negotiators_.erase(process_set);
  auto removal = removals_.extract(process_set);
  if (removal.empty()) return;
  FinishControl(now, removal.mapped().process_set, std::move(removal.mapped().control), effects);
}

void Protocol::AddProcessSet(Nanoseconds now, int process_set, const std::vector<int>& members, RankEffects* effects) {
  effects->push_back(rank_effect::AddProcessSet{process_set, members});
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
  for (const auto& frame : frames)
    Feed(now, process_set, event::Arrived{MemberOf(process_set, frame.first), frame.second}, effects);
}

// ---- the end ----

void Protocol::SayGoodbye(Nanoseconds now, RankEffects* effects) {
  if (awaits_last_words()) return End(effects);  // its program does not
  Tick(now, effects);  // what was submitted or refused before goes ahead, so that nobody takes it for left out
  TellGoodbye(false, effects);
}

void Protocol::TellGoodbye(bool gone, RankEffects* effects) {
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
    effects->push_back(rank_effect::Send{rank, std::move(goodbye)});
  }
}

void Protocol::HearGoodbye(Nanoseconds now, int rank, bool gone, RankEffects* effects) {
  for (int process_set : ProcessSets()) {
    const std::vector<int>& members = negotiators_.at(process_set).members();
    if (std::binary_search(members.begin(), members.end(), rank))
      Feed(now, process_set, event::Left{MemberOf(process_set, rank), gone}, effects);
  }
  if (gone) left_.insert(rank);
  if (world_.rank != lowest_rank() || gone) return;
  goodbyes_.insert(rank);
  if (goodbyes_.size() == everyone().size()) TellAllGoodbye(true, effects);
}

void Protocol::TellAllGoodbye(bool clean, RankEffects* effects) {
  for (int rank : everyone()) {
    Frame all;
    all.type = FrameType::kAllGoodbye;
    all.flag = clean;
    effects->push_back(rank_effect::Send{rank, std::move(all)});
  }
}

void Protocol::GiveUpWaiting(Nanoseconds now, RankEffects* effects) {
  if (awaits_last_words()) return End(effects);
  Tick(now, effects);
  TellGoodbye(true, effects);
  SendBeats(true, effects);
  if (world_.rank == lowest_rank() && !all_goodbye_) TellAllGoodbye(false, effects);
}

void Protocol::SendBeats(bool last, RankEffects* effects) {
  for (int rank : liveness_.listeners()) {
    Frame beat;
    beat.type = FrameType::kBeat;
    beat.flag = last;
    effects->push_back(rank_effect::Send{rank, std::move(beat)});
  }
}

void Protocol::Abort(const Status& last, RankEffects* effects) {
  hears_ = false;
  if (awaits_last_words()) return End(effects);
  if (!std::exchange(aborted_, true)) effects->push_back(rank_effect::NoteCause{last});
}

void Protocol::HearEnd(const Status& last, RankEffects* effects) {
  if (std::exchange(aborted_, true)) return;
  hears_ = true;
  effects->push_back(rank_effect::NoteCause{last});
}

void Protocol::CauseNoted(const Status& cause, RankEffects* effects) {
  for (int rank : everyone()) {
    if (rank == world_.rank) continue;
    const bool here = world_.host_of[rank] == world_.host_of[world_.rank];
    if (here) effects->push_back(rank_effect::Wake{rank});
    if (here && !Decides(rank)) continue;
    Frame abort;  // behind the verdicts for that rank
    abort.type = FrameType::kAbort;
    abort.text = cause.message();
    effects->push_back(rank_effect::Send{rank, std::move(abort)});
  }
  held_cause_ = cause;
  if (!hears_) return End(effects);
  looks_again_ = 0;
}

void Protocol::MailTaken(Nanoseconds now, RankEffects* effects) {
  if (!awaits_last_words()) return;
  if (end_by_ == 0) end_by_ = now + kLastWords;
  if (now >= end_by_ || !AwaitsCoordinator()) End(effects);
}

// Something of a rank waits for this one's verdicts.
bool Protocol::Decides(int rank) const {
  return std::any_of(negotiators_.begin(), negotiators_.end(), [&](const auto& entry) {
    const std::vector<int>& members = entry.second.members();
    return members[0] == world_.rank && std::binary_search(members.begin(), members.end(), rank);
  });
}

// Something here waits for a verdict that may have been sent.
bool Protocol::AwaitsCoordinator() const {
  return std::any_of(negotiators_.begin(), negotiators_.end(), [&](const auto& entry) {
    const int coordinator = entry.second.members()[0];
    return entry.second.pending() && coordinator != world_.rank && silent_.count(coordinator) == 0;
  });
}

// The peers have heard of it before, the submitters hear last: they may free the tensors.
void Protocol::End(RankEffects* effects) { effects->push_back(rank_effect::End{std::exchange(held_cause_, Status())}); }

}  // namespace ringtrain
