#include "fleet.h"

#include <algorithm>
#include <cstdio>

namespace ringtrain {
namespace elastic {
namespace {

constexpr Nanoseconds kPipe = kMillisecond / 10;  // within a host
constexpr Nanoseconds kLongest = 1200 * kSecond;
constexpr int64_t kMaxEvents = 2000000;
constexpr int kKilled = -9;

int HostOf(const std::string& name) { return name[0] - 'a'; }

}  // namespace

Fleet::Fleet(const Plan& plan, bool trace)
    : plan_(plan), trace_(trace), judge_(plan), random_({plan.seed, 5}), agents_(plan.slots.size()) {
  for (size_t place = 0; place < plan.slots.size(); ++place) {
    const int host = static_cast<int>(place);
    const Nanoseconds comes = plan.late.count(host) > 0 ? plan.start_up + 10 * plan.window : 0;
    At(comes, host, {host}, [this, host] {
      agents_[static_cast<size_t>(host)].there = true;
      Beat(host);
    });
  }
  StartLauncher();
  for (const Fault& fault : plan.faults)
    if (fault.nth == 0) At(fault.at, kLauncher, {}, [this, &fault] { Strike(fault); });
}

Result Fleet::Run() {
  while (!heap_.empty() && judge_.violation().empty() && now_ < kLongest) {
    Event event = heap_.top();
    heap_.pop();
    now_ = event.at;
    Nanoseconds held_until = event.from == event.to.host ? 0 : CutUntil(event.from, event.to.host);
    if (held_until == kNever) continue;
    if (event.to.process > 0) {
      const OneProcess& process = processes_.at(event.to.process);
      if (process.dead) continue;
      held_until = std::max(held_until, process.frozen_until);
    }
    if (now_ < held_until) {
      event.at = held_until;  // the number stays: what came first is done first
      heap_.push(std::move(event));
      continue;
    }
    result_.digest = simulation::Mix(
        {result_.digest, static_cast<uint64_t>(now_), static_cast<uint64_t>(event.to.host + 1), event.to.process});
    if (++result_.events > kMaxEvents) judge_.Violate("the job goes on for ever");
    (*event.what)();
    const bool all_gone =
        std::all_of(processes_.begin(), processes_.end(), [](const auto& entry) { return entry.second.dead; });
    if (over_ && all_gone) break;
    if (launcher_gone_ && all_gone) break;
  }
  if (now_ >= kLongest) judge_.Violate("the job hangs");
  if (judge_.violation().empty()) judge_.AllGone(now_);
  result_.violation = judge_.violation();
  result_.time = now_;
  return result_;
}

void Fleet::At(Nanoseconds at, int from, Place to, std::function<void()> what) {
  heap_.push({at, number_++, from, to, std::make_shared<std::function<void()>>(std::move(what))});
}

// Over a connection, which keeps the order.
void Fleet::Deliver(int from, Place to, Nanoseconds least, std::function<void()> what) {
  const Nanoseconds delay = from == to.host ? kPipe : plan_.link_delay;
  Nanoseconds& last = arrivals_[{{from, 0}, {to.host, to.process}}];
  last = std::max(last, now_ + least + 1 + random_.Between(delay / 10, delay));
  At(last, from, to, std::move(what));
}

Nanoseconds Fleet::CutUntil(int from, int to) const {
  Nanoseconds until = 0;
  for (const auto& [number, end] : cuts_) {
    if (now_ >= end) continue;
    const auto fault = std::find_if(plan_.faults.begin(), plan_.faults.end(),
                                    [n = number](const Fault& one) { return one.number == n; });
    if (fault->spares_launcher && (from == kLauncher || to == kLauncher)) continue;
    const bool leaves = fault->places.count(from) > 0, enters = fault->places.count(to) > 0;
    if (leaves == enters || fault->way == (leaves ? Fault::kInward : Fault::kOutward)) continue;
    until = std::max(until, end);
  }
  return until;
}

// ---- the launcher ----

void Fleet::StartLauncher() {
  if (over_) return;
  AuthorityOptions options;
  for (size_t host = 0; host < plan_.slots.size(); ++host)
    options.hosts[HostName(static_cast<int>(host))] = plan_.slots[host];
  options.minimum = plan_.minimum;
  options.silence = kSilence;
  options.grace = plan_.grace;
  options.wait = 60 * kSecond;
  options.first_pause = plan_.first_pause;
  options.longest_pause = 60 * plan_.first_pause;
  options.joiners_patience = 3 * kSecond;  // the twin gives the state before a world runs
  options.random = [this] { return random_.Next() | 1; };
  authority_.emplace(std::move(options));
  TraceText("the launcher starts");
  if (++launcher_ == 1)
    authority_->Begin(now_);
  else
    authority_->Resume(now_, disk_);
  for (size_t place = 0; place < agents_.size(); ++place) {
    const int host = static_cast<int>(place);
    if (!agents_[place].there) continue;
    agents_[place].is_let_go = false;  // for all that this one knows
    Deliver(host, {}, 0, [this, host, launcher = launcher_] {
      if (!authority_ || launcher != launcher_) return;
      AuthorityActions actions;
      authority_->HostCame(now_, HostName(host), &actions);
      CarryOut(std::move(actions));
    });
  }
  Look();
}

void Fleet::Look() {
  if (!authority_) return;
  AuthorityActions actions;
  authority_->Tick(now_, &actions);
  CarryOut(std::move(actions));
  if (!authority_) return;
  const Nanoseconds next = authority_->next_timer();
  if (next == kNever) return;
  At(std::max(next, now_ + kMillisecond), kLauncher, {}, [this, launcher = launcher_] {
    if (launcher == launcher_) Look();
  });
}

void Fleet::CrashLauncher(const Fault& fault) {
  if (!authority_ || over_) return;
  TraceText("the launcher crashes");
  authority_.reset();
  launcher_gone_ = fault.duration == kNever;
  if (!launcher_gone_) At(now_ + fault.duration, kLauncher, {}, [this] { StartLauncher(); });
}

void Fleet::FromAgent(int host, const ControlFrame& frame) {
  if (!authority_) return;
  if (trace_ && frame.type != ControlType::kBeat)
    TraceText("launcher hears type " + std::to_string(static_cast<int>(frame.type)) + " of " + HostName(host) + ":" +
              std::to_string(frame.process.uid.low) + " epoch " + std::to_string(frame.epoch.count) +
              (frame.admits ? "" : " within a step"));
  judge_.Heard(frame);
  AuthorityActions actions;
  authority_->Arrived(now_, HostName(host), frame, &actions);
  CarryOut(std::move(actions));
}

// The launcher may crash between two of them.
void Fleet::CarryOut(AuthorityActions actions) {
  for (AuthorityAction& action : actions) {
    if (!authority_) return;
    std::visit([this](auto& what) { Do(what); }, action);
  }
}

void Fleet::Do(authority_action::Write& write) {
  disk_ = write.record;
  ControlFrame form;
  if (!ControlFrame::Decode(disk_, &form)) judge_.Violate("the record cannot be decoded");
  judge_.Wrote(form.epoch);
}

void Fleet::Do(authority_action::Send& send) {
  IsAboutToSend(send.frame.type);
  if (!authority_) return;
  if (send.frame.type == ControlType::kForm) judge_.Formed(send.frame);
  if (send.frame.type == ControlType::kEvict) judge_.Evicted(send.frame.process.uid);
  if (trace_ && send.frame.type != ControlType::kBeat)
    TraceText("launcher sends type " + std::to_string(static_cast<int>(send.frame.type)) + " to " + send.host + ":" +
              std::to_string(send.frame.process.uid.low) + " epoch " + std::to_string(send.frame.epoch.count) +
              (send.frame.at_release ? " at release" : "") + " of " + std::to_string(send.frame.members.size()));
  const int host = HostOf(send.host);
  ControlFrame frame;
  if (!ControlFrame::Decode(send.frame.Encode(), &frame)) return judge_.Violate("a control frame cannot be decoded");
  frame.process = send.frame.process;
  Deliver(kLauncher, {host}, 0, [this, host, frame, launcher = launcher_] { FromLauncher(host, launcher, frame); });
}

void Fleet::Do(authority_action::Start& start) {
  const int host = HostOf(start.host);
  judge_.Starts(now_, start.host);
  if (agents_[static_cast<size_t>(host)].is_let_go)
    judge_.Violate("a rank is started on a host whose network was not checked");
  Deliver(kLauncher, {host}, 0, [this, host, slot = start.slot, launcher = launcher_] {
    if (launcher == agents_[static_cast<size_t>(host)].launcher) StartProcess(host, slot);
  });
}

// Its agent ends all that is there, which takes some time, and then itself, which its connection tells of.
void Fleet::Do(authority_action::LetGo& let_go) {
  const int host = HostOf(let_go.host);
  TraceText("the launcher lets " + let_go.host + " go");
  agents_[static_cast<size_t>(host)].is_let_go = true;
  const Nanoseconds takes = random_.Between(10 * kMillisecond, 5 * kSecond);
  Deliver(kLauncher, {host}, 0, [this, host, takes, launcher = launcher_] {
    const Agent& agent = agents_[static_cast<size_t>(host)];
    if (!agent.is_let_go || launcher != launcher_) return;
    const std::map<int, uint64_t> present = agent.processes;
    for (const auto& entry : present) Die(entry.second, kKilled);
    At(now_ + takes, host, {host}, [this, host, launcher] { EndAgent(host, launcher); });
  });
  At(now_ + 2 * kSecond, kLauncher, {}, [this, host] { TryHost(host); });
}

void Fleet::EndAgent(int host, int launcher) {
  Agent& agent = agents_[static_cast<size_t>(host)];
  if (!agent.is_let_go || launcher != launcher_) return;
  agent.there = false;
  Deliver(host, {}, 0, [this, host, launcher] {
    if (!authority_ || launcher != launcher_) return;
    agents_[static_cast<size_t>(host)].has_ended = true;
    AuthorityActions actions;
    authority_->HostLost(now_, HostName(host), "its agent has ended.", &actions);
    CarryOut(std::move(actions));
  });
}

// As the launcher does, again and again, with a check of the network between it and all others.
void Fleet::TryHost(int host) {
  Agent& agent = agents_[static_cast<size_t>(host)];
  if (over_ || launcher_gone_ || !agent.is_let_go) return;
  bool reaches = authority_.has_value() && agent.has_ended;
  for (int other = kLauncher; other < static_cast<int>(agents_.size()); ++other)
    reaches &= other == host || (CutUntil(host, other) <= now_ && CutUntil(other, host) <= now_);
  if (!reaches) return At(now_ + 2 * kSecond, kLauncher, {}, [this, host] { TryHost(host); });
  agent = Agent();
  agent.there = true;
  agent.launcher = launcher_;
  agent.heard_at = now_;
  Beat(host);
  authority_->HostAdded(HostName(host), plan_.slots[static_cast<size_t>(host)]);
  AuthorityActions actions;
  authority_->HostCame(now_, HostName(host), &actions);
  CarryOut(std::move(actions));
}

// The agents end what is left.
void Fleet::Do(authority_action::End& end) {
  TraceText("the job ends: " + end.text);
  judge_.Ended(end.well);
  over_ = true;
  authority_.reset();
  for (auto& entry : processes_) entry.second.dead = true;
}

// ---- agents ----

void Fleet::FromLauncher(int host, int launcher, const ControlFrame& frame) {
  Agent& agent = agents_[static_cast<size_t>(host)];
  if (!agent.there || launcher < agent.launcher) return;
  if (frame.type != ControlType::kAsk && launcher > agent.launcher) return;
  agent.launcher = launcher;
  agent.heard_at = now_;
  if (frame.type == ControlType::kAsk) Present(host);
  if (frame.type == ControlType::kForm && frame.epoch.count > agent.count) {
    agent.record = frame.Encode();
    agent.count = frame.epoch.count;
  }
  PassOn(host, frame);
}

void Fleet::Present(int host) {
  const Agent& agent = agents_[static_cast<size_t>(host)];
  ControlFrame present;
  present.type = ControlType::kPresent;
  present.record = agent.record;
  present.finished = agent.finished;
  for (const auto& entry : agent.processes) present.uids.push_back(processes_.at(entry.second).process.uid);
  ToLauncher(host, present);
}

// To the rank that it is for, or to all; one that is evicted is killed as well.
void Fleet::PassOn(int host, const ControlFrame& frame) {
  const std::map<int, uint64_t> present = agents_[static_cast<size_t>(host)].processes;
  for (const auto& entry : present) {
    const uint64_t number = entry.second;
    const Uid& uid = processes_.at(number).process.uid;
    if (frame.process.uid != Uid() && frame.process.uid != uid) continue;
    Deliver(host, {host, number}, 0, [this, number, frame] { processes_.at(number).rank->Hear(frame); });
    if (frame.type == ControlType::kEvict)
      At(now_ + 100 * kMillisecond, host, {host}, [this, number] { Die(number, kKilled); });
  }
}

void Fleet::ToLauncher(int host, const ControlFrame& frame) {
  ControlFrame decoded;
  if (!ControlFrame::Decode(frame.Encode(), &decoded)) return judge_.Violate("a control frame cannot be decoded");
  Deliver(host, {}, 0, [this, host, decoded, launcher = agents_[static_cast<size_t>(host)].launcher] {
    if (launcher == launcher_ || decoded.type == ControlType::kBeat) FromAgent(host, decoded);
  });
}

void Fleet::Beat(int host) {
  if (over_ || !agents_[static_cast<size_t>(host)].there) return;
  Agent& agent = agents_[static_cast<size_t>(host)];
  if (now_ - agent.heard_at > plan_.grace) {  // who has no launcher any more
    const std::map<int, uint64_t> present = agent.processes;
    for (const auto& entry : present) Die(entry.second, kKilled);
    agent.there = false;
    return;
  }
  ControlFrame beat;
  ToLauncher(host, beat);
  At(now_ + kSecond, host, {host}, [this, host] { Beat(host); });
}

void Fleet::StartProcess(int host, int slot) {
  Agent& agent = agents_[static_cast<size_t>(host)];
  if (!agent.there || over_ || agent.processes.count(slot) > 0) return;
  const uint64_t number = next_process_++;
  agent.processes[slot] = number;
  OneProcess& process = processes_[number];
  process.process = {{plan_.seed, number}, HostName(host), slot, HostName(host) + std::to_string(number)};
  std::string& program = agent.program[slot];
  process.rank =
      std::make_unique<SimulatedRank>(plan_, process.process, program.empty() ? kProgram : program, &judge_, this);
  program.clear();
  TraceText("process " + std::to_string(number) + " starts in " + HostName(host) + ":" + std::to_string(slot));
  At(now_ + plan_.start_up + random_.Between(0, plan_.start_up / 4), host, {host, number},
     [this, number] { processes_.at(number).rank->Begin(); });
}

// By waitpid.
void Fleet::Die(uint64_t number, int exit_code) {
  OneProcess& process = processes_.at(number);
  if (std::exchange(process.dead, true)) return;
  const int host = HostOf(process.process.host);
  Agent& agent = agents_[static_cast<size_t>(host)];
  agent.processes.erase(process.process.slot);
  TraceText("process " + std::to_string(number) + " ends with " + std::to_string(exit_code));
  if (!agent.there) return;
  ControlFrame dead;
  dead.type = ControlType::kDead;
  dead.process = process.process;
  dead.exit_code = exit_code;
  At(now_ + random_.Between(0, 5) * kMillisecond, host, {host}, [this, host, dead] { ToLauncher(host, dead); });
}

// ---- ranks ----

void Fleet::Send(const Uid& from, const Uid& to, Message message) {
  const OneProcess& sender = processes_.at(from.low);
  const int host = HostOf(processes_.at(to.low).process.host);
  Nanoseconds& last = arrivals_[{{HostOf(sender.process.host), from.low}, {host, to.low}}];
  const bool local = sender.process.host == HostName(host);
  const Nanoseconds delay = local ? kPipe : plan_.link_delay;
  const Nanoseconds transfer = message.name == kStateName ? random_.Between(0, 4 * plan_.window) : 0;
  last = std::max(last, now_ + 1 + transfer + random_.Between(delay / 10, delay));
  At(last, HostOf(sender.process.host), {host, to.low},
     [this, to, message] { processes_.at(to.low).rank->Receive(message); });
}

void Fleet::TellAgent(const Uid& from, const ControlFrame& frame) {
  IsAboutToSend(frame.type);
  const OneProcess& process = processes_.at(from.low);
  if (process.dead) return;
  const int host = HostOf(process.process.host);
  ControlFrame copy = frame;
  Nanoseconds& last = arrivals_[{{host, from.low}, {host, 0}}];
  last = std::max(last, now_ + 1 + random_.Between(0, kPipe));
  At(last, host, {host}, [this, host, copy] {
    Agent& agent = agents_[static_cast<size_t>(host)];
    if (!agent.there) return;
    agent.finished |= copy.finished;
    ToLauncher(host, copy);
  });
}

void Fleet::Call(const Uid& process, Nanoseconds delay) {
  const int host = HostOf(processes_.at(process.low).process.host);
  At(now_ + delay, host, {host, process.low}, [this, process] { processes_.at(process.low).rank->Step(); });
}

void Fleet::Exit(const Uid& process, int exit_code) {
  const int host = HostOf(processes_.at(process.low).process.host);
  At(now_ + kMillisecond, host, {host}, [this, process, exit_code] { Die(process.low, exit_code); });
}

// ---- faults ----

void Fleet::IsAboutToSend(ControlType type) {
  const int nth = ++sent_[type];
  for (const Fault& fault : plan_.faults) {
    if (fault.nth == 0 || fault.frame != type) continue;
    const auto last = sent_at_.find(fault.number - 1);
    const int since = !fault.follows ? nth : last == sent_at_.end() ? 0 : nth - last->second[type];
    if (since == fault.nth) Strike(fault);
  }
}

uint64_t Fleet::ProcessIn(int host, int slot) const {
  const std::map<int, uint64_t>& processes = agents_[static_cast<size_t>(host)].processes;
  const auto found = processes.find(slot);
  return found == processes.end() ? 0 : found->second;
}

void Fleet::Strike(const Fault& fault) {
  if (over_) return;
  TraceText("fault " + std::to_string(fault.number) + " strikes");
  sent_at_.insert({fault.number, sent_});
  const uint64_t number =
      fault.kind == Fault::kCut || fault.kind == Fault::kLauncherCrash ? 0 : ProcessIn(fault.host, fault.slot);
  OneProcess* process = number == 0 ? nullptr : &processes_.at(number);
  judge_.Struck(now_, fault, process == nullptr ? Uid() : process->process.uid,
                process != nullptr && process->rank->is_member());
  switch (fault.kind) {
    case Fault::kCrash:
      if (process == nullptr) return;
      judge_.Killed(process->process.uid);
      return Die(number, kKilled);
    case Fault::kOtherProgram:
    case Fault::kOtherValues:
      agents_[static_cast<size_t>(fault.host)].program[fault.slot] =
          fault.kind == Fault::kOtherValues ? kOtherValues : "another program";
      return process == nullptr ? void() : Die(number, 1);
    case Fault::kFreeze:
      if (process != nullptr) process->frozen_until = std::max(process->frozen_until, now_ + fault.duration);
      return;
    case Fault::kHang:
      if (process != nullptr) process->rank->Hang(now_ + fault.duration);
      return;
    case Fault::kAnotherWay:
      if (process != nullptr) process->rank->GoAnotherWay();
      return;
    case Fault::kNotice:
      if (process != nullptr) AskForLeave(*process);
      return;
    case Fault::kHostNotice: {
      if (!authority_) return;
      AuthorityActions actions;
      authority_->HostLeaves(now_, HostName(fault.host), "it has a notice.", &actions);
      return CarryOut(std::move(actions));
    }
    case Fault::kHostLost:
      return LoseHost(fault.host);
    case Fault::kHostReset:
      LoseHost(fault.host);
      return Deliver(fault.host, {}, 0, [this, host = fault.host, launcher = launcher_] {
        if (!authority_ || launcher != launcher_) return;
        AuthorityActions actions;
        authority_->HostLost(now_, HostName(host), "its agent's connection was reset.", &actions);
        CarryOut(std::move(actions));
      });
    case Fault::kCut:
      cuts_[fault.number] = now_ + fault.duration;
      return;
    case Fault::kLauncherCrash:
      return CrashLauncher(fault);
  }
}

// The agent does so for a rank that has a notice.
void Fleet::AskForLeave(const OneProcess& process) {
  ControlFrame leave;
  leave.type = ControlType::kLeave;
  leave.process = process.process;
  ToLauncher(HostOf(process.process.host), leave);
}

// Without a word.
void Fleet::LoseHost(int host) {
  Agent& agent = agents_[static_cast<size_t>(host)];
  agent.there = false;
  for (const auto& entry : agent.processes) {
    processes_.at(entry.second).dead = true;
    judge_.Killed(processes_.at(entry.second).process.uid);
  }
  agent.processes.clear();
}

void Fleet::Trace(const Uid& process, const std::string& text) {
  TraceText("process " + std::to_string(process.low) + " " + text);
}

void Fleet::TraceText(const std::string& text) const {
  if (trace_) std::fprintf(stderr, "%10.3f ms  %s\n", static_cast<double>(now_) / 1e6, text.c_str());
}

Result Simulate(const Plan& plan, bool trace) { return Fleet(plan, trace).Run(); }

}  // namespace elastic
}  // namespace ringtrain
