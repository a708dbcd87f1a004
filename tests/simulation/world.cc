#include "world.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>

namespace ringtrain {
namespace simulation {
namespace {

constexpr Nanoseconds kDetection = 15 * kSecond;        // a crash is known everywhere by then
constexpr Nanoseconds kLongest = 7 * 24 * 3600 * kSecond;  // of a plan, by far
constexpr int kSlowness = 30;
constexpr int64_t kMostEvents = 20000;  // for each rank

uint64_t Stream(int number) { return static_cast<uint64_t>(number); }

}  // namespace

SimulatedWorld::SimulatedWorld(const Plan& plan, bool trace) : plan_(plan), trace_(trace), judge_(plan), random_({plan.seed, 5}) {
  for (int rank : plan.ranks) hosts_[rank].rank = std::make_unique<SimulatedRank>(plan, rank, &judge_, this);
  for (const Fault& fault : plan.faults) {
    Host& host = hosts_.at(fault.rank);
    if (fault.kind == Fault::kSlow) host.slowness = kSlowness;
    if (fault.kind == Fault::kLateStart) host.frozen_until = fault.duration;
    if (fault.kind == Fault::kFreeze) Add({fault.at, 0, kFreeze, fault.rank, 0, 0, fault.duration});
    if (fault.kind == Fault::kCrash) Add({fault.at, 0, kCrash, fault.rank});
  }
  for (int rank : plan.ranks) CallProgram(rank, 0);
}

Result SimulatedWorld::Run() {
  while (!heap_.empty() && judge_.violation().empty()) {
    Happening happening = heap_.top();
    heap_.pop();
    now_ = happening.at;
    Host& host = hosts_.at(happening.rank);
    if (host.crashed_at != kNever) continue;
    if (happening.kind != kFreeze && happening.kind != kCrash && now_ < host.frozen_until) {
      happening.at = host.frozen_until;  // the number stays: what came first is done first
      heap_.push(std::move(happening));
      continue;
    }
    Note(happening);
    Happen(happening);
    SetTimer(happening.rank);
    if (now_ > kLongest || result_.events > kMostEvents * static_cast<int64_t>(plan_.ranks.size() + 10)) judge_.Violate("the world goes on for ever");
  }
  if (judge_.violation().empty()) CheckAllEnded();
  if (judge_.violation().empty()) judge_.End();
  result_.violation = judge_.violation();
  return result_;
}

void SimulatedWorld::Happen(Happening& happening) {
  Host& host = hosts_.at(happening.rank);
  switch (happening.kind) {
    case kFrame: {
      const Host& sender = hosts_.at(happening.other);
      const bool lost = sender.crashed_at != kNever && happening.made + plan_.link_delay / 2 >= sender.crashed_at;
      if (!lost) host.rank->Receive(happening.other, std::move(happening.bytes));
      return;
    }
    case kStep:
      if (host.step_at <= now_) host.step_at = kNever;
      return host.rank->Step();
    case kProgram:
      if (host.program_at <= now_) host.program_at = kNever;
      return host.rank->RunProgram();
    case kTimer:
      if (host.timer <= now_) host.timer = kNever;
      return host.rank->Step();
    case kBatchEnd:
      return host.rank->EndBatch(happening.other);
    case kFreeze:
      host.frozen_until = std::max(host.frozen_until, now_ + happening.duration);
      return;
    case kCrash:
      return Crash(happening.rank);
    case kAbort:
      return host.rank->Abort();
  }
}

// A rank that has closed cannot crash any more.
void SimulatedWorld::Crash(int rank) {
  if (hosts_.at(rank).rank->closed()) return;
  hosts_.at(rank).rank->Abort();
  hosts_.at(rank).crashed_at = now_;
  for (int other : plan_.ranks)
    if (other != rank) Add({now_ + random_.Between(0, kDetection), 0, kAbort, other});
}

void SimulatedWorld::CheckAllEnded() {
  std::string text;
  for (const auto& [rank, host] : hosts_)
    if (host.crashed_at == kNever && !host.rank->ended()) text += (text.empty() ? "" : "; ") + host.rank->Whereabouts();
  if (!text.empty()) judge_.Violate("nothing moves any more, but " + text);
}

// ---- what ranks ask for ----

void SimulatedWorld::Add(Happening happening) {
  happening.number = ++number_;
  heap_.push(std::move(happening));
}

void SimulatedWorld::Send(int from, int to, std::string bytes) {
  auto link = links_.find({from, to});
  if (link == links_.end()) link = links_.emplace(std::make_pair(from, to), Random{plan_.seed, 6, Stream(from), Stream(to)}).first;
  Random& random = link->second.random;
  const Nanoseconds most = random.OneIn(20) ? 10 * plan_.link_delay : plan_.link_delay;
  const Nanoseconds delay = from == to ? 0 : random.Between(0, most);
  link->second.last = std::max(link->second.last + 1, now_ + delay);
  Add({link->second.last, 0, kFrame, to, from, now_, 0, std::move(bytes)});
}

// One call under way is enough, if it comes in time.
void SimulatedWorld::Call(Kind kind, int rank, Nanoseconds delay, Nanoseconds* called) {
  const Nanoseconds at = now_ + delay;
  if (*called <= at) return;
  *called = at;
  Add({at, 0, kind, rank});
}

void SimulatedWorld::CallStep(int rank, Nanoseconds delay) {
  Host& host = hosts_.at(rank);
  if (delay >= kSecond) return Add({now_ + delay, 0, kStep, rank});
  Call(kStep, rank, delay * host.slowness, &host.step_at);
}

void SimulatedWorld::CallProgram(int rank, Nanoseconds delay) {
  Host& host = hosts_.at(rank);
  if (delay >= kSecond) return Add({now_ + delay, 0, kProgram, rank});
  Call(kProgram, rank, delay * host.slowness, &host.program_at);
}

void SimulatedWorld::BeginBatch(int rank, int set, size_t index, const std::vector<int>& members) {
  std::set<int>& begun = batches_[{set, index}];
  begun.insert(rank);
  if (begun.size() < members.size()) return;
  for (int member : members) {
    Nanoseconds& last = batch_ends_[{member, set}];
    last = std::max(last + 1, now_ + random_.Between(0, plan_.batch_delay));
    Add({last, 0, kBatchEnd, member, set});
  }
}

bool SimulatedWorld::PassesFence(int rank, int fence) {
  std::set<int>& come = fences_[fence];
  const bool last = come.insert(rank).second && come.size() == plan_.ranks.size();
  if (last)
    for (int other : plan_.ranks)
      if (other != rank) CallProgram(other, 0);
  return come.size() == plan_.ranks.size();
}

void SimulatedWorld::SetTimer(int rank) {
  Host& host = hosts_.at(rank);
  if (host.crashed_at != kNever) return;
  const Nanoseconds due = host.rank->next_timer();
  if (due == kNever || due >= host.timer) return;
  host.timer = std::max(due, now_ + 1);
  Add({host.timer, 0, kTimer, rank});
}

// ---- the record ----

void SimulatedWorld::Note(const Happening& happening) {
  static const char* const kNames[] = {"frame", "step", "program", "timer", "batch end", "freeze", "crash", "abort"};
  uint64_t digest = Mix({result_.digest, static_cast<uint64_t>(happening.at), happening.kind, Stream(happening.rank), Stream(happening.other)});
  for (char byte : happening.bytes) digest = digest * 0x100000001b3 ^ static_cast<uint8_t>(byte);
  result_.digest = digest;
  ++result_.events;
  if (!trace_) return;
  std::fprintf(stderr, "%12.6f rank %d: %s", static_cast<double>(happening.at) / 1e9, happening.rank, kNames[happening.kind]);
  if (happening.kind == kFrame) std::fprintf(stderr, " of %zu bytes from rank %d", happening.bytes.size(), happening.other);
  std::fprintf(stderr, "\n");
}

Result Simulate(const Plan& plan, bool trace) { return SimulatedWorld(plan, trace).Run(); }

}  // namespace simulation
}  // namespace ringtrain
