#include "agree/negotiator.h"

#include <algorithm>

namespace ringtrain {
namespace {

constexpr Nanoseconds kMillisecond = 1000000;

}  // namespace

Negotiator::Negotiator(NegotiatorOptions options)
    : options_(std::move(options)),
      cache_(options_.cache_capacity),
      promises_(options_.hosts.empty() ? std::vector<int>(options_.members.size(), 0) : options_.hosts, options_.me,
                options_.fanout) {
  if (options_.coordinates()) arbiter_.emplace(options_, cache_, static_cast<OwnMember*>(this));
  ready_ = options_.MakeFrame(FrameType::kReady);
}

void Negotiator::OnEvent(Nanoseconds now, const Event& event, Effects* effects) {
  std::visit([&](const auto& what) { On(now, what, effects); }, event);
}

Nanoseconds Negotiator::next_timer() const {
  if (schedule_) return schedule_->due();
  return arbiter_ ? arbiter_->next_timer() : kNever;
}

// ---- member ----

void Negotiator::On(Nanoseconds now, const event::Submitted& event, Effects* effects) {
  const Request& request = event.request;
  if (coordinator_gone_) {
    effects->push_back(effect::Fail{request.name, CoordinatorGone(request)});
    return;
  }
  ResponseCache::Id id = cache_.IdOf(request.name);
  if (id != ResponseCache::kNone && !cache_.Find(id)->IsOf(options_.me, options_.member_count(), request))
    id = ResponseCache::kNone;
  Mine& mine = mine_[request.name] = {request, id};
  if (schedule_)
    TakeIntoSchedule(now, mine, effects);
  else
    AddToReady(&mine);
}

void Negotiator::AddToReady(Mine* mine) {
  const bool cached = mine->id != ResponseCache::kNone;
  mine->frame = ready_frames_ + 1;
  if (cached)
    ready_.ids.push_back(mine->id);
  else
    ready_.requests.push_back(mine->request);
  if (!std::exchange(mine->counted, true)) ++(cached ? hits_ : misses_);
}

void Negotiator::On(Nanoseconds now, const event::Refused& event, Effects* effects) {
  ready_.refusals.push_back(event.refusal);
  has_refused_ = true;
  refused_in_ = ready_frames_ + 1;
  if (schedule_) Deviate(now, effects);
}

void Negotiator::On(Nanoseconds now, const event::Arrived& event, Effects* effects) {
  switch (event.frame.type) {
    case FrameType::kReady:
      if (arbiter_) Receive(now, event.member, event.frame, effects);
      break;
    case FrameType::kVerdicts:
    case FrameType::kResend:
      Hear(event.frame, effects);
      break;
    case FrameType::kSchedule:
      BeginSchedule(now, event.frame, effects);
      break;
    case FrameType::kPromise:
      HearPromise(now, event.member, event.frame, effects);
      break;
    case FrameType::kHalt:
      HearHalt(now, event.member, event.frame, effects);
      break;
    case FrameType::kHalted:
      EndSchedule(now, event.frame, effects);
      break;
    case FrameType::kLongPhase:
      if (arbiter_)
        arbiter_->LongPhase(event.member, now + static_cast<Nanoseconds>(event.frame.milliseconds) * kMillisecond);
      break;
    default:
      break;  // the other types concern the world, not a process set
  }
}

void Negotiator::On(Nanoseconds, const event::BatchFinished&, Effects*) {
  if (arbiter_) arbiter_->BatchFinished();
}

void Negotiator::On(Nanoseconds now, const event::Left& event, Effects* effects) {
  if (arbiter_) {
    if (schedule_) Deviate(now, effects);
    arbiter_->Left(event.member, event.gone, effects);
  } else if (event.member == 0 && event.gone) {
    coordinator_gone_ = true;
    for (const std::string& name : NamesOfMine())
      effects->push_back(effect::Fail{name, CoordinatorGone(mine_[name].request)});
    mine_.clear();
    schedule_.reset();
  }
}

// In an order that is the same each time.
std::vector<std::string> Negotiator::NamesOfMine() const {
  std::vector<std::string> names;
  for (const auto& pending : mine_) names.push_back(pending.first);
  std::sort(names.begin(), names.end());
  return names;
}

Status Negotiator::CoordinatorGone(const Request& request) const {
  return Status::Closed(options_.Subject(request) + ": rank " + std::to_string(options_.members[0]) +
                        " has called shutdown(). All ranks must submit before any shuts down.");
}

void Negotiator::On(Nanoseconds now, const event::LongPhase& event, Effects* effects) {
  if (arbiter_) {
    arbiter_->LongPhase(options_.me, now + event.duration);
    return;
  }
  Frame frame = options_.MakeFrame(FrameType::kLongPhase);
  frame.milliseconds = static_cast<uint64_t>(event.duration / kMillisecond);
  effects->push_back(effect::Send{0, std::move(frame)});
}

void Negotiator::On(Nanoseconds now, const event::StoodStill&, Effects*) {
  if (arbiter_) arbiter_->StoodStill(now);
}

void Negotiator::On(Nanoseconds now, const event::Tick&, Effects* effects) {
  if (schedule_)
    KeepSchedule(now, effects);
  else
    Announce(now, effects);
  if (!arbiter_) return;
  if (next_timer() <= now) arbiter_->CheckStalls(now, effects);
  arbiter_->Decide(effects);
  if (!schedule_ && arbiter_->FindsCycle()) ProposeSchedule(now, effects);
  arbiter_->TellLate(effects);
}

void Negotiator::Announce(Nanoseconds now, Effects* effects) {
  if (ready_.ids.empty() && ready_.requests.empty() && ready_.refusals.empty() && ready_.resent == 0) return;
  std::sort(ready_.ids.begin(), ready_.ids.end());
  Frame frame = std::exchange(ready_, options_.MakeFrame(FrameType::kReady));
  frame.schedule = newest_schedule_;
  ++ready_frames_;
  effects->push_back(effect::Count{std::exchange(hits_, 0), std::exchange(misses_, 0), {}});
  if (arbiter_)
    Receive(now, options_.me, frame, effects);
  else
    effects->push_back(effect::Send{0, std::move(frame)});
}

void Negotiator::Receive(Nanoseconds now, int member, const Frame& ready, Effects* effects) {
  arbiter_->Refuse(member, ready.refusals, effects);
  if (IsStale(ready.schedule)) {  // but for its refusals: the member has taken the rest into the schedule
    if (schedule_ && !ready.refusals.empty()) Deviate(now, effects);
    return;
  }
  if (arbiter_->Receive(now, member, ready, effects)) On(now, event::Left{member}, effects);
}

void Negotiator::Hear(const Frame& frame, Effects* effects) {
  if (frame.type == FrameType::kResend)
    Resend(frame.ids);
  else
    Apply(frame, effects);
}

void Negotiator::Resend(const std::vector<ResponseCache::Id>& unknown) {
  std::vector<std::string> names;
  for (auto& pending : mine_)
    if (std::binary_search(unknown.begin(), unknown.end(), pending.second.id)) names.push_back(pending.first);
  std::sort(names.begin(), names.end());
  for (const std::string& name : names) {
    mine_[name].id = ResponseCache::kNone;
    ready_.requests.push_back(mine_[name].request);
    ++misses_;
    ++ready_.resent;
  }
}

void Negotiator::Apply(const Frame& frame, Effects* effects) {
  for (const Verdict& verdict : frame.verdicts) {
    if (!verdict.batch.empty())
      ApplyBatch(verdict, effects);
    else if (mine_.erase(verdict.failure.name) > 0)
      effects->push_back(effect::Fail{verdict.failure.name, Status(verdict.failure.code, verdict.failure.text),
                                      verdict.failure.missing});
  }
}

void Negotiator::ApplyBatch(const Verdict& verdict, Effects* effects) {
  effect::Execute execute;
  execute.joined.resize(options_.member_count(), false);
  for (int member : verdict.joined) execute.joined[member] = true;
  // All ids first, then the insertions: one of them may evict an entry that the same batch names.
  for (const Agreed& agreed : verdict.batch) {
    const Response* response = agreed.cached ? cache_.Find(agreed.id) : &agreed.response;
    if (response == nullptr) {
      effects->push_back(effect::Abort{"rank " + std::to_string(options_.members[options_.me]) +
                                       " does not know response " + std::to_string(agreed.id) +
                                       " that its coordinator named: the response caches differ."});
      return;
    }
    const auto mine = mine_.find(response->request.name);
    if (!execute.joined[options_.me] && !IsAnswer(*response, agreed.cached ? agreed.id : ResponseCache::kNone, mine)) {
      effects->push_back(effect::Abort{"rank " + std::to_string(options_.members[options_.me]) + " is to run " +
                                       response->request.Subject() + " otherwise than it has submitted it."});
      return;
    }
    if (mine != mine_.end()) {
      NoteHeard(mine->second);
      mine_.erase(mine);
    }
    execute.responses.push_back(*response);
    if (agreed.cached) cache_.Touch(agreed.id);
  }
  for (const Agreed& agreed : verdict.batch)
    if (!agreed.cached && agreed.id != ResponseCache::kNone) cache_.Insert(agreed.id, agreed.response);
  effects->push_back(std::move(execute));
}

// The coordinator has decided on it, so it has heard what was announced with it and before.
void Negotiator::NoteHeard(const Mine& mine) {
  if (mine.frame >= refused_in_) has_refused_ = false;
}

// Whether it is what this rank has memory for. Of one that it has announced by the id nothing else can be meant.
bool Negotiator::IsAnswer(const Response& response, ResponseCache::Id cached, Mines::const_iterator mine) const {
  if (ringtrain::Find(response.request.operation)->output == Output::kNone) return true;
  if (mine == mine_.end()) return false;
  if (cached != ResponseCache::kNone && mine->second.id == cached) return true;
  const Request& own = mine->second.request;
  const Request agreed = response.RequestOf(options_.me, options_.member_count());
  return agreed.operation == own.operation && agreed.tensors == own.tensors && agreed.splits == own.splits;
}

}  // namespace ringtrain
