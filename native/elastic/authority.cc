#include "elastic/authority.h"

#include <algorithm>
#include <utility>

namespace ringtrain {
namespace {

// Beyond the bound of silence: frames there and back, and a process that is busy.
constexpr Nanoseconds kSlack = 2 * kSecond;
// For a rank that others do not hear: it lives if it can tell the launcher by then.
constexpr Nanoseconds kSuspectsPatience = kSecond;
constexpr char kUnheard[] =
    "other ranks, no fewer than those that do, do not hear it. Look at the network between the hosts.";
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

std::string UnheardText(Nanoseconds left) {
  return "None of the job's ranks is heard, and a host on which some were does not answer. They may go on there: they "
         "are waited for until those without a launcher have ended themselves, for up to " +
         std::to_string((left + kSecond - 1) / kSecond) + " s.";
}

std::string TooFewText(int minimum) {
  return "A world must have " + std::to_string(minimum) + " ranks, but has fewer. Look at the hosts, " +
         "or give a smaller minimum with -np MIN:MAX.";
}

}  // namespace

Authority::Authority(AuthorityOptions options)
    : options_(std::move(options)), hosts_(options_.hosts, Cooldown(options_.first_pause, options_.longest_pause)) {}

void Authority::Begin(Nanoseconds now) { since_ = awake_ = now; }

void Authority::Resume(Nanoseconds now, const std::string& record) {
  phase_ = Phase::kResuming;
  since_ = awake_ = now;
  ControlFrame form;
  if (record.empty() || !ControlFrame::Decode(record, &form)) return;
  epoch_ = form.epoch;
  roster_.SetWorld(std::move(form.members));
  if (!options_.hosts.empty()) return;
  for (const Member& member : roster_.world()) {  // who are to come again, and answer for their hosts
    Hosts::Host& host = hosts_.Of(member.process.host);
    host.taken[member.process.slot] = true;
    host.unheard.insert(member.process.uid);
  }
}

// ---- processes that an engine starts ----

void Authority::ProcessCame(Nanoseconds now, const Process& process, AuthorityActions* actions) {
  if (phase_ == Phase::kEnded) return;
  SkipStandstill(now);
  Hosts::Host& host = hosts_.Of(process.host);
  host.presence = Hosts::Host::kPresent;
  host.heard = now;
  host.taken[process.slot] = true;
  Tell(process, Of(ControlType::kAsk), actions);
}

void Authority::ProcessGone(Nanoseconds now, const Process& process, const std::string& cause,
                            AuthorityActions* actions) {
  Hosts::Host* const host = hosts_.Find(process.host);
  if (phase_ == Phase::kEnded || host == nullptr) return;
  SkipStandstill(now);
  host->unheard.erase(process.uid);
  host->taken.erase(process.slot);
  host->closed.erase(process.slot);
  noticed_.erase(process.uid);
  const Roster::Rank* const found = roster_.Find(process.uid);
  if (found != nullptr) {
    if (!found->finished) actions->push_back(authority_action::Say{Name(process) + " is gone: " + cause});
    Lose(now, process.uid, actions);
  }
  if (host->taken.empty()) hosts_.Remove(process.host);
  Decide(now, actions);
}

// ---- hosts ----

void Authority::HostCame(Nanoseconds now, const std::string& name, AuthorityActions* actions) {
  SkipStandstill(now);
  Hosts::Host& host = hosts_.Of(name);
  host.presence = Hosts::Host::kAsked;
  host.heard = now;
  TellHost(name, ControlType::kAsk, actions);
}

void Authority::HostLost(Nanoseconds now, const std::string& name, const std::string& cause,
                         AuthorityActions* actions) {
  SkipStandstill(now);
  Hosts::Host& host = hosts_.Of(name);
  if (std::exchange(host.presence, Hosts::Host::kAway) == Hosts::Host::kAway) return;
  const Uids lost = roster_.On(name);
  if (!lost.empty() || !host.leaves) actions->push_back(authority_action::Say{"Host '" + name + "' is lost: " + cause});
  for (const Uid& uid : lost) Lose(now, uid, actions);
  Decide(now, actions);
}

void Authority::HostAdded(const std::string& name, int slots) { hosts_.Add(name, slots); }

void Authority::HostLeaves(Nanoseconds now, const std::string& name, const std::string& cause,
                           AuthorityActions* actions) {
  Hosts::Host* const host = hosts_.Find(name);
  if (phase_ == Phase::kEnded || host == nullptr || std::exchange(host->leaves, true)) return;
  SkipStandstill(now);
  actions->push_back(authority_action::Say{"Host '" + name + "' leaves on notice: " + cause});
  for (const Uid& uid : roster_.On(name)) roster_.at(uid).leaves = true;
  Decide(now, actions);
}

void Authority::Hear(Nanoseconds now, const std::string& name, AuthorityActions* actions) {
  Hosts::Host& host = hosts_.Of(name);
  host.heard = now;
  if (host.presence == Hosts::Host::kAway) HostCame(now, name, actions);
}

// The time in which this process was stopped counts for nobody: what others have said meanwhile is still to be read.
void Authority::SkipStandstill(Nanoseconds now) {
  const Nanoseconds missed = now - std::exchange(awake_, now);
  if (missed <= options_.silence / 2) return;
  since_ += missed;
  if (short_since_ != kNever) short_since_ += missed;
  hosts_.Skip(missed);
  roster_.Skip(missed);
}

// If no host is heard that has a rank of this world it is the launcher that is cut off: the world goes on without it,
// for as long as agents and ranks do.
void Authority::LoseSilentHosts(Nanoseconds now, AuthorityActions* actions) {
  const Nanoseconds bound = SomebodyIsHeard(now) ? options_.silence : options_.grace + kSlack;
  for (const std::string& name : hosts_.Silent(now, bound))
    HostLost(now, name, "nothing is heard of its agent.", actions);
}

bool Authority::SomebodyIsHeard(Nanoseconds now) const {
  const Uids voters = roster_.Voters();
  return std::any_of(voters.begin(), voters.end(), [&](const Uid& uid) {
    return now - hosts_.at(roster_.at(uid).process.host).heard < options_.silence;
  });
}

// ---- what comes in ----

void Authority::Arrived(Nanoseconds now, const std::string& host, const ControlFrame& frame,
                        AuthorityActions* actions) {
  if (phase_ == Phase::kEnded || !hosts_.has(host)) return;
  SkipStandstill(now);
  Hear(now, host, actions);
  // An agent speaks for the slots of its host alone.
  const bool names_a_process = frame.type != ControlType::kPresent && frame.type != ControlType::kBeat;
  if (names_a_process && (frame.process.host != host || hosts_.Of(host).taken.count(frame.process.slot) == 0)) return;
  Roster::Rank* const found = roster_.Find(frame.process.uid);
  if (names_a_process && found != nullptr) found->asked = kNever;
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
      if (frame.epoch == epoch_ && found != nullptr) found->formed = true;
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
  Hosts::Host& host = hosts_.Of(frame.process.host);
  host.unheard.erase(uid);
  host.taken[frame.process.slot] = true;
  if (Roster::Rank* const known = roster_.Find(uid); known != nullptr) {
    if (!roster_.InWorld(uid))
      known->process.address = frame.process.address;  // it may join again, and listens elsewhere
    return;
  }
  Roster::Rank& rank = roster_.Add(uid);
  rank.leaves = noticed_.erase(uid) > 0 || host.leaves;
  rank.finished = finished_.erase(uid) > 0;
  rank.process = frame.process;
  rank.program = frame.program;
  rank.holds_state = frame.epoch.count > 0;
  if (!frame.stopped) rank.runs = frame.epoch;
  if (phase_ != Phase::kResuming) Admit(now, uid, roster_.InWorld(uid), actions);
}

// Who was a member of some world, and is none of the newest that is there, never will be one again.
void Authority::Admit(Nanoseconds now, const Uid& uid, bool lost, AuthorityActions* actions) {
  const Roster::Rank& rank = roster_.at(uid);
  if (lost || (rank.holds_state && !roster_.InWorld(uid)))
    return Evict(now, uid, "the world goes on without it since the launcher lost it.", actions);
  if (program_.empty()) program_ = rank.program;
  if (rank.program != program_)
    Evict(now, uid, "its program must be that of the other ranks, but is another one.", actions);
}

void Authority::Dead(Nanoseconds now, const ControlFrame& frame, AuthorityActions* actions) {
  Hosts::Host& host = hosts_.Of(frame.process.host);
  host.unheard.erase(frame.process.uid);
  const Roster::Rank* const found = roster_.Find(frame.process.uid);
  host.taken[frame.process.slot] = false;
  noticed_.erase(frame.process.uid);
  const bool known = found != nullptr;
  const bool expected = finished_.erase(frame.process.uid) > 0 || (known && found->finished);
  // A member that dies before it has answered the next launcher is told of like any other.
  const bool told = known || (phase_ == Phase::kResuming && roster_.InWorld(frame.process.uid));
  if (!expected) hosts_.Failed(now, frame.process.host, frame.process.slot);
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
  const bool finished = roster_.at(uid).finished;
  roster_.Remove(uid);
  const bool alive = phase_ == Phase::kRunning || phase_ == Phase::kForming;
  if (alive && roster_.InWorld(uid) && !finished) Stop(now, actions);
}

void Authority::Suspect(Nanoseconds now, const ControlFrame& frame, AuthorityActions* actions) {
  if (frame.epoch != epoch_ || !roster_.IsLiving(frame.process.uid)) return;
  if (frame.hangs) return EvictMissing(now, frame, actions);
  if (frame.refused) return Refuse(now, frame, actions);
  bool any = frame.uids.empty();  // it cannot connect, and does not know because of whom: the reports will tell
  unconnected_ |= any && phase_ == Phase::kForming;
  for (const Uid& uid : frame.uids) {
    Roster::Rank* const found = roster_.Find(uid);
    if (!roster_.InWorld(uid) || (found != nullptr && found->finished)) continue;
    if (found != nullptr) any = found->suspected = true;
    cuts_.Add(frame.process.uid, uid);
  }
  if (any && (phase_ == Phase::kRunning || phase_ == Phase::kForming)) Stop(now, actions);
}

// Only of those who join: what old members have is right. They go on at once, whenever it ends, and its slot pauses
// then.
void Authority::Refuse(Nanoseconds now, const ControlFrame& frame, AuthorityActions* actions) {
  Uids refused;
  for (const Member& member : roster_.world()) {
    const Uid& uid = member.process.uid;
    const bool named = std::find(frame.uids.begin(), frame.uids.end(), uid) != frame.uids.end();
    if (member.joins && named && roster_.IsLiving(uid) && !(uid == frame.process.uid)) refused.push_back(uid);
  }
  if (refused.empty()) return;
  roster_.LeaveOut(refused);
  for (const Uid& uid : refused) {
    Roster::Rank& rank = roster_.at(uid);
    rank.refused = now;
    rank.holds_state = false;
  }
  if (phase_ == Phase::kRunning) Stop(now, actions);
}

// Their hosts are well, and so are their threads that speak to the authority: a program waits for what does not come,
// or takes another way than the others.
void Authority::EvictMissing(Nanoseconds now, const ControlFrame& frame, AuthorityActions* actions) {
  for (const Uid& uid : frame.uids)
    if (roster_.IsLiving(uid) && !(uid == frame.process.uid))
      Evict(
          now, uid,
          "the others have waited for it until the stall limit (RINGTRAIN_STALL_ABORT_SECONDS), and do the step again "
          "without it. Its program hangs, or takes another way than theirs; the log shows where it was.",
          actions);
}

void Authority::Report(Nanoseconds now, const ControlFrame& frame) {
  Roster::Rank* const found = roster_.Find(frame.process.uid);
  if (frame.epoch != epoch_ || found == nullptr || !roster_.InWorld(frame.process.uid)) return;
  if (phase_ == Phase::kRunning) {  // the first of those that pause
    phase_ = Phase::kStopping;
    since_ = now;
  }
  if (phase_ != Phase::kStopping) return;
  found->reported = true;
  found->admits = frame.admits;
  found->holds_state = frame.holds_state;
  for (const Uid& uid : frame.uids)
    if (roster_.InWorld(uid)) cuts_.Doubt(frame.process.uid, uid);
  found->process.address = frame.process.address;  // each world has listeners of its own
}

// The end of a rank that was dismissed is not that of the training.
void Authority::Leave(const ControlFrame& frame, AuthorityActions* actions) {
  Roster::Rank* const found = roster_.Find(frame.process.uid);
  if (frame.finished) {
    if (found != nullptr) {
      if (!std::exchange(found->finished, true)) ending_ = true;
    } else if (phase_ == Phase::kResuming && roster_.InWorld(frame.process.uid)) {
      finished_.insert(frame.process.uid);
      ending_ = true;
    }
    return;
  }
  hosts_.Of(frame.process.host).closed.insert(frame.process.slot);
  if (found == nullptr) {
    noticed_.insert(frame.process.uid);
  } else if (!found->finished && !std::exchange(found->leaves, true)) {
    actions->push_back(authority_action::Say{Name(frame.process) + " leaves on notice."});
  }
}

void Authority::Present(const std::string& name, const ControlFrame& frame) {
  Hosts::Host& host = hosts_.Of(name);
  host.presence = Hosts::Host::kPresent;
  ending_ |= frame.finished;
  for (auto& slot : host.taken) slot.second = false;
  for (const Uid& uid : roster_.On(name)) host.taken[roster_.at(uid).process.slot] = true;
  for (const Uid& uid : frame.uids)
    if (!roster_.has(uid)) host.unheard.insert(uid);
  ControlFrame form;
  const bool newer = phase_ == Phase::kResuming && ControlFrame::Decode(frame.record, &form) && epoch_ < form.epoch;
  if (!newer) return;
  epoch_ = form.epoch;
  roster_.SetWorld(std::move(form.members));
}

// ---- what follows ----

void Authority::Tick(Nanoseconds now, AuthorityActions* actions) {
  if (phase_ == Phase::kEnded) return;
  SkipStandstill(now);
  if (now >= next_beat_) {
    next_beat_ = now + kSecond;
    for (const std::string& name : hosts_.NotAway()) TellHost(name, ControlType::kBeat, actions);
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
  return options_.joiners_patience + static_cast<Nanoseconds>(roster_.world().size()) * kSecond / 100;
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

// A world of which all members run needs nothing; any other is stopped. One of whose members none is heard may run
// where a host of it does not answer: it is waited for until its ranks have ended themselves.
void Authority::EndResuming(Nanoseconds now, AuthorityActions* actions) {
  const Nanoseconds waited = now - since_;
  if (!hosts_.AllHaveAnswered() && waited < options_.silence + kSlack) return;
  const Uids living = roster_.Living();
  const Nanoseconds bound = options_.grace + options_.silence + kSlack;
  if (living.empty() && !ending_ && MayRunUnheard() && waited < bound) return SayUnheard(bound - waited, actions);
  phase_ = Phase::kGathering;
  since_ = now;
  Uids found = living;  // first, so that their program is the one that others are compared with
  for (const auto& entry : roster_.ranks())
    if (!roster_.InWorld(entry.first)) found.push_back(entry.first);
  for (const Uid& uid : found) Admit(now, uid, false, actions);
  const std::vector<Member>& world = roster_.world();
  if (world.empty()) return;
  const auto is_held = [&](const Member& member) {
    const Roster::Rank* const rank = roster_.Find(member.process.uid);
    return rank != nullptr && (rank->holds_state || member.joins);
  };
  begun_ = living.empty() || std::any_of(world.begin(), world.end(), is_held);
  const auto runs = [&](const Uid& uid) { return roster_.at(uid).runs == epoch_; };
  if (cuts_.empty() && living.size() == world.size() && std::all_of(living.begin(), living.end(), runs))
    phase_ = Phase::kRunning;
  else
    Stop(now, actions);
}

bool Authority::MayRunUnheard() const {
  const std::vector<Member>& world = roster_.world();
  return std::any_of(world.begin(), world.end(),
                     [&](const Member& member) { return !hosts_.HasAnswered(member.process.host); });
}

void Authority::SayUnheard(Nanoseconds left, AuthorityActions* actions) {
  if (!std::exchange(said_unheard_, true)) actions->push_back(authority_action::Say{UnheardText(left)});
}

bool Authority::WantsAPause() const {
  const Uids living = roster_.Living();
  const bool too_small = static_cast<int>(living.size()) < options_.minimum;
  if (ending_ || too_small || !roster_.Newcomers().empty()) return !ending_;
  return roster_.AnyLeaves() && !(roster_.AllLeave(living) && hosts_.AnyOpenBeside(roster_));
}

void Authority::AskForAPause(AuthorityActions* actions) {
  if (pausing_ || !WantsAPause()) return;
  pausing_ = true;
  ControlFrame stop = Of(ControlType::kStop);
  stop.epoch = epoch_;
  stop.at_release = true;
  for (const Uid& uid : roster_.Living()) Tell(roster_.at(uid).process, stop, actions);
}

void Authority::Stop(Nanoseconds now, AuthorityActions* actions) {
  phase_ = Phase::kStopping;
  since_ = now;
  ControlFrame stop = Of(ControlType::kStop);
  stop.epoch = epoch_;
  for (const Uid& uid : roster_.Living()) {
    Roster::Rank& rank = roster_.at(uid);
    rank.reported = rank.formed = false;
    Tell(rank.process, stop, actions);
  }
}

void Authority::EvictTheLate(Nanoseconds now, AuthorityActions* actions) {
  const bool forms = phase_ == Phase::kForming;
  Uids late;
  for (const Uid& uid : roster_.Living()) {
    const Roster::Rank& rank = roster_.at(uid);
    const Nanoseconds patience = rank.suspected && !forms ? kSuspectsPatience : options_.silence + kSlack;
    if (!(forms ? rank.formed : rank.reported) && now - since_ >= patience) late.push_back(uid);
  }
  for (const Uid& uid : late) Evict(now, uid, "it has not answered.", actions);
}

// A rank that was not heard for a moment may be well. So it counts only beside one that was not for the whole bound, or
// where a world without joiners could not be connected.
void Authority::BelieveDoubts() {
  const std::vector<Member>& world = roster_.world();
  const bool joined = std::any_of(world.begin(), world.end(), [](const Member& member) { return member.joins; });
  if (cuts_.empty() && (joined || !unconnected_)) return;
  cuts_.BelieveDoubts();
}

// Who is not heard by most goes first, until all that are left hear each other.
void Authority::KeepTheLargerSide(Nanoseconds now, AuthorityActions* actions) {
  cuts_.DoubtThoseBesideTheStopped(roster_);
  std::set<std::string> unheard_hosts;
  while (const std::optional<Uid> most = cuts_.MostUnheard(roster_)) {
    unheard_hosts.insert(roster_.at(*most).process.host);
    Evict(now, *most, kUnheard, actions);
  }
  cuts_.Settled();
  for (const std::string& host : unheard_hosts) LetGo(now, host, actions);
}

// If none of its ranks is left. They live, and so does its agent: what is dead is the network for data, and to start
// others there would have each world fail that they join.
void Authority::LetGo(Nanoseconds now, const std::string& name, AuthorityActions* actions) {
  const Uids living = roster_.Living();
  const auto is_there = [&](const Uid& uid) { return roster_.at(uid).process.host == name; };
  if (options_.hosts.empty() || std::any_of(living.begin(), living.end(), is_there)) return;
  for (const Uid& uid : roster_.On(name))
    if (!roster_.at(uid).finished) Evict(now, uid, kUnheard, actions);
  hosts_.Of(name).leaves = true;
  actions->push_back(authority_action::LetGo{name});
}

// A world that has lost no member and cannot be connected has its joiners to blame: it is formed again without them.
// One may have another option than the others, or no way to them; the slots of all pause, as after a failure.
void Authority::GiveUpJoiners(Nanoseconds now, AuthorityActions* actions) {
  if (!std::exchange(unconnected_, false)) return;
  const auto is_lost = [&](const Member& member) { return !member.joins && !roster_.has(member.process.uid); };
  const std::vector<Member>& world = roster_.world();
  if (std::any_of(world.begin(), world.end(), is_lost)) return;
  for (const Member& member : world)
    if (member.joins && roster_.has(member.process.uid))
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
  for (const Member& member : roster_.world()) {
    const Roster::Rank* const rank = roster_.Find(member.process.uid);
    if (!member.joins || rank == nullptr || rank->formed) continue;
    late.push_back(member.process.uid);
    before = std::max(before, rank->left_out);
  }
  if (late.empty() || before >= kMostLeftOut || now - since_ < JoinersPatience() << before) return;
  roster_.LeaveOut(late);
  for (const Uid& uid : late) {
    Roster::Rank& rank = roster_.at(uid);
    ++rank.left_out;
    rank.asked = now;
    Tell(rank.process, Of(ControlType::kAsk), actions);
  }
  Stop(now, actions);
}

void Authority::EvictWhoDoNotEnd(Nanoseconds now, AuthorityActions* actions) {
  for (const Uid& uid : roster_.NotEnded(now, options_.silence))
    Evict(now, uid, "it was refused, as its error says, and has not ended. Let MismatchError end the program.",
          actions);
}

void Authority::EvictWhoDoNotAnswer(Nanoseconds now, AuthorityActions* actions) {
  for (const Uid& uid : roster_.NotAnswered(now, options_.silence + kSlack))
    Evict(now, uid, "it has not answered.", actions);
}

void Authority::FormNext(Nanoseconds now, AuthorityActions* actions) {
  if (phase_ == Phase::kStopping && roster_.AnyAwaited()) return;
  BelieveDoubts();
  KeepTheLargerSide(now, actions);
  GiveUpJoiners(now, actions);
  Uids voters = roster_.Voters(), newcomers = ending_ ? Uids() : roster_.Newcomers();
  if (begun_ && voters.empty() && roster_.AnyOfTheFirst())
    begun_ = false;  // nobody has got the state that the first gives
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
      !begun_ || std::all_of(voters.begin(), voters.end(), [&](const Uid& uid) { return roster_.at(uid).admits; });
  if (!between_steps) newcomers.clear();
  Uids stay;
  for (const Uid& uid : voters)
    if (!roster_.at(uid).leaves) stay.push_back(uid);
  const bool waits = stay.empty() && hosts_.AnyOpenBeside(roster_);
  if (between_steps && stay.size() < voters.size() && (!stay.empty() || newcomers.empty()) && !waits) {
    for (const Uid& uid : voters)
      if (roster_.at(uid).leaves) Dismiss(&roster_.at(uid), actions);
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
      actions->push_back(authority_action::Say{begun_
                                                   ? WaitText(roster_.Voters().size(), options_.minimum, options_.wait)
                                                   : BeginAgainText(options_.minimum, options_.wait)});
    short_since_ = std::min(short_since_, now);
  }
  if (now - std::min(since_, short_since_) >= options_.wait) End(false, TooFewText(options_.minimum), actions);
}

// Too few may form a world to do a step that was begun, and hang in it.
void Authority::EndIfShortForTooLong(Nanoseconds now, AuthorityActions* actions) {
  const bool runs = phase_ == Phase::kRunning || phase_ == Phase::kForming;
  if (!runs || ending_ || short_since_ == kNever || now - short_since_ < options_.wait) return;
  if (static_cast<int>(roster_.Living().size()) < options_.minimum) End(false, TooFewText(options_.minimum), actions);
}

// Old members first, in their old order.
void Authority::Grant(const Uids& voters, const Uids& newcomers, Nanoseconds now, AuthorityActions* actions) {
  if (options_.reset_limit > 0 && begun_ && resets_ >= options_.reset_limit)
    return End(false, "The reset limit of " + std::to_string(options_.reset_limit) + " worlds is reached.", actions);
  epoch_ = {epoch_.count + 1, options_.random()};
  std::vector<Member> members;
  for (const Uid& uid : voters) members.push_back({roster_.at(uid).process, false});
  for (const Uid& uid : newcomers) members.push_back({roster_.at(uid).process, begun_});
  ControlFrame form = Of(ControlType::kForm);
  form.epoch = epoch_;
  form.members = members;
  roster_.SetWorld(std::move(members));
  actions->push_back(authority_action::Write{form.Encode()});
  for (int word = 0; word < 4; ++word) {
    const uint64_t drawn = options_.random();
    form.key.append(reinterpret_cast<const char*>(&drawn), sizeof drawn);
  }
  phase_ = Phase::kForming;
  since_ = now;
  unconnected_ = false;
  for (const Uid& uid : roster_.Living()) {
    Roster::Rank& rank = roster_.at(uid);
    rank.formed = rank.reported = rank.suspected = false;
    Tell(rank.process, form, actions);
  }
}

void Authority::Go(Nanoseconds now, AuthorityActions* actions) {
  const Uids living = roster_.Living();
  if (!std::all_of(living.begin(), living.end(), [&](const Uid& uid) { return roster_.at(uid).formed; })) return;
  phase_ = Phase::kRunning;
  cuts_.ForgetDoubts();
  if (std::exchange(begun_, true)) ++resets_;
  const bool enough = static_cast<int>(living.size()) >= options_.minimum;
  short_since_ = enough ? kNever : std::min(short_since_, now);
  ControlFrame go = Of(ControlType::kGo);
  go.epoch = epoch_;
  for (const Uid& uid : living) roster_.at(uid).holds_state = true;
  go.at_release = pausing_ = WantsAPause();
  for (const Uid& uid : living) Tell(roster_.at(uid).process, go, actions);
}

void Authority::StartRanks(Nanoseconds now, AuthorityActions* actions) {
  for (const auto& [host, slot] : hosts_.TakeFree(now)) actions->push_back(authority_action::Start{host, slot});
}

void Authority::DismissTheUnneeded(AuthorityActions* actions) {
  for (auto& [uid, rank] : roster_.ranks())
    if (!rank.holds_state && !roster_.InWorld(uid) && (ending_ || rank.leaves)) Dismiss(&rank, actions);
}

// What is heard of it from here on is its end.
void Authority::Dismiss(Roster::Rank* rank, AuthorityActions* actions) {
  if (!std::exchange(rank->finished, true)) Tell(rank->process, Of(ControlType::kLeave), actions);
}

void Authority::EndIfAllHaveGone(AuthorityActions* actions) {
  const bool knows = phase_ != Phase::kResuming && phase_ != Phase::kEnded;
  if (ending_ && knows && roster_.ranks().empty()) End(true, "All ranks have come to their end.", actions);
}

void Authority::End(bool well, std::string text, AuthorityActions* actions) {
  phase_ = Phase::kEnded;
  actions->push_back(authority_action::End{well, std::move(text)});
}

// ---- who there is ----

// For the first world all slots are waited for, though not for ever.
bool Authority::StillStarting(Nanoseconds now) const {
  if (now - since_ >= options_.wait / 2) return false;
  return roster_.Newcomers().size() < hosts_.Open();
}

// ---- what is said ----

void Authority::Evict(Nanoseconds now, const Uid& uid, const std::string& cause, AuthorityActions* actions) {
  const Process process = roster_.at(uid).process;
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
