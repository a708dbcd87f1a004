#include "elastic/authority.h"

#include <algorithm>
#include <utility>

namespace ringtrain {
namespace {

constexpr Nanoseconds kSecond = INT64_C(1000000000);
// Beyond the bound of silence: frames there and back, and a process that is busy.
constexpr Nanoseconds kSlack = 2 * kSecond;
// For a rank that others do not hear: it lives if it can tell the launcher by then.
constexpr Nanoseconds kSuspectsPatience = kSecond;
constexpr char kUnheard[] = "other ranks, which are more, do not hear it. Look at the network between the hosts.";
constexpr int kMostFailuresAtStart = 3;
constexpr int kMostLeftOut = 3;  // worlds, of a rank that joins; the next one has the time of any other

ControlFrame Of(ControlType type) {
  ControlFrame frame;
  frame.type = type;
  return frame;
}

std::string EndText(int exit_code) {
  return exit_code < 0 ? "was killed by signal " + std::to_string(-exit_code)
                       : "has ended with exit code " + std::to_string(exit_code);
}

std::string Name(const Process& process) {
  return "The rank in slot " + std::to_string(process.slot) + " of host '" + process.host + "'";
}

std::string WaitText(size_t left, int minimum, Nanoseconds wait) {
  return "A world must have " + std::to_string(minimum) + " ranks, but " + std::to_string(left) +
         (left == 1 ? " is" : " are") + " left. What they have is kept, and the training goes on when enough have " +
         "joined; the job ends if they have not within " + std::to_string(wait / kSecond) + " s (--elastic-timeout).";
}

std::string BeginAgainText(int minimum, Nanoseconds wait) {
  return "The world has ended before the training began. That begins when " + std::to_string(minimum) +
         (minimum == 1 ? " rank has" : " ranks have") + " called init() again; the job ends if they have not within " +
         std::to_string(wait / kSecond) + " s (--elastic-timeout).";
}

std::string TooFewText(int minimum) {
  return "A world must have " + std::to_string(minimum) + " ranks, but has fewer. Look at the hosts, " +
         "or give a smaller minimum with -np MIN:MAX.";
}

}  // namespace

Authority::Authority(AuthorityOptions options)
    : options_(std::move(options)), cooldown_(options_.first_pause, options_.longest_pause) {
  for (const auto& [name, slots] : options_.hosts)
    for (int slot = 0; slot < slots; ++slot) hosts_[name].taken[slot] = false;
}

void Authority::Begin(Nanoseconds now) { since_ = awake_ = now; }

void Authority::Resume(Nanoseconds now, const std::string& record) {
  phase_ = Phase::kResuming;
  since_ = awake_ = now;
  ControlFrame form;
  if (record.empty() || !ControlFrame::Decode(record, &form)) return;
  epoch_ = form.epoch;
  world_ = std::move(form.members);
  if (!options_.hosts.empty()) return;
  for (const Member& member : world_) {  // who are to come again, and answer for their hosts
    Host& host = hosts_[member.process.host];
    host.taken[member.process.slot] = true;
    host.unheard.insert(member.process.uid);
  }
}

// ---- processes that an engine starts ----

void Authority::ProcessCame(Nanoseconds now, const Process& process, AuthorityActions* actions) {
  if (phase_ == Phase::kEnded) return;
  SkipStandstill(now);
  Host& host = hosts_[process.host];
  host.presence = Host::kPresent;
  host.heard = now;
  host.taken[process.slot] = true;
  Tell(process, Of(ControlType::kAsk), actions);
}

void Authority::ProcessGone(Nanoseconds now, const Process& process, const std::string& cause,
                            AuthorityActions* actions) {
  const auto host = hosts_.find(process.host);
  if (phase_ == Phase::kEnded || host == hosts_.end()) return;
  SkipStandstill(now);
  host->second.unheard.erase(process.uid);
  host->second.taken.erase(process.slot);
  host->second.closed.erase(process.slot);
  noticed_.erase(process.uid);
  const auto found = ranks_.find(process.uid);
  if (found != ranks_.end()) {
    if (!found->second.finished) actions->push_back(authority_action::Say{Name(process) + " is gone: " + cause});
    Lose(now, process.uid, actions);
  }
  if (host->second.taken.empty()) hosts_.erase(host);
  Decide(now, actions);
}

// ---- hosts ----

void Authority::HostCame(Nanoseconds now, const std::string& name, AuthorityActions* actions) {
  SkipStandstill(now);
  Host& host = hosts_[name];
  host.presence = Host::kAsked;
  host.heard = now;
  TellHost(name, ControlType::kAsk, actions);
}

void Authority::HostLost(Nanoseconds now, const std::string& name, const std::string& cause,
                         AuthorityActions* actions) {
  SkipStandstill(now);
  if (std::exchange(hosts_[name].presence, Host::kAway) == Host::kAway) return;
  Uids lost;
  for (const auto& [uid, rank] : ranks_)
    if (rank.process.host == name) lost.push_back(uid);
  if (!lost.empty() || !hosts_[name].leaves)
    actions->push_back(authority_action::Say{"Host '" + name + "' is lost: " + cause});
  for (const Uid& uid : lost) Lose(now, uid, actions);
  Decide(now, actions);
}

void Authority::HostAdded(const std::string& name, int slots) {
  Host& host = hosts_[name] = Host();
  for (int slot = 0; slot < slots; ++slot) host.taken[slot] = false;
}

void Authority::HostLeaves(Nanoseconds now, const std::string& name, const std::string& cause,
                           AuthorityActions* actions) {
  const auto host = hosts_.find(name);
  if (phase_ == Phase::kEnded || host == hosts_.end() || std::exchange(host->second.leaves, true)) return;
  SkipStandstill(now);
  actions->push_back(authority_action::Say{"Host '" + name + "' leaves on notice: " + cause});
  for (auto& [uid, rank] : ranks_)
    if (rank.process.host == name) rank.leaves = true;
  Decide(now, actions);
}

void Authority::Hear(Nanoseconds now, const std::string& name, AuthorityActions* actions) {
  Host& host = hosts_[name];
  host.heard = now;
  if (host.presence == Host::kAway) HostCame(now, name, actions);
}

// The time in which this process was stopped counts for nobody: what others have said meanwhile is still to be read.
void Authority::SkipStandstill(Nanoseconds now) {
  const Nanoseconds missed = now - std::exchange(awake_, now);
  if (missed <= options_.silence / 2) return;
  since_ += missed;
  if (short_since_ != kNever) short_since_ += missed;
  for (auto& entry : hosts_) entry.second.heard += missed;
  for (auto& entry : ranks_)
    for (Nanoseconds* since : {&entry.second.asked, &entry.second.refused})
      if (*since != kNever) *since += missed;
}

// If no host is heard that has a rank of this world it is the launcher that is cut off: the world goes on without it,
// for as long as agents and ranks do.
void Authority::LoseSilentHosts(Nanoseconds now, AuthorityActions* actions) {
  std::vector<std::string> silent;
  for (const auto& [name, host] : hosts_) {
    const Nanoseconds bound = SomebodyIsHeard(now) ? options_.silence : options_.grace + kSlack;
    if (host.presence != Host::kAway && now - host.heard >= bound) silent.push_back(name);
  }
  for (const std::string& name : silent) HostLost(now, name, "nothing is heard of its agent.", actions);
}

bool Authority::SomebodyIsHeard(Nanoseconds now) const {
  const Uids voters = Voters();
  return std::any_of(voters.begin(), voters.end(), [&](const Uid& uid) {
    return now - hosts_.at(ranks_.at(uid).process.host).heard < options_.silence;
  });
}

// ---- what comes in ----

void Authority::Arrived(Nanoseconds now, const std::string& host, const ControlFrame& frame,
                        AuthorityActions* actions) {
  if (phase_ == Phase::kEnded || hosts_.count(host) == 0) return;
  SkipStandstill(now);
  Hear(now, host, actions);
  // An agent speaks for the slots of its host alone.
  const bool names_a_process = frame.type != ControlType::kPresent && frame.type != ControlType::kBeat;
  if (names_a_process && (frame.process.host != host || hosts_[host].taken.count(frame.process.slot) == 0)) return;
  const auto found = ranks_.find(frame.process.uid);
  if (names_a_process && found != ranks_.end()) found->second.asked = kNever;
  switch (frame.type) {
    case ControlType::kReady:
      Ready(now, frame, actions);
      break;
    case ControlType::kDead:
      Dead(now, frame, actions);
      break;
    case ControlType::kSuspect:
      Suspect(now, frame, actions);
      break;
    case ControlType::kReport:
      Report(now, frame);
      break;
    case ControlType::kFormed:
      if (frame.epoch == epoch_ && ranks_.count(frame.process.uid) > 0) ranks_[frame.process.uid].formed = true;
      break;
    case ControlType::kLeave:
      Leave(frame, actions);
      break;
    case ControlType::kPresent:
      Present(host, frame);
      break;
    default:
      break;
  }
  Decide(now, actions);
}

void Authority::Ready(Nanoseconds now, const ControlFrame& frame, AuthorityActions* actions) {
  const Uid& uid = frame.process.uid;
  Host& host = hosts_[frame.process.host];
  host.unheard.erase(uid);
  host.taken[frame.process.slot] = true;
  if (const auto known = ranks_.find(uid); known != ranks_.end()) {
    if (!InWorld(uid))
      known->second.process.address = frame.process.address;  // it may join again, and listens elsewhere
    return;
  }
  Rank& rank = ranks_[uid];
  rank.leaves = noticed_.erase(uid) > 0 || host.leaves;
  rank.finished = finished_.erase(uid) > 0;
  rank.process = frame.process;
  rank.program = frame.program;
  rank.holds_state = frame.epoch.count > 0;
  if (!frame.stopped) rank.runs = frame.epoch;
  if (phase_ != Phase::kResuming) Admit(now, uid, InWorld(uid), actions);
}

// Who was a member of some world, and is none of the newest that is there, never will be one again.
void Authority::Admit(Nanoseconds now, const Uid& uid, bool lost, AuthorityActions* actions) {
  const Rank& rank = ranks_.at(uid);
  if (lost || (rank.holds_state && !InWorld(uid)))
    return Evict(now, uid, "the world goes on without it since the launcher lost it.", actions);
  if (program_.empty()) program_ = rank.program;
  if (rank.program != program_)
    Evict(now, uid, "its program must be that of the other ranks, but is another one.", actions);
}

void Authority::Dead(Nanoseconds now, const ControlFrame& frame, AuthorityActions* actions) {
  Host& host = hosts_[frame.process.host];
  host.unheard.erase(frame.process.uid);
  const auto found = ranks_.find(frame.process.uid);
  host.taken[frame.process.slot] = false;
  noticed_.erase(frame.process.uid);
  const bool known = found != ranks_.end();
  const bool expected = finished_.erase(frame.process.uid) > 0 || (known && found->second.finished);
  // A member that dies before it has answered the next launcher is told of like any other.
  const bool told = known || (phase_ == Phase::kResuming && InWorld(frame.process.uid));
  if (!expected) cooldown_.Failed(now, frame.process.host, frame.process.slot);
  if (told && !expected)
    actions->push_back(authority_action::Say{Name(frame.process) + " " + EndText(frame.exit_code) + "."});
  if (known) Lose(now, frame.process.uid, actions);
  if (!expected && frame.exit_code > 0 && (known || !begun_)) ++failures_[{frame.process.host, frame.process.slot}];
  GiveUpTheStart(actions);
}

// A script that raises before anybody has state would raise again, for as long as the job may wait for its ranks.
bool Authority::GiveUpTheStart(AuthorityActions* actions) {
  if (begun_ || ending_ || phase_ == Phase::kEnded) return false;
  for (const auto& [place, failures] : failures_) {
    if (failures < kMostFailuresAtStart) continue;
    const Process there = {{}, place.first, place.second, ""};
    End(false,
        Name(there) + " has ended with an error " + std::to_string(failures) +
            " times before the training began; its own words are above.",
        actions);
    return true;
  }
  return false;
}

// A world that has lost a rank cannot go on, nor one that forms.
void Authority::Lose(Nanoseconds now, const Uid& uid, AuthorityActions* actions) {
  const auto found = ranks_.find(uid);
  const bool finished = found->second.finished;
  ranks_.erase(found);
  const bool alive = phase_ == Phase::kRunning || phase_ == Phase::kForming;
  if (alive && InWorld(uid) && !finished) Stop(now, actions);
}

void Authority::Suspect(Nanoseconds now, const ControlFrame& frame, AuthorityActions* actions) {
  if (frame.epoch != epoch_ || !IsLiving(frame.process.uid)) return;
  if (frame.hangs) return EvictMissing(now, frame, actions);
  if (frame.refused) return Refuse(now, frame, actions);
  bool any = frame.uids.empty();  // it cannot connect, and does not know because of whom: the reports will tell
  unconnected_ |= any && phase_ == Phase::kForming;
  for (const Uid& uid : frame.uids) {
    const auto found = ranks_.find(uid);
    const bool known = found != ranks_.end();
    if (!InWorld(uid) || (known && found->second.finished)) continue;
    if (known) any = found->second.suspected = true;
    cuts_.insert({frame.process.uid, uid});
  }
  if (any && (phase_ == Phase::kRunning || phase_ == Phase::kForming)) Stop(now, actions);
}

// Only of those who join: what old members have is right. They go on at once, whenever it ends, and its slot pauses
// then.
void Authority::Refuse(Nanoseconds now, const ControlFrame& frame, AuthorityActions* actions) {
  const auto is_refused = [&](const Member& member) {
    const Uid& uid = member.process.uid;
    const bool named = std::find(frame.uids.begin(), frame.uids.end(), uid) != frame.uids.end();
    return member.joins && named && IsLiving(uid) && !(uid == frame.process.uid);
  };
  Uids refused;
  for (const Member& member : world_)
    if (is_refused(member)) refused.push_back(member.process.uid);
  if (refused.empty()) return;
  world_.erase(std::remove_if(world_.begin(), world_.end(), is_refused), world_.end());
  for (const Uid& uid : refused) {
    Rank& rank = ranks_.at(uid);
    rank.refused = now;
    rank.holds_state = false;
  }
  if (phase_ == Phase::kRunning) Stop(now, actions);
}

// Their hosts are well, and so are their threads that speak to the authority: a program waits for what does not come,
// or takes another way than the others.
void Authority::EvictMissing(Nanoseconds now, const ControlFrame& frame, AuthorityActions* actions) {
  for (const Uid& uid : frame.uids)
    if (IsLiving(uid) && !(uid == frame.process.uid))
      Evict(
          now, uid,
          "the others have waited for it until the stall limit (RINGTRAIN_STALL_ABORT_SECONDS), and do the step again "
          "without it. Its program hangs, or takes another way than theirs; the log shows where it was.",
          actions);
}

void Authority::Report(Nanoseconds now, const ControlFrame& frame) {
  const auto found = ranks_.find(frame.process.uid);
  if (frame.epoch != epoch_ || found == ranks_.end() || !InWorld(frame.process.uid)) return;
  if (phase_ == Phase::kRunning) {  // the first of those that pause
    phase_ = Phase::kStopping;
    since_ = now;
  }
  if (phase_ != Phase::kStopping) return;
  Rank& rank = found->second;
  rank.reported = true;
  rank.admits = frame.admits;
  rank.holds_state = frame.holds_state;
  for (const Uid& uid : frame.uids)
    if (InWorld(uid)) doubts_.insert({frame.process.uid, uid});
  rank.process.address = frame.process.address;  // each world has listeners of its own
}

// The end of a rank that was dismissed is not that of the training.
void Authority::Leave(const ControlFrame& frame, AuthorityActions* actions) {
  const auto found = ranks_.find(frame.process.uid);
  if (frame.finished) {
    if (found != ranks_.end()) {
      if (!std::exchange(found->second.finished, true)) ending_ = true;
    } else if (phase_ == Phase::kResuming && InWorld(frame.process.uid)) {
      finished_.insert(frame.process.uid);
      ending_ = true;
    }
    return;
  }
  hosts_[frame.process.host].closed.insert(frame.process.slot);
  if (found == ranks_.end()) {
    noticed_.insert(frame.process.uid);
  } else if (!found->second.finished && !std::exchange(found->second.leaves, true)) {
    actions->push_back(authority_action::Say{Name(frame.process) + " leaves on notice."});
  }
}

void Authority::Present(const std::string& name, const ControlFrame& frame) {
  Host& host = hosts_[name];
  host.presence = Host::kPresent;
  ending_ |= frame.finished;
  for (auto& slot : host.taken) slot.second = false;
  for (const auto& [uid, rank] : ranks_)
    if (rank.process.host == name) host.taken[rank.process.slot] = true;
  for (const Uid& uid : frame.uids)
    if (ranks_.count(uid) == 0) host.unheard.insert(uid);
  ControlFrame form;
  const bool newer = phase_ == Phase::kResuming && ControlFrame::Decode(frame.record, &form) && epoch_ < form.epoch;
  if (!newer) return;
  epoch_ = form.epoch;
  world_ = std::move(form.members);
}

// ---- what follows ----

void Authority::Tick(Nanoseconds now, AuthorityActions* actions) {
  if (phase_ == Phase::kEnded) return;
  SkipStandstill(now);
  if (now >= next_beat_) {
    next_beat_ = now + kSecond;
    for (const auto& [name, host] : hosts_)
      if (host.presence != Host::kAway) TellHost(name, ControlType::kBeat, actions);
  }
  LoseSilentHosts(now, actions);
  Decide(now, actions);
}

Nanoseconds Authority::next_timer() const {
  if (phase_ == Phase::kEnded) return kNever;
  if (phase_ != Phase::kStopping && phase_ != Phase::kForming) return next_beat_;
  const Nanoseconds due = since_ + (phase_ == Phase::kStopping ? kSuspectsPatience : JoinersPatience());
  return due > awake_ ? std::min(due, next_beat_) : next_beat_;
}

Nanoseconds Authority::JoinersPatience() const {
  return options_.joiners_patience + static_cast<Nanoseconds>(world_.size()) * kSecond / 100;
}

void Authority::Decide(Nanoseconds now, AuthorityActions* actions) {
  if (phase_ == Phase::kResuming) EndResuming(now, actions);
  if (phase_ == Phase::kRunning) AskForAPause(actions);
  if (phase_ == Phase::kStopping || phase_ == Phase::kForming) EvictTheLate(now, actions);
  LeaveOutLateJoiners(now, actions);
  EvictWhoDoNotAnswer(now, actions);
  EvictWhoDoNotEnd(now, actions);
  if (phase_ == Phase::kGathering || phase_ == Phase::kStopping || phase_ == Phase::kWaiting) FormNext(now, actions);
  if (phase_ == Phase::kForming) Go(now, actions);
  EndIfShortForTooLong(now, actions);
  DismissTheUnneeded(actions);
  EndIfAllHaveGone(actions);
  if (phase_ != Phase::kResuming && phase_ != Phase::kEnded && !ending_) StartRanks(now, actions);
}

// A world of which all members run needs nothing; any other is stopped. One of whose members none is heard may run: it
// is waited for until its ranks have ended themselves.
void Authority::EndResuming(Nanoseconds now, AuthorityActions* actions) {
  const Nanoseconds waited = now - since_;
  if (!AllHostsHaveAnswered() && waited < options_.silence + kSlack) return;
  const Uids living = Living();
  if (living.empty() && !world_.empty() && !ending_ && waited < options_.grace + options_.silence + kSlack) return;
  phase_ = Phase::kGathering;
  since_ = now;
  Uids found = living;  // first, so that their program is the one that others are compared with
  for (const auto& entry : ranks_)
    if (!InWorld(entry.first)) found.push_back(entry.first);
  for (const Uid& uid : found) Admit(now, uid, false, actions);
  if (world_.empty()) return;
  const auto is_held = [&](const Member& member) {
    const auto rank = ranks_.find(member.process.uid);
    return rank != ranks_.end() && (rank->second.holds_state || member.joins);
  };
  begun_ = living.empty() || std::any_of(world_.begin(), world_.end(), is_held);
  const auto runs = [&](const Uid& uid) { return ranks_.at(uid).runs == epoch_; };
  if (cuts_.empty() && living.size() == world_.size() && std::all_of(living.begin(), living.end(), runs))
    phase_ = Phase::kRunning;
  else
    Stop(now, actions);
}

bool Authority::AllHostsHaveAnswered() const {
  return std::all_of(hosts_.begin(), hosts_.end(), [](const auto& entry) {
    return entry.second.presence == Host::kPresent && entry.second.unheard.empty();
  });
}

bool Authority::WantsAPause() const {
  const auto leaves = [](const auto& entry) { return entry.second.leaves && !entry.second.finished; };
  const Uids living = Living();
  const bool too_small = static_cast<int>(living.size()) < options_.minimum;
  if (ending_ || too_small || !Newcomers().empty()) return !ending_;
  const bool any_leaves = std::any_of(ranks_.begin(), ranks_.end(), leaves);
  return any_leaves && !(AllLeave(living) && SomebodyIsOnTheWay());
}

bool Authority::AllLeave(const Uids& uids) const {
  return std::all_of(uids.begin(), uids.end(), [&](const Uid& uid) { return ranks_.at(uid).leaves; });
}

// Whether a rank may still come, to which those that leave can give the state: a slot of a host that stays has none
// yet.
bool Authority::SomebodyIsOnTheWay() const {
  for (const auto& [name, host] : hosts_) {
    if (host.presence == Host::kAway || host.leaves) continue;
    for (const auto& entry : host.taken) {
      const auto is_there = [&, slot = entry.first, name = name](const auto& rank) {
        return rank.second.process.host == name && rank.second.process.slot == slot;
      };
      if (host.closed.count(entry.first) == 0 && std::none_of(ranks_.begin(), ranks_.end(), is_there)) return true;
    }
  }
  return false;
}

void Authority::AskForAPause(AuthorityActions* actions) {
  if (pausing_ || !WantsAPause()) return;
  pausing_ = true;
  ControlFrame stop = Of(ControlType::kStop);
  stop.epoch = epoch_;
  stop.at_release = true;
  for (const Uid& uid : Living()) Tell(ranks_.at(uid).process, stop, actions);
}

void Authority::Stop(Nanoseconds now, AuthorityActions* actions) {
  phase_ = Phase::kStopping;
  since_ = now;
  ControlFrame stop = Of(ControlType::kStop);
  stop.epoch = epoch_;
  for (const Uid& uid : Living()) {
    Rank& rank = ranks_.at(uid);
    rank.reported = rank.formed = false;
    Tell(rank.process, stop, actions);
  }
}

void Authority::EvictTheLate(Nanoseconds now, AuthorityActions* actions) {
  const bool forms = phase_ == Phase::kForming;
  Uids late;
  for (const Uid& uid : Living()) {
    const Rank& rank = ranks_.at(uid);
    const Nanoseconds patience = rank.suspected && !forms ? kSuspectsPatience : options_.silence + kSlack;
    if (!(forms ? rank.formed : rank.reported) && now - since_ >= patience) late.push_back(uid);
  }
  for (const Uid& uid : late) Evict(now, uid, "it has not answered.", actions);
}

// A rank that was not heard for a moment may be well. So it counts only beside one that was not for the whole bound, or
// where a world without joiners could not be connected.
void Authority::BelieveDoubts() {
  const bool joined = std::any_of(world_.begin(), world_.end(), [](const Member& member) { return member.joins; });
  if (cuts_.empty() && (joined || !unconnected_)) return;
  cuts_.merge(doubts_);
}

// The others of a host whose lowest rank stands still may be cut off all the same; but only a world that cannot be
// connected with them shows that.
void Authority::DoubtThoseBesideTheStopped() {
  const std::set<Uid> stopped = Stopped();
  for (const auto& [one, other] : cuts_) {
    if (stopped.count(other) == 0 || !IsLiving(one) || AreBeside(one, other)) continue;
    for (const Uid& uid : Living())
      if (AreBeside(uid, other)) doubts_.insert({one, uid});
  }
}

// Who is not heard by most goes first, until all that are left hear each other.
void Authority::KeepTheLargerSide(Nanoseconds now, AuthorityActions* actions) {
  DoubtThoseBesideTheStopped();
  std::set<std::string> unheard_hosts;
  while (!cuts_.empty()) {
    const std::map<Uid, size_t> unheard = Unheard();
    const Uids living = Living();
    const Uid* most = nullptr;
    for (const Uid& uid : living)  // of equals, the last
      if (unheard.count(uid) > 0 && (most == nullptr || unheard.at(uid) >= unheard.at(*most))) most = &uid;
    if (most == nullptr) break;
    unheard_hosts.insert(ranks_.at(*most).process.host);
    Evict(now, *most, kUnheard, actions);
  }
  cuts_.clear();
  for (const std::string& host : unheard_hosts) LetGo(now, host, actions);
}

// If none of its ranks is left. They live, and so does its agent: what is dead is the network for data, and to start
// others there would have each world fail that they join.
void Authority::LetGo(Nanoseconds now, const std::string& name, AuthorityActions* actions) {
  const Uids living = Living();
  const auto is_there = [&](const Uid& uid) { return ranks_.at(uid).process.host == name; };
  if (options_.hosts.empty() || std::any_of(living.begin(), living.end(), is_there)) return;
  Uids waiting;
  for (const auto& [uid, rank] : ranks_)
    if (rank.process.host == name && !rank.finished) waiting.push_back(uid);
  for (const Uid& uid : waiting) Evict(now, uid, kUnheard, actions);
  hosts_[name].leaves = true;
  actions->push_back(authority_action::LetGo{name});
}

// A world that has lost no member and cannot be connected has its joiners to blame: it is formed again without them.
// One may have another option than the others, or no way to them; the slots of all pause, as after a failure.
void Authority::GiveUpJoiners(Nanoseconds now, AuthorityActions* actions) {
  if (!std::exchange(unconnected_, false)) return;
  const auto is_lost = [&](const Member& member) { return !member.joins && ranks_.count(member.process.uid) == 0; };
  if (std::any_of(world_.begin(), world_.end(), is_lost)) return;
  for (const Member& member : world_)
    if (member.joins && ranks_.count(member.process.uid) > 0)
      Evict(now, member.process.uid,
            "the others could not be connected with it, and go on without it. Look for its error, and at the network "
            "of its host.",
            actions);
}

// All others stand still while a world forms, and do so for long for nobody who only joins. Which of those that join is
// late nobody knows: who says that it lives may join again, and is given twice the time.
void Authority::LeaveOutLateJoiners(Nanoseconds now, AuthorityActions* actions) {
  if (phase_ != Phase::kForming) return;
  Uids late;
  int before = 0;  // how often they were
  for (const Member& member : world_) {
    const auto rank = ranks_.find(member.process.uid);
    if (!member.joins || rank == ranks_.end() || rank->second.formed) continue;
    late.push_back(member.process.uid);
    before = std::max(before, rank->second.left_out);
  }
  if (late.empty() || before >= kMostLeftOut || now - since_ < JoinersPatience() << before) return;
  const auto is_late = [&](const Member& member) {
    return std::find(late.begin(), late.end(), member.process.uid) != late.end();
  };
  world_.erase(std::remove_if(world_.begin(), world_.end(), is_late), world_.end());
  for (const Uid& uid : late) {
    Rank& rank = ranks_.at(uid);
    ++rank.left_out;
    rank.asked = now;
    Tell(rank.process, Of(ControlType::kAsk), actions);
  }
  Stop(now, actions);
}

void Authority::EvictWhoDoNotEnd(Nanoseconds now, AuthorityActions* actions) {
  Uids staying;
  for (const auto& [uid, rank] : ranks_)
    if (rank.refused != kNever && now - rank.refused >= options_.silence) staying.push_back(uid);
  for (const Uid& uid : staying)
    Evict(now, uid, "it was refused, as its error says, and has not ended. Let MismatchError end the program.",
          actions);
}

void Authority::EvictWhoDoNotAnswer(Nanoseconds now, AuthorityActions* actions) {
  Uids silent;
  for (const auto& [uid, rank] : ranks_)
    if (rank.asked != kNever && now - rank.asked >= options_.silence + kSlack) silent.push_back(uid);
  for (const Uid& uid : silent) Evict(now, uid, "it has not answered.", actions);
}

// How many do not hear a rank, or are not heard by it. Those who hold the state count more than all who do not, and the
// lowest rank a little more, so that of two halves it is its that stays. A rank that is not heard from another host
// speaks for all of its own, unless it does not live, or was stopped: then it was silent, and not cut off, and has no
// vote.
std::map<Uid, size_t> Authority::Unheard() const {
  const std::set<Uid> stopped = Stopped();
  const Uids living = Living();
  std::map<std::string, Uids> on;
  for (const Uid& uid : living) on[ranks_.at(uid).process.host].push_back(uid);
  const auto votes = [&](const Uids& uids) {
    size_t sum = 0;
    for (const Uid& uid : uids)
      if (stopped.count(uid) == 0)
        sum += (ranks_.at(uid).holds_state ? 2 * living.size() : 2) + (uid == living[0] ? 1 : 0);
    return sum;
  };
  std::set<std::pair<Uids, Uids>> sides;
  for (const auto& [one, other] : cuts_) {
    if (one == other || !IsLiving(one) || !IsLiving(other)) continue;
    const auto side = [&, within = AreBeside(one, other)](const Uid& uid) {
      return within || stopped.count(uid) > 0 ? Uids{uid} : on.at(ranks_.at(uid).process.host);
    };
    Uids near = side(one), far = side(other);
    if (far < near) near.swap(far);
    sides.insert({std::move(near), std::move(far)});
  }
  std::map<Uid, size_t> unheard;
  for (const auto& [near, far] : sides) {
    for (const Uid& uid : near) unheard[uid] += votes(far);
    for (const Uid& uid : far) unheard[uid] += votes(near);
  }
  return unheard;
}

// Whom ranks of the same host do not hear, though no network is between them, and who say that of themselves. They may
// have woken since.
std::set<Uid> Authority::Stopped() const {
  std::set<Uid> stopped;
  for (const auto& [one, other] : cuts_)
    if (IsLiving(one) && IsLiving(other) && AreBeside(one, other)) stopped.insert(other);
  return stopped;
}

bool Authority::AreBeside(const Uid& one, const Uid& other) const {
  return ranks_.at(one).process.host == ranks_.at(other).process.host;
}

void Authority::FormNext(Nanoseconds now, AuthorityActions* actions) {
  if (AnyAwaited()) return;
  BelieveDoubts();
  KeepTheLargerSide(now, actions);
  GiveUpJoiners(now, actions);
  Uids voters = Voters(), newcomers = ending_ ? Uids() : Newcomers();
  if (begun_ && voters.empty() && AnyOfTheFirst()) begun_ = false;  // nobody has got the state that the first gives
  if (!voters.empty()) failures_.clear();
  if (GiveUpTheStart(actions)) return;
  if (begun_ && voters.empty()) {
    if (!ending_) End(false, "All ranks that held the state of the training are gone.", actions);
    return;
  }
  const int enough = ending_ ? 1 : options_.minimum;
  const bool may_wait = phase_ == Phase::kGathering && StillStarting(now);
  if (static_cast<int>(voters.size() + newcomers.size()) < enough || may_wait) return Wait(now, actions);
  const bool between_steps =
      !begun_ || std::all_of(voters.begin(), voters.end(), [&](const Uid& uid) { return ranks_.at(uid).admits; });
  if (!between_steps) newcomers.clear();
  Uids stay;
  for (const Uid& uid : voters)
    if (!ranks_.at(uid).leaves) stay.push_back(uid);
  const bool waits = stay.empty() && SomebodyIsOnTheWay();
  if (between_steps && stay.size() < voters.size() && (!stay.empty() || newcomers.empty()) && !waits) {
    for (const Uid& uid : voters)
      if (ranks_.at(uid).leaves) Dismiss(&ranks_.at(uid), actions);
    if (stay.empty()) return End(false, "All ranks have left on notice, before the training came to its end.", actions);
    return FormNext(now, actions);
  }
  Grant(voters, newcomers, now, actions);
}

// Ranks that hold state stand still and keep it. One that comes and goes again begins no other wait.
void Authority::Wait(Nanoseconds now, AuthorityActions* actions) {
  if (phase_ == Phase::kStopping) {
    phase_ = Phase::kWaiting;
    since_ = now;
    if (short_since_ == kNever)
      actions->push_back(authority_action::Say{begun_ ? WaitText(Voters().size(), options_.minimum, options_.wait)
                                                      : BeginAgainText(options_.minimum, options_.wait)});
    short_since_ = std::min(short_since_, now);
  }
  if (now - std::min(since_, short_since_) >= options_.wait) End(false, TooFewText(options_.minimum), actions);
}

// Too few may form a world to do a step that was begun, and hang in it.
void Authority::EndIfShortForTooLong(Nanoseconds now, AuthorityActions* actions) {
  const bool runs = phase_ == Phase::kRunning || phase_ == Phase::kForming;
  if (!runs || ending_ || short_since_ == kNever || now - short_since_ < options_.wait) return;
  if (static_cast<int>(Living().size()) < options_.minimum) End(false, TooFewText(options_.minimum), actions);
}

// Old members first, in their old order.
void Authority::Grant(const Uids& voters, const Uids& newcomers, Nanoseconds now, AuthorityActions* actions) {
  if (options_.reset_limit > 0 && begun_ && resets_ >= options_.reset_limit)
    return End(false, "The reset limit of " + std::to_string(options_.reset_limit) + " worlds is reached.", actions);
  epoch_ = {epoch_.count + 1, options_.random()};
  world_.clear();
  for (const Uid& uid : voters) world_.push_back({ranks_.at(uid).process, false});
  for (const Uid& uid : newcomers) world_.push_back({ranks_.at(uid).process, begun_});
  ControlFrame form = Of(ControlType::kForm);
  form.epoch = epoch_;
  form.members = world_;
  actions->push_back(authority_action::Write{form.Encode()});
  for (int word = 0; word < 4; ++word) {
    const uint64_t drawn = options_.random();
    form.key.append(reinterpret_cast<const char*>(&drawn), sizeof drawn);
  }
  phase_ = Phase::kForming;
  since_ = now;
  unconnected_ = false;
  for (const Uid& uid : Living()) {
    Rank& rank = ranks_.at(uid);
    rank.formed = rank.reported = rank.suspected = false;
    Tell(rank.process, form, actions);
  }
}

void Authority::Go(Nanoseconds now, AuthorityActions* actions) {
  const Uids living = Living();
  if (!std::all_of(living.begin(), living.end(), [&](const Uid& uid) { return ranks_.at(uid).formed; })) return;
  phase_ = Phase::kRunning;
  doubts_.clear();
  if (std::exchange(begun_, true)) ++resets_;
  const bool enough = static_cast<int>(living.size()) >= options_.minimum;
  short_since_ = enough ? kNever : std::min(short_since_, now);
  ControlFrame go = Of(ControlType::kGo);
  go.epoch = epoch_;
  for (const Uid& uid : living) ranks_.at(uid).holds_state = true;
  go.at_release = pausing_ = WantsAPause();
  for (const Uid& uid : living) Tell(ranks_.at(uid).process, go, actions);
}

void Authority::StartRanks(Nanoseconds now, AuthorityActions* actions) {
  for (auto& [name, host] : hosts_) {
    if (host.presence != Host::kPresent || host.leaves) continue;
    for (auto& [slot, taken] : host.taken) {
      if (taken || host.closed.count(slot) > 0 || now < cooldown_.until(name, slot)) continue;
      taken = true;
      actions->push_back(authority_action::Start{name, slot});
    }
  }
}

void Authority::DismissTheUnneeded(AuthorityActions* actions) {
  for (auto& [uid, rank] : ranks_)
    if (!rank.holds_state && !InWorld(uid) && (ending_ || rank.leaves)) Dismiss(&rank, actions);
}

// What is heard of it from here on is its end.
void Authority::Dismiss(Rank* rank, AuthorityActions* actions) {
  if (!std::exchange(rank->finished, true)) Tell(rank->process, Of(ControlType::kLeave), actions);
}

void Authority::EndIfAllHaveGone(AuthorityActions* actions) {
  const bool knows = phase_ != Phase::kResuming && phase_ != Phase::kEnded;
  if (ending_ && knows && ranks_.empty()) End(true, "All ranks have come to their end.", actions);
}

void Authority::End(bool well, std::string text, AuthorityActions* actions) {
  phase_ = Phase::kEnded;
  actions->push_back(authority_action::End{well, std::move(text)});
}

// ---- who there is ----

bool Authority::IsLiving(const Uid& uid) const {
  const auto found = ranks_.find(uid);
  return found != ranks_.end() && !found->second.finished && InWorld(uid);
}

Uids Authority::Living() const {
  Uids living;
  for (const Member& member : world_) {
    const auto found = ranks_.find(member.process.uid);
    if (found != ranks_.end() && !found->second.finished) living.push_back(member.process.uid);
  }
  return living;
}

Uids Authority::Voters() const {
  Uids voters = Living();
  voters.erase(
      std::remove_if(voters.begin(), voters.end(), [&](const Uid& uid) { return !ranks_.at(uid).holds_state; }),
      voters.end());
  return voters;
}

// Whether a member is left that has not joined others.
bool Authority::AnyOfTheFirst() const {
  return std::any_of(world_.begin(), world_.end(),
                     [&](const Member& member) { return !member.joins && IsLiving(member.process.uid); });
}

// In the order of hosts and slots.
Uids Authority::Newcomers() const {
  std::map<std::pair<std::string, int>, Uid> ordered;
  for (const auto& [uid, rank] : ranks_)
    if (!rank.holds_state && !rank.leaves && rank.asked == kNever && rank.refused == kNever)
      ordered[{rank.process.host, rank.process.slot}] = uid;
  Uids newcomers;
  for (const auto& entry : ordered) newcomers.push_back(entry.second);
  return newcomers;
}

bool Authority::AnyAwaited() const {
  if (phase_ != Phase::kStopping) return false;
  const Uids living = Living();
  return std::any_of(living.begin(), living.end(), [&](const Uid& uid) { return !ranks_.at(uid).reported; });
}

// For the first world all slots are waited for, though not for ever.
bool Authority::StillStarting(Nanoseconds now) const {
  if (now - since_ >= options_.wait / 2) return false;
  size_t slots = 0;
  for (const auto& [name, host] : hosts_)
    if (!host.leaves) slots += host.taken.size() - host.closed.size();
  return Newcomers().size() < slots;
}

bool Authority::InWorld(const Uid& uid) const {
  return std::any_of(world_.begin(), world_.end(), [&](const Member& member) { return member.process.uid == uid; });
}

// ---- what is said ----

void Authority::Evict(Nanoseconds now, const Uid& uid, const std::string& cause, AuthorityActions* actions) {
  const Process process = ranks_.at(uid).process;
  ControlFrame evict = Of(ControlType::kEvict);
  evict.text = Name(process) + " was evicted: " + cause;
  actions->push_back(authority_action::Say{evict.text});
  Tell(process, evict, actions);
  Lose(now, uid, actions);
}

void Authority::Tell(const Process& to, ControlFrame frame, AuthorityActions* actions) const {
  frame.process = to;
  actions->push_back(authority_action::Send{to.host, std::move(frame)});
}

void Authority::TellHost(const std::string& host, ControlType type, AuthorityActions* actions) const {
  actions->push_back(authority_action::Send{host, Of(type)});
}

}  // namespace ringtrain
