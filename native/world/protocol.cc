#include "world/protocol.h"

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

Protocol::Protocol(const World& world, const Options& options, int fanout)
    : world_(world),
      options_(options),
      fanout_(fanout),
      liveness_(world, options.dead_after_seconds),
      memberships_(world) {}

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
  ArrivedIn(now, process_set, from, std::move(frame), effects);
}

void Protocol::ArrivedIn(Nanoseconds now, int process_set, int from, Frame frame, RankEffects* effects) {
  if (!Fits(process_set, from, frame, effects)) return;
  Feed(now, process_set, event::Arrived{memberships_.MemberOf(process_set, from), std::move(frame)}, effects);
}

// One that does not comes of another build, or of damaged memory: what it names lies outside of what there is here.
bool Protocol::Fits(int process_set, int from, const Frame& frame, RankEffects* effects) {
  if (memberships_.HasMember(process_set, from) && frame.Fits(memberships_.Ranks(process_set))) return true;
  Abort(Status::Internal("a frame from rank " + std::to_string(from) + " must fit process set " +
                         std::to_string(process_set) + ", but does not. Run the same ringtrain on all ranks."),
        effects);
  return false;
}

void Protocol::BatchFinished(Nanoseconds now, int process_set, RankEffects* effects) {
  --batches_under_way_;
  Feed(now, process_set, event::BatchFinished{}, effects);
}

void Protocol::Seen(Nanoseconds now, int process_set, std::vector<PromiseSign> signs, RankEffects* effects) {
  if (!aborted_) Feed(now, process_set, event::Seen{std::move(signs)}, effects);
}

// A rank that has left is no loss, nor is any once all have said goodbye and nothing of this rank is under way.
void Protocol::ConnectionLost(const LostPeer& lost, RankEffects* effects) {
  silent_.insert(lost.rank);
  const bool needs_nobody = clean() && !pending() && batches_under_way_ == 0;
  if (left_.count(lost.rank) > 0 || needs_nobody) return;
  HearEnd(liveness_.ConnectionLost(lost), effects);
}

void Protocol::LongPhase(Nanoseconds now, Nanoseconds duration, RankEffects* effects) {
  for (int process_set : memberships_.ids()) Feed(now, process_set, event::LongPhase{duration}, effects);
}

void Protocol::Look(Nanoseconds now, const SignsOfLife& seen, RankEffects* effects) {
  for (int rank : world_.my_host())
    if (rank != world_.rank && seen[rank].died()) silent_.insert(rank);
  looks_again_ = kNever;
  if (aborted_) return;
  effects->push_back(rank_effect::Beat{});
  SendBeats(false, effects);
  const Status verdict = liveness_.Look(now, seen);
  if (liveness_.stood_still())
    for (int process_set : memberships_.ids()) Feed(now, process_set, event::StoodStill{}, effects);
  if (!verdict.ok()) HearEnd(verdict, effects);
}

bool Protocol::Tick(Nanoseconds now, RankEffects* effects) {
  bool moved = false;
  if (aborted_) return moved;
  for (int process_set : memberships_.ids()) {
    Effects from;
    memberships_.Find(process_set)->OnEvent(now, event::Tick{}, &from);
    moved |= !from.empty();  // control operations finish at once, and more may be ready behind them
    Follow(now, process_set, &from, effects);
  }
  return moved;
}

void Protocol::Feed(Nanoseconds now, int process_set, const Event& event, RankEffects* effects) {
  Negotiator* const negotiator = memberships_.Find(process_set);
  if (negotiator == nullptr) return;
  Effects from;
  negotiator->OnEvent(now, event, &from);
  Follow(now, process_set, &from, effects);
}

// ---- what follows ----

void Protocol::Follow(Nanoseconds now, int process_set, Effects* from, RankEffects* effects) {
  for (Effect& effect : *from) std::visit([&](auto& what) { Follow(now, process_set, what, effects); }, effect);
}

void Protocol::Follow(Nanoseconds, int process_set, effect::Send& send, RankEffects* effects) {
  effects->push_back(
      rank_effect::Send{memberships_.RankOf(process_set, send.member), std::move(send.frame), std::move(send.ahead)});
}

void Protocol::Follow(Nanoseconds now, int process_set, effect::Execute& execute, RankEffects* effects) {
  if (aborted_) return;
  const bool control = Find(execute.responses[0].request.operation)->output == Output::kNone;  // which is never fused
  if (control) return RunControl(now, process_set, std::move(execute), effects);
  ++batches_under_way_;
  effects->push_back(rank_effect::Start{process_set, std::move(execute)});
}

void Protocol::Follow(Nanoseconds, int process_set, effect::Promise& promise, RankEffects* effects) {
  effects->push_back(rank_effect::Promise{process_set, promise.sign});
}

void Protocol::Follow(Nanoseconds, int process_set, effect::Ring& ring, RankEffects* effects) {
  for (int member : ring.members) {
    const int rank = memberships_.RankOf(process_set, member);
    if (rank != world_.rank) effects->push_back(rank_effect::Wake{rank});
  }
}

void Protocol::Follow(Nanoseconds, int process_set, effect::Fail& fail, RankEffects* effects) {
  effects->push_back(
      rank_effect::Fail{process_set, std::move(fail.name), std::move(fail.status), std::move(fail.missing)});
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
  const Request& request = control.responses[0].request;
  if (request.operation == Operation::kRemoveProcessSet) {
    // A rank that had joined may still be busy with a batch of the set for which nobody here waits: the set goes after
    // it.
    const int removed = static_cast<int>(request.splits[0]);
    removals_.emplace(removed, Control{process_set, std::move(control)});
    effects->push_back(rank_effect::RemoveProcessSet{removed});
    return;
  }
  if (request.operation == Operation::kAddProcessSet) {
    additions_.push_back({process_set, std::move(control)});
    return RunAdditions(now, effects);
  }
  FinishControl(now, process_set, std::move(control), effects);
}

// Behind the removals that were decided before them: a new set has the lane of one that is gone, on all ranks the same.
void Protocol::RunAdditions(Nanoseconds now, RankEffects* effects) {
  while (removals_.empty() && !additions_.empty()) {
    Control addition = std::move(additions_.front());
    additions_.pop_front();
    const Response& response = addition.execute.responses[0];
    const std::vector<int64_t>& list = response.request.splits;
    AddProcessSet(now, response.result, {list.begin(), list.end()}, effects);
    FinishControl(now, addition.process_set, std::move(addition.execute), effects);
  }
}

void Protocol::FinishControl(Nanoseconds now, int process_set, effect::Execute control, RankEffects* effects) {
  effects->push_back(rank_effect::Finish{process_set, std::move(control)});
  Feed(now, process_set, event::BatchFinished{}, effects);
}

void Protocol::ProcessSetRemoved(Nanoseconds now, int process_set, RankEffects* effects) {
  memberships_.Remove(process_set);
  --live_sets_;
  auto removal = removals_.extract(process_set);
  if (removal.empty()) return;
  FinishControl(now, removal.mapped().process_set, std::move(removal.mapped().execute), effects);
  RunAdditions(now, effects);
}

void Protocol::AddProcessSet(Nanoseconds now, int process_set, const std::vector<int>& members, RankEffects* effects) {
  effects->push_back(rank_effect::AddProcessSet{process_set, members});
  newest_process_set_ = process_set;
  ++live_sets_;
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
  options.fanout = fanout_;
  options.schedules = options_.schedule == "auto" && live_sets_ <= kMaxScheduledSets;
  for (int rank : members) options.hosts.push_back(world_.host_of[static_cast<size_t>(rank)]);
  memberships_.Add(process_set, std::move(options));
  auto early = early_frames_.find(process_set);
  if (early == early_frames_.end()) return;
  const std::vector<std::pair<int, Frame>> frames = std::move(early->second);
  early_frames_.erase(early);
  for (const auto& frame : frames) ArrivedIn(now, process_set, frame.first, frame.second, effects);
}

// ---- the end ----

void Protocol::SayGoodbye(Nanoseconds now, RankEffects* effects) {
  if (awaits_last_words()) return End(effects);  // its program does not
  Tick(now, effects);  // what was submitted or refused before goes ahead, so that nobody takes it for left out
  TellGoodbye(false, effects);
}

void Protocol::TellGoodbye(bool gone, RankEffects* effects) {
  for (int rank : memberships_.Concerned()) {
    Frame goodbye;
    goodbye.type = FrameType::kGoodbye;
    goodbye.flag = gone;
    effects->push_back(rank_effect::Send{rank, std::move(goodbye)});
  }
}

void Protocol::HearGoodbye(Nanoseconds now, int rank, bool gone, RankEffects* effects) {
  for (int process_set : memberships_.ids())
    if (memberships_.HasMember(process_set, rank))
      Feed(now, process_set, event::Left{memberships_.MemberOf(process_set, rank), gone}, effects);
  if (gone) left_.insert(rank);
  if (world_.rank != lowest_rank() || gone) return;
  goodbyes_.insert(rank);
  if (goodbyes_.size() == everyone().size()) TellAllGoodbye(true, effects);
}

void Protocol::TellAllGoodbye(bool clean, RankEffects* effects) {
  Frame all;
  all.type = FrameType::kAllGoodbye;
  all.flag = clean;
  for (int rank : everyone()) effects->push_back(rank_effect::Send{rank, all});
}

void Protocol::GiveUpWaiting(Nanoseconds now, RankEffects* effects) {
  if (awaits_last_words()) return End(effects);
  Tick(now, effects);
  for (int process_set : memberships_.ids()) {
    if (memberships_.Find(process_set)->owes()) return Abort(LeavesUnderWay(), effects);
    Feed(now, process_set, event::GivesUp{}, effects);
  }
  TellGoodbye(true, effects);
  SendBeats(true, effects);
  if (world_.rank == lowest_rank() && !all_goodbye_) TellAllGoodbye(false, effects);
}

// What it has promised counts as begun: others may run it by now.
Status Protocol::LeavesUnderWay() const {
  return Status::Closed("rank " + std::to_string(world_.rank) +
                        " called shutdown() and left with operations under way. Wait for them before shutdown().");
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
  const std::set<int> told = ToldOfEnd();
  for (int rank : everyone()) {
    if (rank == world_.rank) continue;
    const bool here = world_.host_of[rank] == world_.host_of[world_.rank];
    if (here) effects->push_back(rank_effect::Wake{rank});
    if (here ? !memberships_.DecidesFor(rank) : told.count(rank) == 0) continue;
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
  if (now >= end_by_ || !memberships_.AwaitsVerdict(silent_)) End(effects);
}

// Of the ranks of other hosts those whom this one tells: who decides for it, for whom it decides, and a rank of each of
// the hosts 1, 2, 4, ... further on, so that whoever has died, all others hear of it in few steps. What one rank of a
// host has heard, the others read.
std::set<int> Protocol::ToldOfEnd() const {
  std::set<int> told = memberships_.Concerned();
  const size_t hosts = world_.hosts.size(), mine = static_cast<size_t>(world_.host_of[world_.rank]);
  for (size_t distance = 1; distance < hosts; distance *= 2) {
    std::vector<int> ranks = world_.hosts[(mine + distance) % hosts];
    const size_t first = static_cast<size_t>(world_.local_rank()) % ranks.size();
    std::rotate(ranks.begin(), ranks.begin() + static_cast<std::ptrdiff_t>(first), ranks.end());
    const auto lives = std::find_if(ranks.begin(), ranks.end(), [this](int rank) { return silent_.count(rank) == 0; });
    if (lives != ranks.end()) told.insert(*lives);
  }
  return told;
}

// The peers have heard of it before, the submitters hear last: they may free the tensors.
void Protocol::End(RankEffects* effects) { effects->push_back(rank_effect::End{std::exchange(held_cause_, Status())}); }

}  // namespace ringtrain
