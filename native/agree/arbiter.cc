#include "agree/arbiter.h"

#include <algorithm>

#include "agree/fusion.h"
#include "agree/match.h"
#include "base/ranks.h"

namespace ringtrain {
namespace {

// Two batches overlap one's copies with the other's wire; more would only take operations away from fusion.
constexpr int kMaxBatches = 2;

bool DiffersByMember(const Frame& frame) {
  for (const Verdict& verdict : frame.verdicts)
    for (const Agreed& agreed : verdict.batch)
      if (!agreed.cached && agreed.response.exchanged != nullptr) return true;
  return false;
}

Frame FrameFor(int member, int members, Frame frame) {
  for (Verdict& verdict : frame.verdicts)
    for (Agreed& agreed : verdict.batch)
      if (!agreed.cached) agreed.response = agreed.response.For(member, members);
  return frame;
}

}  // namespace

Arbiter::Arbiter(const NegotiatorOptions& options, const ResponseCache& cache, OwnMember* own)
    : options_(options),
      cache_(cache),
      own_(own),
      joined_(member_count()),
      left_(member_count()),
      stalls_(options_.stall_warning, options_.stall_abort),
      unanswered_(options_.members.size(), 0),
      held_joins_(options_.members.size()),
      held_goodbyes_(options_.members.size(), false) {}

// ---- events ----

void Arbiter::Refuse(int member, const std::vector<Refusal>& refusals, Effects* effects) {
  for (const Refusal& refusal : refusals) Refuse(member, refusal, effects);
}

bool Arbiter::Receive(Nanoseconds now, int member, const Frame& ready, Effects* effects) {
  std::vector<ResponseCache::Id> unknown;
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
  const bool left = held_goodbyes_[member] && answered;
  if (left) held_goodbyes_[member] = false;
  if (!unknown.empty()) AskAgain(member, unknown, effects);
  return left;
}

// A coordinator that has left still decides until it is gone: what it submitted itself may yet run.
void Arbiter::Left(int member, bool gone, Effects* effects) {
  if (unanswered_[member] > 0 && !gone) {  // something that it submitted before has not arrived
    held_goodbyes_[member] = true;
    return;
  }
  left_.Add(member);
  if (gone) Withdraw(member, effects);
  CompleteAll(effects);
  FailHopelessJoin(effects);
}

void Arbiter::ReceiveIds(Nanoseconds now, int member, const std::vector<ResponseCache::Id>& ids,
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

void Arbiter::AskAgain(int member, const std::vector<ResponseCache::Id>& unknown, Effects* effects) {
  unanswered_[member] += static_cast<int>(unknown.size());
  Frame resend = options_.MakeFrame(FrameType::kResend);
  resend.ids = unknown;
  if (member == options_.me) return own_->Hear(resend, effects);
  effects->push_back(effect::Send{member, std::move(resend)});
}

void Arbiter::Arrive(Nanoseconds now, int member, const std::string& name, Arrival arrival, Effects* effects) {
  Verdict failed;
  if (undelivered_.Take(member, name, &failed.failure)) return Tell(member, std::move(failed), effects);
  given_up_.remove_if([&](const Entry& entry) { return entry.present.has(member); });  // it waits no longer
  Entry& entry = entries_[name];
  if (entry.arrivals.empty()) {
    entry.name = name;
    entry.present = MemberSet(member_count());
    entry.clock = stalls_.Start(now);
    entry.place = order_.insert(order_.end(), name);
  }
  if (entry.present.has(member)) return;  // members refuse a second one themselves; never count it twice
  entry.Add(now, member, member_count(), std::move(arrival), cache_);
  CompleteIfReady(name, effects);
}

void Arbiter::Join(int member, const Request& request, Effects* effects) {
  joined_.Add(member);
  join_name_ = request.name;
  undelivered_.Cancel(member);
  CompleteAll(effects);
  if (joined_.size() < member_count()) return FailHopelessJoin(effects);
  Ready ready;
  ready.agreed.response.request = request;
  ready.agreed.response.result = options_.members[member];  // the last one
  ready_to_run_.push_back(std::move(ready));
  joined_.Clear();
}

// Without a member that has left, the others would wait for ever.
void Arbiter::FailHopelessJoin(Effects* effects) {
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

void Arbiter::Refuse(int member, const Refusal& refusal, Effects* effects) {
  Refusal undelivered;
  if (undelivered_.Take(member, refusal.name, &undelivered))
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

// The member is gone: what it submitted and did not wait for cannot run without it.
void Arbiter::Withdraw(int member, Effects* effects) {
  for (const std::string& name : std::list<std::string>(order_)) {
    auto found = entries_.find(name);
    Entry& entry = found->second;
    entry.present.Remove(member);
    for (Arrival& arrival : entry.arrivals) arrival.members.Remove(member);
    if (entry.present.size() == 0) Take(found);
  }
  for (const Ready& ready : std::exchange(ready_to_run_, {})) {
    const Request& request = ready.agreed.response.request;
    Frame frame = options_.MakeFrame(FrameType::kVerdicts);
    frame.verdicts.emplace_back();
    frame.verdicts[0].failure = {
        request.name, StatusCode::kClosed,
        options_.Subject(request) + ": " + RanksText({options_.members[member]}) +
            " called shutdown() and left before it ran. Wait for operations before shutdown()."};
    Broadcast(frame, effects);
  }
}

Entry Arbiter::Take(Entries::iterator found) {
  Entry entry = std::move(found->second);
  entries_.erase(found);
  order_.erase(entry.place);
  return entry;
}

void Arbiter::CompleteIfReady(const std::string& name, Effects* effects) {
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
      options_.Subject(entry.any()) + ": " + RanksText(gone) +
      " called shutdown() or ended without submitting it, but " + RanksText(Submitters(entry)) +
      " did. All ranks must submit the same operations; a rank with fewer batches calls join() at its end.";
  FailEntry(entry, {entry.name, StatusCode::kClosed, text}, effects);
}

void Arbiter::CompleteAll(Effects* effects) {
  for (const std::string& name : std::list<std::string>(order_)) CompleteIfReady(name, effects);
}

void Arbiter::NoteLast(int member, Nanoseconds waited, const std::string& name) {
  const int rank = options_.members[member];
  Late& late = late_[rank];
  late.rank = rank;
  ++late.times;
  late.total += waited;
  if (waited < late.longest) return;
  late.longest = waited;
  late.longest_name = name;
}

void Arbiter::Complete(Entry entry, Effects* effects) {
  // Where members have joined, the last to join may have been waited for instead.
  if (member_count() > 1 && joined_.size() == 0)
    NoteLast(entry.last, entry.last_at - entry.last_but_one_at, entry.name);
  const ResponseCache::Id id = entry.id_of_all();
  Ready ready;
  for (int member = 0; member < member_count() && entry.present.size() < member_count(); ++member)
    if (!entry.present.has(member)) ready.joined.push_back(member);
  if (id != ResponseCache::kNone && ready.joined.empty() && cache_.Find(id) != nullptr) {
    ready.agreed = {id, true, *cache_.Find(id)};
    ready_to_run_.push_back(std::move(ready));
    return;
  }
  std::deque<Request> made;
  const std::vector<const Request*> requests = entry.Requests(member_count(), &made);
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

// Members that have not submitted yet hear of it when they do.
void Arbiter::FailEntry(const Entry& entry, const Refusal& failure, Effects* effects) {
  for (int member = 0; member < member_count(); ++member) {
    if (entry.present.has(member)) {
      Verdict verdict;
      verdict.failure = failure;
      Tell(member, std::move(verdict), effects);
    } else if (entry.refused != member && !joined_.has(member) && !left_.has(member)) {
      undelivered_.Add(entry.name, member, failure);
    }
  }
}

void Arbiter::Tell(int member, Verdict verdict, Effects* effects) {
  Frame frame = options_.MakeFrame(FrameType::kVerdicts);
  frame.verdicts.push_back(std::move(verdict));
  if (member == options_.me)
    own_->Hear(frame, effects);
  else
    effects->push_back(effect::Send{member, std::move(frame)});
}

void Arbiter::Decide(Effects* effects) {
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
void Arbiter::Start(const std::vector<int>& batch, Effects* effects) {
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
  Frame frame = options_.MakeFrame(FrameType::kVerdicts);
  frame.verdicts.push_back(std::move(verdict));
  Broadcast(frame, effects);
}

void Arbiter::Broadcast(const Frame& frame, Effects* effects) {
  SendToOthers(frame, effects);
  own_->Hear(frame, effects);
}

void Arbiter::SendToOthers(const Frame& frame, Effects* effects) const {
  const bool differs = DiffersByMember(frame);
  for (int member = 0; member < member_count(); ++member)
    if (member != options_.me)
      effects->push_back(effect::Send{member, differs ? FrameFor(member, member_count(), frame) : frame});
}

// ---- stalls ----

bool Arbiter::IsMissing(const Entry& entry, int member) const {
  return !entry.present.has(member) && !joined_.has(member);
}

std::vector<int> Arbiter::Missing(const Entry& entry) const {
  std::vector<int> ranks;
  for (int member = 0; member < member_count(); ++member)
    if (IsMissing(entry, member)) ranks.push_back(options_.members[member]);
  return ranks;
}

std::vector<int> Arbiter::Submitters(const Entry& entry) const {
  std::vector<int> ranks;
  for (int member = 0; member < member_count(); ++member)
    if (entry.present.has(member)) ranks.push_back(options_.members[member]);
  return ranks;
}

// Whether its submitters wait for ranks that wait for them, elsewhere, and are more; of equal sides that of the lowest
// rank counts more. Then they are the ones that take another way, and the ranks that they miss do not hang.
bool Arbiter::IsOutnumbered(const Entry& entry) const {
  const auto lowest = [&](const Entry& side) {
    for (int member = 0; member < member_count(); ++member)
      if (side.present.has(member)) return member;
    return member_count();
  };
  const auto waits_for = [&](const Entry& one, const Entry& other) {
    for (int member = 0; member < member_count(); ++member)
      if (IsMissing(one, member) && other.present.has(member)) return true;
    return false;
  };
  const auto counts_more = [&](const Entry& other) {
    const int size = entry.present.size(), others = other.present.size();
    return others > size || (others == size && lowest(other) < lowest(entry));
  };
  const auto outnumbers = [&](const Entry& other) {
    return waits_for(entry, other) && waits_for(other, entry) && counts_more(other);
  };
  return std::any_of(given_up_.begin(), given_up_.end(), outnumbers) ||
         std::any_of(entries_.begin(), entries_.end(), [&](const auto& named) { return outnumbers(named.second); });
}

Nanoseconds Arbiter::DueAt(const Entry& entry) const {
  return stalls_.DueAt(entry.clock, [&](int member) { return IsMissing(entry, member); });
}

// In order, the oldest entry stands for all.
Nanoseconds Arbiter::next_timer() const {
  if (order_.empty()) return kNever;
  Nanoseconds due = DueAt(entries_.at(order_.front()));
  if (!stalls_.DueInOrder())
    for (const std::string& name : order_) due = std::min(due, DueAt(entries_.at(name)));
  return due;
}

void Arbiter::CheckStalls(Nanoseconds now, Effects* effects) {
  for (const std::string& name : std::list<std::string>(order_)) {
    auto found = entries_.find(name);
    Entry& entry = found->second;
    if (now < DueAt(entry)) continue;
    const StallWatch::Verdict verdict = stalls_.Judge(
        now, {options_.Subject(entry.any()), Submitters(entry), Missing(entry)},
        [&](int member) { return IsMissing(entry, member); }, &entry.clock);
    if (!verdict.give_up) {
      Report(entry, verdict.text, effects);
      continue;
    }
    const std::vector<int> missing = IsOutnumbered(entry) ? std::vector<int>() : Missing(entry);
    const Entry& given_up = given_up_.emplace_back(Take(found));
    FailEntry(given_up, {given_up.name, StatusCode::kTimeout, verdict.text, missing}, effects);
  }
  stalls_.Forget(now);
}

// Warns here, and has each missing member show where its Python is.
void Arbiter::Report(const Entry& entry, const std::string& text, Effects* effects) {
  effects->push_back(effect::Warn{text});
  for (int member = 0; member < member_count(); ++member) {
    if (!IsMissing(entry, member)) continue;
    Frame frame = options_.MakeFrame(FrameType::kStalled);
    frame.text = options_.Subject(entry.any());
    effects->push_back(effect::Send{member, std::move(frame)});
  }
}

// ---- schedules ----

void Arbiter::NoteRepetition(const Verdict& verdict) {
  std::vector<ResponseCache::Id> ids;
  for (const Agreed& agreed : verdict.batch)
    if (agreed.cached) ids.push_back(agreed.id);
  if (ids.size() == verdict.batch.size() && verdict.joined.empty())
    repetition_.Note(ids);
  else
    repetition_.Forget();
}

bool Arbiter::FindsCycle() const {
  if (!repetition_.found() || member_count() == 1) return false;
  const auto asked = [](int count) { return count > 0; };
  if (!ready_to_run_.empty() || !undelivered_.empty() || joined_.size() + left_.size() > 0 ||
      std::any_of(unanswered_.begin(), unanswered_.end(), asked))
    return false;
  std::vector<ResponseCache::Id> ids;
  for (const auto& batch : repetition_.cycle()) ids.insert(ids.end(), batch.begin(), batch.end());
  std::sort(ids.begin(), ids.end());
  const auto known = [&](ResponseCache::Id id) { return cache_.Find(id) != nullptr; };
  const auto belongs = [&](const std::string& name) {
    return std::binary_search(ids.begin(), ids.end(), cache_.IdOf(name));
  };
  return std::all_of(ids.begin(), ids.end(), known) && std::all_of(order_.begin(), order_.end(), belongs);
}

std::vector<std::vector<ResponseCache::Id>> Arbiter::TakeCycle() {
  entries_.clear();  // the members have it all
  order_.clear();
  unanswered_.assign(options_.members.size(),
                     1);  // until each has come back from it: what it says besides comes behind
  return repetition_.cycle();
}

void Arbiter::TellLate(Effects* effects) {
  if (late_.empty()) return;
  effect::Count count;
  for (auto& late : late_) count.late.push_back(std::move(late.second));
  late_.clear();
  effects->push_back(std::move(count));
}

}  // namespace ringtrain
