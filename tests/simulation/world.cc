#include "world.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>

#include "faults.h"

namespace ringtrain {
namespace simulation {
namespace {

constexpr Nanoseconds kStill = 1500 * kSecond;  // longer than any stall or delay of a plan lasts
constexpr int kSlowness = 30;
constexpr int64_t kMaxEvents = 100000;  // for each rank

uint64_t Stream(int number) { return static_cast<uint64_t>(number); }

World WorldOf(const Plan& plan) {
  World world;
  world.size = static_cast<int>(plan.ranks.size());
  const size_t ranks = static_cast<size_t>(plan.ranks.back()) + 1;  // some of them may have been left out
  world.host_of.assign(ranks, -1);
  world.local_rank_of.assign(ranks, -1);
  world.host_names.resize(ranks);
  std::map<int, int> place_of;  // of the plan's hosts in the world's
  for (int rank : plan.ranks) {
    const int host = place_of.emplace(plan.host_of.at(rank), static_cast<int>(world.hosts.size())).first->second;
    if (host == static_cast<int>(world.hosts.size())) world.hosts.emplace_back();
    world.host_of[rank] = host;
    world.local_rank_of[rank] = static_cast<int>(world.hosts[host].size());
    world.hosts[host].push_back(rank);
    world.host_names[rank] = plan.HostName(rank);
  }
  return world;
}

}  // namespace

SimulatedWorld::SimulatedWorld(const Plan& plan, bool trace)
    : plan_(plan),
      trace_(trace),
      judge_(plan),
      random_({plan.seed, 5}),
      world_(WorldOf(plan)),
      lives_(world_.host_of.size()) {
  for (int rank : plan.ranks) {
    world_.rank = rank;
    processes_[rank].rank = std::make_unique<SimulatedRank>(plan, rank, &judge_, this);
  }
  for (size_t place = 0; place < plan.faults.size(); ++place) {
    const Fault& fault = plan.faults[place];
    static const std::map<Fault::Kind, Kind> kinds = {{Fault::kFreeze, kFreeze}, {Fault::kLateStart, kFreeze},
                                                      {Fault::kCrash, kCrash},   {Fault::kRaise, kRaise},
                                                      {Fault::kCut, kCut},       {Fault::kLoss, kLoss}};
    if (fault.kind == Fault::kSlow) processes_.at(fault.ranks[0]).slowness = kSlowness;
    if (fault.kind == Fault::kLateStart) processes_.at(fault.ranks[0]).frozen_until = fault.duration;
    if (fault.kind == Fault::kSlow || fault.when_told) continue;
    for (int rank : fault.ranks) {
      Add({fault.at + Jitter(plan, fault, rank), 0, kinds.at(fault.kind), rank, static_cast<int>(place)});
      if (fault.kind == Fault::kCut || fault.kind == Fault::kLoss) break;
    }
  }
  for (int rank : plan.ranks) {
    CallStep(rank, 0);
    CallProgram(rank, 0);
  }
}

Result SimulatedWorld::Run() {
  while (!heap_.empty() && judge_.violation().empty() && now_ - last_moved_ < kStill) {
    Happening happening = heap_.top();
    heap_.pop();
    now_ = happening.at;
    world_.rank = happening.rank;
    Process& process = processes_.at(happening.rank);
    if (happening.kind < kFreeze) {
      const Nanoseconds cut_until = happening.kind == kFrame ? CutUntil(happening.other, happening.rank) : 0;
      const bool lost = happening.kind == kFrame && !happening.held && IsLost(happening.other, happening.rank);
      if (process.crashed_at != kNever || cut_until >= kForGood || lost) continue;
      const Nanoseconds held_until = std::max(process.frozen_until, cut_until);
      if (now_ < held_until) {
        happening.at = held_until;  // the number stays: what came first is done first
        happening.held = cut_until <= now_;
        heap_.push(std::move(happening));
        continue;
      }
    }
    Note(happening);
    Happen(happening);
    SetTimer(happening.rank);
    if (result_.events > kMaxEvents * static_cast<int64_t>(plan_.ranks.size() + 10))
      judge_.Violate("the world goes on for ever");
  }
  if (judge_.violation().empty()) CheckAllEnded();
  if (judge_.violation().empty()) judge_.End();
  result_.violation = judge_.violation();
  return result_;
}

void SimulatedWorld::Happen(Happening& happening) {
  Process& process = processes_.at(happening.rank);
  if (happening.kind == kProgram || happening.kind == kBatchEnd || happening.kind >= kFreeze) last_moved_ = now_;
  switch (happening.kind) {
    case kFrame: {
      const Process& sender = processes_.at(happening.other);
      const bool lost = sender.crashed_at != kNever && happening.made + plan_.link_delay / 2 >= sender.crashed_at;
      if (!lost) process.rank->Receive(happening.other, std::move(happening.bytes));
      return;
    }
    case kLostPeer:
      return process.rank->LosePeer(happening.other, kLossText);
    case kStep:
      if (process.step_at <= now_) process.step_at = kNever;
      return process.rank->Step();
    case kProgram:
      if (process.program_at <= now_) process.program_at = kNever;
      return process.rank->RunProgram();
    case kTimer:
      if (process.timer <= now_) process.timer = kNever;
      return process.rank->Step();
    case kBatchEnd:
      return process.rank->EndBatch(happening.other);
    case kDeadline:
      return CheckDeadline(plan_.faults[static_cast<size_t>(happening.other)], happening.woken);
    default:
      return Strike(happening);
  }
}

// ---- faults ----

// A rank that has ended cannot come to harm any more.
void SimulatedWorld::Strike(const Happening& happening) {
  const Fault& fault = plan_.faults[static_cast<size_t>(happening.other)];
  Process& process = processes_.at(happening.rank);
  if (process.crashed_at != kNever || (process.rank->ended() && fault.kind != Fault::kCut)) return;
  if (happening.kind == kFreeze) process.frozen_until = std::max(process.frozen_until, now_ + fault.duration);
  if (happening.kind == kRaise && !process.rank->Raise()) return;
  if (happening.kind == kLoss && !LoseConnections(fault)) return;
  if (happening.kind == kCrash) {
    process.crashed_at = now_;
    life(happening.rank).ended = life(happening.rank).begun;
    judge_.Crashed(happening.rank);
    if (plan_.wire_tells) LoseConnectionsWith(happening.rank);
  }
  if (!struck_.insert(happening.other).second || !IsDeadly(plan_, fault)) return;
  judge_.Struck(fault, now_);
  Add({now_ + TimeToEnd(plan_, fault, KernelTells(fault) || WireTells(fault)), 0, kDeadline, happening.rank,
       happening.other});
  if (fault.kind == Fault::kFreeze || fault.kind == Fault::kLateStart)
    Add({now_ + fault.duration + TimeToEndAfterWaking(plan_), 0, kDeadline, happening.rank, happening.other, 0, true});
}

// Some rank of the same host is there to see that the process has ended.
bool SimulatedWorld::KernelTells(const Fault& fault) const {
  if (fault.kind != Fault::kCrash || fault.ranks.size() > 1 || !lives_[static_cast<size_t>(fault.ranks[0])].ended)
    return false;
  return std::any_of(processes_.begin(), processes_.end(), [&](const auto& entry) {
    return plan_.host_of.at(entry.first) == plan_.host_of.at(fault.ranks[0]) && entry.second.crashed_at == kNever &&
           !entry.second.rank->ended() && !CrashesSoon(entry.first);
  });
}

// Before it looks again, perhaps.
bool SimulatedWorld::CrashesSoon(int rank) const {
  return std::any_of(plan_.faults.begin(), plan_.faults.end(), [&](const Fault& fault) {
    return fault.kind == Fault::kCrash && fault.at <= now_ + kSecond &&
           std::find(fault.ranks.begin(), fault.ranks.end(), rank) != fault.ranks.end();
  });
}

bool SimulatedWorld::Lives(int rank) const {
  const Process& process = processes_.at(rank);
  return process.crashed_at == kNever && !process.rank->ended();
}

// Some rank of another host is there to hear of it.
bool SimulatedWorld::WireTells(const Fault& fault) const {
  if (fault.kind != Fault::kCrash || !plan_.wire_tells) return false;
  return std::any_of(plan_.ranks.begin(), plan_.ranks.end(),
                     [&](int rank) { return plan_.Connected(rank, fault.ranks[0]) && Lives(rank); });
}

// Both ends are told, and what is on its way is lost. False if none of the connections is in use any more.
bool SimulatedWorld::LoseConnections(const Fault& fault) {
  const int end = fault.ranks[0];
  bool any = false;
  for (int other : fault.ranks.size() > 1 ? std::vector<int>{fault.ranks[1]} : plan_.ranks) {
    if (!plan_.Connected(end, other) || !Lives(end) || !Lives(other)) continue;
    for (const auto& [told, lost] : {std::make_pair(end, other), std::make_pair(other, end)}) {
      lost_links_.insert({lost, told});
      Add({now_ + random_.Between(0, plan_.link_delay), 0, kLostPeer, told, lost});
    }
    any = true;
  }
  return any;
}

// Behind what that rank has sent before it ended.
void SimulatedWorld::LoseConnectionsWith(int rank) {
  for (int other : plan_.ranks)
    if (plan_.Connected(rank, other) && Lives(other)) LosePeer(other, rank);
}

void SimulatedWorld::LosePeer(int rank, int lost) {
  Link& link = LinkOf(lost, rank);
  link.last = std::max(link.last, now_) + 1 + random_.Between(0, plan_.link_delay);
  Add({link.last, 0, kLostPeer, rank, lost});
}

bool SimulatedWorld::SomeAreDisconnected(const std::vector<int>& ranks) {
  const auto is_one = [&](int rank) { return std::binary_search(ranks.begin(), ranks.end(), rank); };
  return std::any_of(lost_links_.begin(), lost_links_.end(),
                     [&](const auto& link) { return is_one(link.first) && is_one(link.second); });
}

void SimulatedWorld::CheckDeadline(const Fault& fault, bool woken) {
  for (const auto& [rank, process] : processes_) {
    if (process.crashed_at != kNever || process.rank->ended()) continue;
    const bool stopped = fault.kind == Fault::kFreeze || fault.kind == Fault::kLateStart;
    if (!woken && stopped && std::find(fault.ranks.begin(), fault.ranks.end(), rank) != fault.ranks.end()) continue;
    judge_.Violate("fault " + std::to_string(fault.number) + " must be known everywhere by now, but " +
                   process.rank->Whereabouts());
  }
}

Nanoseconds SimulatedWorld::CutUntil(int from, int to) const {
  Nanoseconds until = 0;
  for (const Fault& fault : plan_.faults) {
    if (fault.kind != Fault::kCut || now_ < fault.at || now_ >= fault.at + fault.duration) continue;
    const bool leaves = std::binary_search(fault.ranks.begin(), fault.ranks.end(), from);
    const bool enters = std::binary_search(fault.ranks.begin(), fault.ranks.end(), to);
    if (leaves == enters || fault.way == (leaves ? Fault::kInward : Fault::kOutward)) continue;
    until = std::max(until, fault.at + fault.duration);
  }
  return until;
}

void SimulatedWorld::CheckAllEnded() {
  std::string text;
  for (const auto& [rank, process] : processes_)
    if (process.crashed_at == kNever && !process.rank->ended())
      text += (text.empty() ? "" : "; ") + process.rank->Whereabouts();
  if (!text.empty()) judge_.Violate("nothing moves any more, but " + text);
}

// ---- what ranks ask for ----

void SimulatedWorld::Add(Happening happening) {
  happening.number = ++number_;
  heap_.push(std::move(happening));
}

void SimulatedWorld::Send(int from, int to, const Frame& frame) {
  if (frame.type != FrameType::kBeat) last_moved_ = now_;
  if (IsLost(from, to)) return;
  Link& link = LinkOf(from, to);
  Random& random = link.random;
  const Nanoseconds most = random.OneIn(20) ? 10 * plan_.link_delay : plan_.link_delay;
  const Nanoseconds delay = from == to ? 0 : random.Between(0, most);
  link.last = std::max(link.last + 1, now_ + delay);
  Add({link.last, 0, kFrame, to, from, now_, false, frame.Encode()});
  // A process that is killed when it has said that it leaves, and has not closed its connections yet.
  const bool leaves = (frame.type == FrameType::kGoodbye || frame.type == FrameType::kBeat) && frame.flag;
  if (leaves && plan_.wire_tells && plan_.Connected(from, to)) LosePeer(to, from);
}

SimulatedWorld::Link& SimulatedWorld::LinkOf(int from, int to) {
  auto link = links_.find({from, to});
  if (link == links_.end())
    link = links_.emplace(std::make_pair(from, to), Link{Random{plan_.seed, 6, Stream(from), Stream(to)}}).first;
  return link->second;
}

// One call under way is enough, if it comes in time.
void SimulatedWorld::Call(Kind kind, int rank, Nanoseconds delay, Nanoseconds* called) {
  const Nanoseconds at = now_ + delay;
  if (*called <= at) return;
  *called = at;
  Add({at, 0, kind, rank});
}

void SimulatedWorld::CallStep(int rank, Nanoseconds delay) {
  Process& process = processes_.at(rank);
  if (delay >= kSecond) return Add({now_ + delay, 0, kStep, rank});
  Call(kStep, rank, delay * process.slowness, &process.step_at);
}

void SimulatedWorld::CallProgram(int rank, Nanoseconds delay) {
  Process& process = processes_.at(rank);
  if (delay >= kSecond) return Add({now_ + delay, 0, kProgram, rank});
  Call(kProgram, rank, delay * process.slowness, &process.program_at);
}

void SimulatedWorld::FailureTold(int rank) {
  for (size_t place = 0; place < plan_.faults.size(); ++place)
    if (plan_.faults[place].when_told && plan_.faults[place].ranks[0] == rank)
      Add({now_, 0, kRaise, rank, static_cast<int>(place)});
}

void SimulatedWorld::BeginBatch(int rank, int set, size_t index, const std::vector<int>& members) {
  std::set<int>& begun = batches_[{set, index}];
  begun.insert(rank);
  if (begun.size() < members.size() || SomeAreDisconnected(members)) return;
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
  Process& process = processes_.at(rank);
  if (process.crashed_at != kNever) return;
  const Nanoseconds due = process.rank->next_timer();
  if (due == kNever || due >= process.timer) return;
  process.timer = std::max(due, now_ + 1);
  Add({process.timer, 0, kTimer, rank});
}

// ---- the record ----

void SimulatedWorld::Note(const Happening& happening) {
  static const char* const kNames[] = {"frame",  "lost peer", "step",      "program", "timer", "batch end",
                                       "freeze", "crash",     "exception", "cut",     "loss",  "deadline"};
  uint64_t digest = Mix({result_.digest, static_cast<uint64_t>(happening.at), happening.kind, Stream(happening.rank),
                         Stream(happening.other)});
  for (char byte : happening.bytes) digest = digest * 0x100000001b3 ^ static_cast<uint8_t>(byte);
  result_.digest = digest;
  ++result_.events;
  if (!trace_) return;
  std::fprintf(stderr, "%12.6f rank %d: %s", static_cast<double>(happening.at) / 1e9, happening.rank,
               kNames[happening.kind]);
  if (happening.kind == kFrame)
    std::fprintf(stderr, " of %zu bytes from rank %d", happening.bytes.size(), happening.other);
  std::fprintf(stderr, "\n");
}

Result Simulate(const Plan& plan, bool trace) { return SimulatedWorld(plan, trace).Run(); }

}  // namespace simulation
}  // namespace ringtrain
