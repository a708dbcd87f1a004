#include "agree/negotiator.h"

#include <algorithm>

#include "agree/fusion.h"
#include "agree/match.h"
#include "base/ranks.h"

namespace ringtrain {
namespace {

// Two batches overlap one's copies with the other's wire; more would only take operations away from fusion.
constexpr int kMaxBatches = 2;

constexpr Nanoseconds kMillisecond = 1000000;

}  // namespace

Negotiator::Negotiator(NegotiatorOptions options)
    : options_(std::move(options)),
      cache_(options_.cache_capacity),
      promises_(options_.hosts.empty() ? std::vector<int>(options_.members.size(), 0) : options_.hosts, options_.me,
                options_.fanout),
      joined_(member_count()),
      left_(member_count()),
      stalls_(options_.stall_warning, options_.stall_abort),
      unanswered_(options_.members.size(), 0),
      held_joins_(options_.members.size()),
      held_goodbyes_(options_.members.size(), false) {
  ready_ = MakeFrame(FrameType::kReady);
}

void Negotiator::OnEvent(Nanoseconds now, const Event& event, Effects* effects) {
  std::visit([&](const auto& what) { On(now, what, effects); }, event);
}

Frame Negotiator::MakeFrame(FrameType type) const {
  Frame frame;
  frame.type = type;
  frame.process_set = options_.process_set;
  return frame;
}

// ---- member ----

void Negotiator::On(Nanoseconds now, const event::Submitted& event, Effects* effects) {
  const Request& request = event.request;
  if (coordinator_gone_) {
    effects->push_back(effect::Fail{request.name, CoordinatorGone(request)});
    return;
  }
  ResponseCache::Id id = cache_.IdOf(request.name);
  if (id != ResponseCache::kNone && !cache_.Find(id)->IsOf(options_.me, member_count(), request))
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
      if (coordinates()) Receive(now, event.member, event.frame, effects);
      break;
    case FrameType::kVerdicts:
      Apply(event.frame, effects);
      break;
    case FrameType::kResend:
      Resend(event.frame.ids);
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
      if (coordinates())
        stalls_.LongPhase(event.member, now + static_cast<Nanoseconds>(event.frame.milliseconds) * kMillisecond);
      break;
    default:
      break;  // the other types concern the world, not a process set
  }
}

void Negotiator::On(Nanoseconds, const event::BatchFinished&, Effects*) {
  if (coordinates()) --batches_under_way_;
}

// A coordinator that has left still decides until it is gone: what it submitted itself may yet run.
void Negotiator::On(Nanoseconds now, const event::Left& event, Effects* effects) {
  if (coordinates() && schedule_) Deviate(now, effects);
  if (unanswered_[event.member] > 0 && !event.gone) {  // something that it submitted before has not arrived
    held_goodbyes_[event.member] = true;
    return;
  }
  left_.Add(event.member);
  if (coordinates()) {
    if (event.gone) Withdraw(event.member, effects);
    CompleteAll(effects);
    FailHopelessJoin(effects);
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

// "allreduce 'x'", and where it is if not in the world.
std::string Negotiator::Subject(const Request& request) const {
  const std::string set = options_.process_set == 0 ? "" : " of process set " + std::to_string(options_.process_set);
  return request.Subject() + set;
}

Status Negotiator::CoordinatorGone(const Request& request) const {
  return Status::Closed(Subject(request) + ": rank " + std::to_string(options_.members[0]) +
                        " has called shutdown(). All ranks must submit before any shuts down.");
}

void Negotiator::On(Nanoseconds now, const event::LongPhase& event, Effects* effects) {
  if (coordinates()) {
    stalls_.LongPhase(options_.me, now + event.duration);
    return;
  }
  Frame frame = MakeFrame(FrameType::kLongPhase);
  frame.milliseconds = static_cast<uint64_t>(event.duration / kMillisecond);
  effects->push_back(effect::Send{0, std::move(frame)});
}

void Negotiator::On(Nanoseconds now, const event::StoodStill&, Effects*) { stalls_.StoodStill(now); }

void Negotiator::On(Nanoseconds now, const event::Tick&, Effects* effects) {
  if (schedule_)
    KeepSchedule(now, effects);
  else
    Announce(now, effects);
  if (coordinates()) {
    CheckStalls(now, effects);
    Decide(effects);
    if (MayBeginSchedule()) ProposeSchedule(now, effects);
  }
  if (late_.empty()) return;
  effect::Count count;
  for (auto& late : late_) count.late.push_back(std::move(late.second));
  late_.clear();
  effects->push_back(std::move(count));
}

void Negotiator::Announce(Nanoseconds now, Effects* effects) {
  if (ready_.ids.empty() && ready_.requests.empty() && ready_.refusals.empty() && ready_.resent == 0) return;
  std::sort(ready_.ids.begin(), ready_.ids.end());
  Frame frame = std::exchange(ready_, MakeFrame(FrameType::kReady));
  frame.schedule = newest_schedule_;
  ++ready_frames_;
  effects->push_back(effect::Count{std::exchange(hits_, 0), std::exchange(misses_, 0), {}});
  if (coordinates())
    Receive(now, options_.me, frame, effects);
  else
    effects->push_back(effect::Send{0, std::move(frame)});
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
  execute.joined.resize(member_count(), false);
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
  const Request agreed = response.RequestOf(options_.me, member_count());
  return agreed.operation == own.operation && agreed.tensors == own.tensors && agreed.splits == own.splits;
}

// ---- coordinator ----

void Negotiator::Receive(Nanoseconds now, int member, const Frame& ready, Effects* effects) {
  std::vector<ResponseCache::Id> unknown;
  for (const Refusal& refusal : ready.refusals) Refuse(member, refusal, effects);
  if (IsStale(ready.schedule)) {  // but for its refusals: the member has taken the rest into the schedule
    if (schedule_ && !ready.refusals.empty()) Deviate(now, effects);
    return;
  }
  ReceiveIds(now, member, ready.ids, &unknown, effects);
  // A join counts once all that the member submitted before it has arrived.
  unanswered_[member] -= ready.resent;
  for (const Request& request : ready.requests) {
    if (request.operation == Operation::kJoin) {
      held_joins_[member] = request;
      continue;
    }
    Arrival arrival;
    arrival.request = request;
    Arrive(now, member, request.name, std::move(arrival), effects);
  }
  const bool answered = unanswered_[member] + static_cast<int>(unknown.size()) == 0;
  if (!held_joins_[member].name.empty() && answered)
    Join(member, std::exchange(held_joins_[member], Request()), effects);
  if (held_goodbyes_[member] && answered) {
    held_goodbyes_[member] = false;
    On(now, event::Left{member}, effects);
  }
  if (!unknown.empty()) AskAgain(member, unknown, effects);
}

void Negotiator::ReceiveIds(Nanoseconds now, int member, const std::vector<ResponseCache::Id>& ids,
                            std::vector<ResponseCache::Id>* unknown, Effects* effects) {
  for (ResponseCache::Id id : ids) {
    const Response* response = cache_.Find(id);
    if (response == nullptr) {
      unknown->push_back(id);
      continue;
    }
    Arrival arrival;
    arrival.id = id;
    const std::string name = response->request.name;
    Arrive(now, member, name, std::move(arrival), effects);
  }
}

void Negotiator::AskAgain(int member, const std::vector<ResponseCache::Id>& unknown, Effects* effects) {
  unanswered_[member] += static_cast<int>(unknown.size());
  if (member == options_.me) return Resend(unknown);
  Frame resend = MakeFrame(FrameType::kResend);
  resend.ids = unknown;
  effects->push_back(effect::Send{member, std::move(resend)});
}

void Negotiator::Arrive(Nanoseconds now, int member, const std::string& name, Arrival arrival, Effects* effects) {
  Verdict failed;
  if (TakeUndeliveredFailure(member, name, &failed.failure)) return Tell(member, std::move(failed), effects);
  Entry& entry = entries_[name];
  if (entry.arrivals.empty()) {
    entry.name = name;
    entry.present = MemberSet(member_count());
    entry.clock = stalls_.Start(now);
    entry.place = order_.insert(order_.end(), name);
  }
  if (entry.present.has(member)) return;  // members refuse a second one themselves; never count it twice
  entry.last = member;
  entry.last_but_one_at = std::exchange(entry.last_at, now);
  entry.present.Add(member);
  Arrival* same = entry.arrivals.empty() ? nullptr : &entry.arrivals.back();
  if (same != nullptr && same->id == arrival.id &&
      (arrival.id != ResponseCache::kNone || same->request == arrival.request)) {
    same->members.Add(member);
  } else {
    arrival.members = MemberSet(member_count());
    arrival.members.Add(member);
    if (arrival.id != ResponseCache::kNone)
      arrival.response = std::make_shared<const Response>(*cache_.Find(arrival.id));
    entry.arrivals.push_back(std::move(arrival));
  }
  CompleteIfReady(name, effects);
}

void Negotiator::Join(int member, const Request& request, Effects* effects) {
  joined_.Add(member);
  join_name_ = request.name;
  CancelOwed(member);
  CompleteAll(effects);
  if (joined_.size() < member_count()) return FailHopelessJoin(effects);
  Ready ready;
  ready.agreed.response.request = request;
  ready.agreed.response.result = options_.members[member];  // the last one
  ready_to_run_.push_back(std::move(ready));
  joined_.Clear();
}

// Without a member that has left, the others would wait for ever.
void Negotiator::FailHopelessJoin(Effects* effects) {
  std::vector<int> gone, waiting;
  for (int member = 0; member < member_count(); ++member) {
    if (joined_.has(member))
      waiting.push_back(options_.members[member]);
    else if (left_.has(member))
      gone.push_back(options_.members[member]);
  }
  if (gone.empty() || waiting.empty()) return;
  Verdict verdict;
  verdict.failure = {join_name_, StatusCode::kClosed,
                     "join '" + join_name_ + "': " + RanksText(gone) + " called shutdown() without it, but " +
                         RanksText(waiting) + " joined. All ranks must join before any shuts down."};
  for (int member = 0; member < member_count(); ++member)
    if (joined_.has(member)) Tell(member, verdict, effects);
  joined_.Clear();
}

void Negotiator::Refuse(int member, const Refusal& refusal, Effects* effects) {
  Refusal undelivered;
  if (TakeUndeliveredFailure(member, refusal.name, &undelivered))
    return;  // another member's refusal has ended this round of the name
  auto found = entries_.find(refusal.name);
  Entry entry;
  if (found != entries_.end()) {
    if (found->second.present.has(member)) return;
    entry = Take(found);
  } else {
    entry.name = refusal.name;
    entry.present = MemberSet(member_count());
  }
  entry.refused = member;
  FailEntry(entry, refusal, effects);
}

// The oldest failure that the member has not heard of, if there is one for that name.
bool Negotiator::TakeUndeliveredFailure(int member, const std::string& name, Refusal* failure) {
  auto debt = undelivered_failures_.find(name);
  if (debt == undelivered_failures_.end()) return false;
  auto& members = debt->second;
  auto found = std::find_if(members.begin(), members.end(), [&](const auto& owed) { return owed.first == member; });
  if (found == members.end()) return false;
  *failure = std::move(found->second);
  members.erase(found);
  if (members.empty()) undelivered_failures_.erase(debt);
  return true;
}

// The member has joined: all that it submitted before has arrived, so what it has not asked about it left out.
void Negotiator::CancelOwed(int member) {
  for (auto debt = undelivered_failures_.begin(); debt != undelivered_failures_.end();) {
    auto& members = debt->second;
    members.erase(
        std::remove_if(members.begin(), members.end(), [&](const auto& owed) { return owed.first == member; }),
        members.end());
    debt = members.empty() ? undelivered_failures_.erase(debt) : std::next(debt);
  }
}

// The member is gone: what it submitted and did not wait for cannot run without it.
void Negotiator::Withdraw(int member, Effects* effects) {
  for (const std::string& name : std::list<std::string>(order_)) {
    auto found = entries_.find(name);
    Entry& entry = found->second;
    entry.present.Remove(member);
    for (Arrival& arrival : entry.arrivals) arrival.members.Remove(member);
    if (entry.present.size() == 0) Take(found);
  }
  for (const Ready& ready : std::exchange(ready_to_run_, {})) {
    const Request& request = ready.agreed.response.request;
    Frame frame = MakeFrame(FrameType::kVerdicts);
    frame.verdicts.emplace_back();
    frame.verdicts[0].failure = {
        request.name, StatusCode::kClosed,
        Subject(request) + ": " + RanksText({options_.members[member]}) +
            " called shutdown() and left before it ran. Wait for operations before shutdown()."};
    Broadcast(frame, effects);
  }
}

Negotiator::Entry Negotiator::Take(Entries::iterator found) {
  Entry entry = std::move(found->second);
  entries_.erase(found);
  order_.erase(entry.place);
  return entry;
}

const Request& Negotiator::Entry::any() const {
  const Arrival& arrival =
      *std::find_if(arrivals.begin(), arrivals.end(), [](const Arrival& some) { return some.members.size() > 0; });
  return arrival.id == ResponseCache::kNone ? arrival.request : arrival.response->request;
}

void Negotiator::CompleteIfReady(const std::string& name, Effects* effects) {
  auto found = entries_.find(name);
  if (found == entries_.end()) return;
  // Every arrival comes here: what is missing is counted before anybody looks who it is.
  if (left_.size() == 0 && member_count() - found->second.present.size() > joined_.size()) return;
  std::vector<int> gone;
  bool waits = false;
  for (int member = 0; member < member_count(); ++member) {
    if (found->second.present.has(member) || joined_.has(member)) continue;
    if (left_.has(member))
      gone.push_back(options_.members[member]);
    else
      waits = true;
  }
  if (waits && gone.empty()) return;
  Entry entry = Take(found);
  if (gone.empty()) {
    Complete(std::move(entry), effects);
    return;
  }
  std::string text =
      Subject(entry.any()) + ": " + RanksText(gone) + " called shutdown() or ended without submitting it, but " +
      RanksText(Submitters(entry)) +
      " did. All ranks must submit the same operations; a rank with fewer batches calls join() at its end.";
  FailEntry(entry, {entry.name, StatusCode::kClosed, text}, effects);
}

void Negotiator::CompleteAll(Effects* effects) {
  for (const std::string& name : std::list<std::string>(order_)) CompleteIfReady(name, effects);
}

// Where members have joined, the last to join may have been waited for instead.
void Negotiator::NoteLast(const Entry& entry) {
  if (member_count() > 1 && joined_.size() == 0)
    NoteLast(entry.last, entry.last_at - entry.last_but_one_at, entry.name);
}

void Negotiator::NoteLast(int member, Nanoseconds waited, const std::string& name) {
  const int rank = options_.members[member];
  Late& late = late_[rank];
  late.rank = rank;
  ++late.times;
  late.total += waited;
  if (waited < late.longest) return;
  late.longest = waited;
  late.longest_name = name;
}

void Negotiator::Complete(Entry entry, Effects* effects) {
  NoteLast(entry);
  const ResponseCache::Id id = IdOfAll(entry);
  Ready ready;
  for (int member = 0; member < member_count() && entry.present.size() < member_count(); ++member)
    if (!entry.present.has(member)) ready.joined.push_back(member);
  if (id != ResponseCache::kNone && ready.joined.empty() && cache_.Find(id) != nullptr) {
    ready.agreed = {id, true, *cache_.Find(id)};
    ready_to_run_.push_back(std::move(ready));
    return;
  }
  std::deque<Request> made;
  const std::vector<const Request*> requests = RequestsOf(entry, &made);
  Response& response = ready.agreed.response;
  Status status = Match(requests, options_.members, options_.hosts, &response);
  if (!status.ok()) {
    FailEntry(entry, {entry.name, status.code(), status.message()}, effects);
    return;
  }
  if (response.request.operation == Operation::kAddProcessSet) response.result = next_process_set_++;
  // Control operations are rare, and with joined members the rows are not those of the next time.
  const bool data = ringtrain::Find(response.request.operation)->output != Output::kNone;
  if (ready.joined.empty() && response.request.cacheable && data && cache_.capacity() > 0) ready.agreed.id = next_id_++;
  ready_to_run_.push_back(std::move(ready));
}

// Under which all have submitted it, or kNone.
ResponseCache::Id Negotiator::IdOfAll(const Entry& entry) {
  const ResponseCache::Id id = entry.arrivals[0].id;
  for (const Arrival& arrival : entry.arrivals)
    if (arrival.id != id) return ResponseCache::kNone;
  return id;
}

// By member. Those that came by an id are made here, and kept in *made.
std::vector<const Request*> Negotiator::RequestsOf(const Entry& entry, std::deque<Request>* made) const {
  std::vector<const Request*> requests(options_.members.size(), nullptr);
  for (const Arrival& arrival : entry.arrivals) {
    arrival.members.ForEach([&](int member) {
      const bool by_id = arrival.id != ResponseCache::kNone;
      if (by_id) made->push_back(arrival.response->RequestOf(member, member_count()));
      requests[static_cast<size_t>(member)] = by_id ? &made->back() : &arrival.request;
    });
  }
  return requests;
}

// Members that have not submitted yet hear of it when they do.
void Negotiator::FailEntry(const Entry& entry, const Refusal& failure, Effects* effects) {
  for (int member = 0; member < member_count(); ++member) {
    if (entry.present.has(member)) {
      Verdict verdict;
      verdict.failure = failure;
      Tell(member, std::move(verdict), effects);
    } else if (entry.refused != member && !joined_.has(member) && !left_.has(member)) {
      undelivered_failures_[entry.name].emplace_back(member, failure);
    }
  }
}

void Negotiator::Tell(int member, Verdict verdict, Effects* effects) {
  Frame frame = MakeFrame(FrameType::kVerdicts);
  frame.verdicts.push_back(std::move(verdict));
  if (member == options_.me)
    Apply(frame, effects);
  else
    effects->push_back(effect::Send{member, std::move(frame)});
}

void Negotiator::Decide(Effects* effects) {
  while (!ready_to_run_.empty() && batches_under_way_ < kMaxBatches) {
    // Operations with other joined members cannot share a batch: fuse within the run that starts the queue.
    std::vector<const Response*> run;
    for (const Ready& ready : ready_to_run_) {
      if (ready.joined != ready_to_run_[0].joined) break;
      run.push_back(&ready.agreed.response);
    }
    Start(Fuse(run, options_.fusion_threshold_bytes)[0], effects);
  }
}

// Takes these out of the queue and tells every member to run them. A frame for each batch: applying it may evict from
// the cache what the next one would have named by id.
void Negotiator::Start(const std::vector<int>& batch, Effects* effects) {
  Verdict verdict;
  verdict.joined = ready_to_run_[batch[0]].joined;
  for (int index : batch) {
    Agreed& agreed = ready_to_run_[index].agreed;
    if (agreed.cached && cache_.Find(agreed.id) == nullptr) {
      agreed.cached = false;  // evicted since it became ready: it travels in full
      agreed.id = ResponseCache::kNone;
    }
    verdict.batch.push_back(std::move(agreed));
  }
  for (auto index = batch.rbegin(); index != batch.rend(); ++index) ready_to_run_.erase(ready_to_run_.begin() + *index);
  ++batches_under_way_;
  if (options_.schedules) NoteRepetition(verdict);
  Frame frame = MakeFrame(FrameType::kVerdicts);
  frame.verdicts.push_back(std::move(verdict));
  Broadcast(frame, effects);
}

void Negotiator::Broadcast(const Frame& frame, Effects* effects) {
  SendToOthers(frame, effects);
  Apply(frame, effects);
}

void Negotiator::SendToOthers(const Frame& frame, Effects* effects) const {
  const bool differs = DiffersByMember(frame);
  for (int member = 0; member < member_count(); ++member)
    if (member != options_.me) effects->push_back(effect::Send{member, differs ? FrameFor(member, frame) : frame});
}

bool Negotiator::DiffersByMember(const Frame& frame) {
  for (const Verdict& verdict : frame.verdicts)
    for (const Agreed& agreed : verdict.batch)
      if (!agreed.cached && agreed.response.exchanged != nullptr) return true;
  return false;
}

Frame Negotiator::FrameFor(int member, Frame frame) const {
  for (Verdict& verdict : frame.verdicts)
    for (Agreed& agreed : verdict.batch)
      if (!agreed.cached) agreed.response = agreed.response.For(member, member_count());
  return frame;
}

// ---- stalls ----

bool Negotiator::IsMissing(const Entry& entry, int member) const {
  return !entry.present.has(member) && !joined_.has(member);
}

std::vector<int> Negotiator::Missing(const Entry& entry) const {
  std::vector<int> ranks;
  for (int member = 0; member < member_count(); ++member)
    if (IsMissing(entry, member)) ranks.push_back(options_.members[member]);
  return ranks;
}

std::vector<int> Negotiator::Submitters(const Entry& entry) const {
  std::vector<int> ranks;
  for (int member = 0; member < member_count(); ++member)
    if (entry.present.has(member)) ranks.push_back(options_.members[member]);
  return ranks;
}

Nanoseconds Negotiator::DueAt(const Entry& entry) const {
  return stalls_.DueAt(entry.clock, [&](int member) { return IsMissing(entry, member); });
}

// In order, the oldest entry stands for all.
Nanoseconds Negotiator::next_timer() const {
  if (schedule_) return schedule_->due();
  if (!coordinates() || order_.empty()) return kNever;
  Nanoseconds due = DueAt(entries_.at(order_.front()));
  if (!stalls_.DueInOrder())
    for (const std::string& name : order_) due = std::min(due, DueAt(entries_.at(name)));
  return due;
}

void Negotiator::CheckStalls(Nanoseconds now, Effects* effects) {
  if (next_timer() > now) return;
  for (const std::string& name : std::list<std::string>(order_)) {
    auto found = entries_.find(name);
    Entry& entry = found->second;
    if (now < DueAt(entry)) continue;
    const StallWatch::Verdict verdict = stalls_.Judge(
        now, {Subject(entry.any()), Submitters(entry), Missing(entry)},
        [&](int member) { return IsMissing(entry, member); }, &entry.clock);
    if (verdict.give_up)
      GiveUp(Take(found), verdict.text, effects);
    else
      Report(entry, verdict.text, effects);
  }
  stalls_.Forget(now);
}

void Negotiator::GiveUp(const Entry& entry, const std::string& text, Effects* effects) {
  FailEntry(entry, {entry.name, StatusCode::kTimeout, text, Missing(entry)}, effects);
}

// Warns here, and has each missing member show where its Python is.
void Negotiator::Report(const Entry& entry, const std::string& text, Effects* effects) {
  effects->push_back(effect::Warn{text});
  for (int member = 0; member < member_count(); ++member) {
    if (!IsMissing(entry, member)) continue;
    Frame frame = MakeFrame(FrameType::kStalled);
    frame.text = Subject(entry.any());
    effects->push_back(effect::Send{member, std::move(frame)});
  }
}

}  // namespace ringtrain
