// How the members of a process set come to run by a schedule, what they do while they run by it, and how they come back
// to verdicts: schedule.h tells of it.
//
// Two frames may cross: what a member has announced before it heard of a schedule, and the schedule. So a member takes
// all that it has announced and heard nothing of into the schedule, and the coordinator drops what was announced
// before: each frame says which schedule its sender has begun last.
#include <algorithm>

#include "agree/negotiator.h"

namespace ringtrain {
namespace {

// Until the coordinator is to see who is late, so that it can report it: a part of the time after which it would.
constexpr Nanoseconds kLongestWait = kSecond;
constexpr int kPartOfWarning = 4;

}  // namespace

// ---- its beginning ----

void Negotiator::ProposeSchedule(Nanoseconds now, Effects* effects) {
  Frame frame = options_.MakeFrame(FrameType::kSchedule);
  frame.schedule = newest_schedule_ + 1;
  frame.cycle = arbiter_->TakeCycle();
  arbiter_->SendToOthers(frame, effects);
  BeginSchedule(now, frame, effects);
}

void Negotiator::BeginSchedule(Nanoseconds now, const Frame& frame, Effects* effects) {
  for (const auto& batch : frame.cycle) {
    for (ResponseCache::Id id : batch) {
      if (cache_.Find(id) != nullptr) continue;
      effects->push_back(effect::Abort{"rank " + std::to_string(options_.members[options_.me]) +
                                       " does not know response " + std::to_string(id) +
                                       " that its coordinator named: the response caches differ."});
      return;
    }
  }
  newest_schedule_ = frame.schedule;
  schedule_.emplace(frame.schedule, frame.cycle, std::min(kLongestWait, options_.stall_warning / kPartOfWarning), now);
  promises_.Begin(frame.schedule);
  ready_.ids.clear();
  ready_.requests.clear();
  for (const std::string& name : NamesOfMine()) TakeIntoSchedule(now, mine_[name], effects);
  if (has_refused_) Deviate(now, effects);
  ShowPromise(now, effects);
}

// ---- while it lasts ----

void Negotiator::TakeIntoSchedule(Nanoseconds now, const Mine& mine, Effects* effects) {
  if (!schedule_->frozen() && !schedule_->Take(now, mine.id)) Deviate(now, effects);
}

void Negotiator::KeepSchedule(Nanoseconds now, Effects* effects) {
  if (schedule_->Promise(now)) ShowPromise(now, effects);
  if (now >= schedule_->due()) Deviate(now, effects);
}

// What it looks like in the host's memory.
void Negotiator::ShowPromise(Nanoseconds now, Effects* effects) {
  rings_at_ = promises_.here_promised();
  effects->emplace_back(
      effect::Promise{{schedule_->number(), schedule_->promised(), promises_.leads() ? promises_.agreed() : 0, now}});
}

void Negotiator::On(Nanoseconds now, const event::Seen& event, Effects* effects) {
  if (!schedule_) return;
  promises_.See(event.signs);
  const std::optional<uint64_t> rings_at = std::exchange(rings_at_, std::nullopt);
  if (rings_at && promises_.here_promised() > *rings_at) {
    std::vector<int> waiting = promises_.here();
    if (!promises_.one_host()) waiting.resize(1);  // the leader tells the others
    effects->emplace_back(effect::Ring{std::move(waiting)});
  }
  PassPromises(effects);
  StartAgreed(now, promises_.agreed(), effects);
}

void Negotiator::HearPromise(Nanoseconds now, int member, const Frame& frame, Effects* effects) {
  const uint64_t before = promises_.agreed();
  promises_.Hear(now, member, frame.schedule, frame.count, std::min(frame.last, options_.member_count() - 1),
                 frame.gap);
  if (!schedule_) return;
  PassPromises(effects);
  if (promises_.agreed() > before) StartAgreed(now, promises_.agreed(), effects);
}

void Negotiator::PassPromises(Effects* effects) {
  for (const Promises::Told& told : promises_.TakeNews()) {
    Frame frame = MakeScheduleFrame(FrameType::kPromise, told.count);
    const LastPromise last = promises_.LastBelow(told.count);
    frame.last = last.member;
    frame.gap = last.at - last.before;
    effects->emplace_back(effect::Send{told.member, std::move(frame), BatchesAhead(told.before, told.count)});
  }
}

// Of those that are promised by this frame, the ones that a contribution goes ahead of.
std::vector<PromisedBatch> Negotiator::BatchesAhead(uint64_t begin, uint64_t end) const {
  std::vector<PromisedBatch> batches;
  if (options_.member_count() != 2 || promises_.one_host() || schedule_->frozen()) return batches;
  for (uint64_t number = begin; number < end; ++number) {
    std::vector<const Response*> responses;
    for (ResponseCache::Id id : schedule_->batch(number)) responses.push_back(cache_.Find(id));
    if (!GoesAhead(responses)) continue;
    batches.push_back({number, {}});
    for (const Response* response : responses) batches.back().responses.push_back(*response);
  }
  return batches;
}

void Negotiator::StartAgreed(Nanoseconds now, uint64_t agreed, Effects* effects) {
  if (schedule_->started() >= agreed) return;
  if (!promises_.one_host() && promises_.leads()) {
    ShowPromise(now, effects);
    rings_at_.reset();
    effects->emplace_back(effect::Ring{promises_.here()});
  }
  while (schedule_->started() < agreed) StartScheduled(now, effects);
}

void Negotiator::StartScheduled(Nanoseconds now, Effects* effects) {
  const LastPromise last = promises_.TakeLast();
  effect::Execute execute;
  execute.scheduled = true;
  execute.schedule = schedule_->number();
  execute.batch = schedule_->started();
  execute.joined.resize(options_.members.size(), false);
  for (ResponseCache::Id id : schedule_->StartNext(now)) {
    const Response& response = *cache_.Find(id);
    auto mine = mine_.find(response.request.name);
    if (!mine->second.counted) ++hits_;
    mine_.erase(mine);
    if (arbiter_)
      arbiter_->NoteLast(last.member, std::max<Nanoseconds>(last.at - last.before, 0), response.request.name);
    execute.responses.push_back(response);
    cache_.Touch(id);
  }
  if (arbiter_) arbiter_->BatchStarted();
  if (hits_ + misses_ > 0) effects->emplace_back(effect::Count{std::exchange(hits_, 0), std::exchange(misses_, 0), {}});
  effects->emplace_back(std::move(execute));
}

// ---- its end ----

void Negotiator::Deviate(Nanoseconds now, Effects* effects) {
  if (schedule_->frozen()) return;
  schedule_->Freeze();
  if (arbiter_) return NoteHalted(now, options_.me, schedule_->promised(), effects);
  effects->emplace_back(effect::Send{0, MakeScheduleFrame(FrameType::kHalt, schedule_->promised())});
}

void Negotiator::HearHalt(Nanoseconds now, int member, const Frame& frame, Effects* effects) {
  if (!schedule_ || frame.schedule != schedule_->number()) return;
  if (arbiter_)
    NoteHalted(now, member, frame.count, effects);
  else
    Deviate(now, effects);
}

// The first to promise no more has all others do so.
void Negotiator::NoteHalted(Nanoseconds now, int member, uint64_t promised, Effects* effects) {
  const bool first = halted_.empty();
  halted_.resize(options_.members.size());
  halted_[static_cast<size_t>(member)] = promised;
  if (first) {
    arbiter_->SendToOthers(MakeScheduleFrame(FrameType::kHalt, 0), effects);
    Deviate(now, effects);
  }
  uint64_t least = promised;
  for (const auto& each : halted_) {
    if (!each) return;
    least = std::min(least, *each);
  }
  if (schedule_) EndOnAll(now, least, effects);
}

void Negotiator::EndOnAll(Nanoseconds now, uint64_t batches, Effects* effects) {
  const Frame frame = MakeScheduleFrame(FrameType::kHalted, batches);
  arbiter_->SendToOthers(frame, effects);
  halted_.clear();
  arbiter_->ScheduleEnded(batches);
  EndSchedule(now, frame, effects);
}

void Negotiator::EndSchedule(Nanoseconds now, const Frame& frame, Effects* effects) {
  if (!schedule_ || frame.schedule != schedule_->number()) return;
  if (frame.count > schedule_->promised() || frame.count < schedule_->started()) {
    effects->push_back(effect::Abort{"rank " + std::to_string(options_.members[options_.me]) + " has promised " +
                                     std::to_string(schedule_->promised()) + " batches of a schedule and begun " +
                                     std::to_string(schedule_->started()) + ", which its coordinator ends after " +
                                     std::to_string(frame.count) + ": between these is what all can run."});
    return;
  }
  while (schedule_->started() < frame.count) StartScheduled(now, effects);
  schedule_.reset();
  ++ready_.resent;
  has_refused_ = !ready_.refusals.empty();
  for (const std::string& name : NamesOfMine()) AddToReady(&mine_[name]);
}

// What it has not promised by now it never will; what it has is done, so no member has promised less.
void Negotiator::On(Nanoseconds now, const event::GivesUp&, Effects* effects) {
  if (!schedule_) return;
  if (arbiter_)
    EndOnAll(now, schedule_->promised(), effects);
  else
    Deviate(now, effects);
}

Frame Negotiator::MakeScheduleFrame(FrameType type, uint64_t count) const {
  Frame frame = options_.MakeFrame(type);
  frame.schedule = schedule_->number();
  frame.count = count;
  return frame;
}

}  // namespace ringtrain
