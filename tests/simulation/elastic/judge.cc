#include "judge.h"

#include <algorithm>
#include <utility>

namespace ringtrain {
namespace elastic {
namespace {

std::string Name(const Uid& uid) { return "process " + std::to_string(uid.low); }
std::string Name(const EpochId& epoch) { return "epoch " + std::to_string(epoch.count); }

bool SameSums(const Sums& one, const Sums& other) {
  return one.size() == other.size() &&
         std::equal(one.begin(), one.end(), other.begin(), [](const auto& a, const auto& b) {
           return a.first == b.first && a.second.epoch == b.second.epoch && a.second.parts == b.second.parts;
         });
}

}  // namespace

void Judge::Violate(const std::string& text) {
  if (violation_.empty()) violation_ = text;
}

// ---- the launcher ----

void Judge::Wrote(const EpochId& epoch) {
  written_ = epoch;
  const auto [granted, is_new] = granted_.insert({epoch.count, epoch});
  if (granted->second != epoch) Violate("E5: the count of " + Name(epoch) + " is granted twice");
  if (is_new && std::next(granted) != granted_.end()) Violate("E5: " + Name(epoch) + " does not rise");
  if (plan_.only(Fault::kLauncherCrash) && undisturbed_ && plan_.late.empty() && finished_.empty())
    Violate("E12: a launcher that comes back changes a world that runs");
}

void Judge::Formed(const ControlFrame& form) {
  if (written_ != form.epoch) Violate("E5: " + Name(form.epoch) + " is not written down before its Form is sent");
  for (size_t i = 1; i < form.members.size(); ++i)
    if (form.members[i - 1].joins && !form.members[i].joins) Violate("E7: a joiner is ranked before an old member");
  for (const Member& member : form.members)
    if (evicted_.count(member.process.uid) > 0) Violate("E11: an evicted rank is to be a member again");
  // Too few do the step that they have begun, if there are ranks enough that join them behind it.
  const size_t minimum = finished_.empty() ? static_cast<size_t>(plan_.minimum) : 1;
  if (form.members.size() < minimum && known_.size() < minimum)
    Violate("E10: " + Name(form.epoch) + " is formed below the minimum, and nobody is there to join it");
  formed_ = form;
}

void Judge::Heard(const ControlFrame& frame) {
  if (frame.type == ControlType::kReady) known_.insert(frame.process.uid);
  if (frame.type == ControlType::kDead) known_.erase(frame.process.uid);
}

void Judge::Evicted(const Uid& uid) {
  evicted_.insert(uid);
  known_.erase(uid);
  if (plan_.faults.empty() || plan_.only(Fault::kLauncherCrash) || plan_.only(Fault::kNotice) ||
      plan_.only(Fault::kHostNotice))
    Violate("E9: " + Name(uid) + " is evicted though no rank has failed");
  if (plan_.only(Fault::kFreeze) && plan_.link_delay <= kSecond && uid != struck_rank_)
    Violate("E9: " + Name(uid) + " is evicted though another rank was stopped");
  // Of two that wait for each other nobody knows who is right.
  if (plan_.only(Fault::kAnotherWay) && uid != struck_rank_ && worlds_[newest_run_].members.size() > 2)
    Violate("E9: " + Name(uid) + " is evicted though another rank went another way than all others");
}

// Those that went on without all ranks of a host cannot be connected with one there as long as the cut lasts.
void Judge::Starts(Nanoseconds now, const std::string& host) {
  if (!plan_.only(Fault::kCut) || !plan_.faults[0].spares_launcher || plan_.faults[0].way != Fault::kBoth) return;
  if (cut_at_ == kNever || now >= cut_at_ + plan_.faults[0].duration || !(cut_in_ < newest_run_)) return;
  const auto is_there = [&](const Member& member) { return member.process.host == host; };
  const auto is_beside = [&](const Member& member) {
    return IsWithinTheCut(member.process.host) == IsWithinTheCut(host);
  };
  const std::vector<Member>&before = worlds_[cut_in_].members, &after = worlds_[newest_run_].members;
  if (std::any_of(before.begin(), before.end(), is_there) && std::none_of(after.begin(), after.end(), is_beside))
    Violate("E15: a rank is started on host " + host + ", which is cut off from those that went on without it");
}

// ---- a rank ----

void Judge::Ran(Nanoseconds now, const Uid& uid, const EpochId& epoch, const std::vector<Member>& members,
                const Progress& progress) {
  if (evicted_.count(uid) > 0 && newest_run_ < epoch) Violate("E11: evicted " + Name(uid) + " runs " + Name(epoch));
  step_of_[uid] = std::max(step_of_[uid], progress.steps);
  const auto [world, is_new] = worlds_.insert({epoch, {progress, members, {}}});
  ++world->second.running;
  if (world->second.progress.steps != progress.steps)
    Violate("E1: members of " + Name(epoch) + " have released steps " + std::to_string(progress.steps) + " and " +
            std::to_string(world->second.progress.steps));
  if (!(world->second.progress == progress))
    Violate("E1: members of " + Name(epoch) + " have different orders of the samples");
  if (is_new) Began(now, epoch, world->second);
  members_.insert(uid);
}

void Judge::Began(Nanoseconds now, const EpochId& epoch, const World& world) {
  if (epoch < newest_run_) Violate("E5: " + Name(epoch) + " runs after " + Name(newest_run_));
  const EpochId old = std::exchange(newest_run_, epoch);
  if (!applied_.empty() && world.progress.steps < applied_.rbegin()->first)
    Violate("E2: " + Name(epoch) + " begins behind step " + std::to_string(applied_.rbegin()->first));
  CheckTime(now);
  CheckSides(now, old, world);
}

void Judge::HasProgram(const EpochId& epoch, const std::string& program) {
  std::string& of_all = worlds_[epoch].program;
  if (of_all.empty()) of_all = program;
  if (of_all != program) Violate("members of " + Name(epoch) + " have different programs");
}

void Judge::Took(const EpochId& message, const EpochId& epoch) {
  if (message != epoch) Violate("E6: a message of " + Name(message) + " has an effect in " + Name(epoch));
}

void Judge::Gave(const Uid& donor) {
  if (!applied_.empty() && members_.count(donor) == 0)
    Violate("E7: " + Name(donor) + " gives state before it was a member");
}

void Judge::Stands(const Uid& uid, const Standing& standing) {
  if ((standing.stage == Stage::kWhole) != (holding_.count(uid) > 0))
    Violate("E2: " + Name(uid) + " must say that it holds results as long as it does");
}

void Judge::Used(const Uid& uid, int64_t done, bool of_step, size_t part, const Sums& sums) {
  const auto [used, is_first] = used_parts_.insert({{{done, of_step}, part}, sums});
  if (!is_first && !SameSums(used->second, sums))
    Violate("E2: part " + std::to_string(part) + " behind step " + std::to_string(done) + " at " + Name(uid) +
            " is not what others have used");
  for (const auto& [name, sum] : sums) {
    if (sum.epoch != sums.begin()->second.epoch) Violate("E3: results of a part are of two epochs");
    if (sum.parts.size() != worlds_[sum.epoch].members.size())
      Violate("E3: " + name + " lacks contributions of members");
    for (const auto& given : sum.parts)
      if (given.second.step != done + 1) Violate("E3: " + name + " has a contribution to another step");
  }
}

void Judge::Released(const Uid& uid, const EpochId& epoch, bool settled, int64_t step,
                     const std::vector<Uid>& contributors, const Sums& sums) {
  const std::string what = "step " + std::to_string(step) + " at " + Name(uid);
  if (step != ++step_of_[uid]) Violate("E2: " + what + " follows step " + std::to_string(step_of_[uid] - 1));
  // Who was stopped may yet come to what all others have released.
  if (epoch < newest_run_ && applied_.count(step) == 0)
    Violate("E5: " + what + " is released in " + Name(epoch) + ", which is over");
  const size_t expected = plan_.has_two_parts(step - 1) ? 1 : static_cast<size_t>(plan_.operations);
  if (sums.size() != expected) Violate("E3: " + what + " lacks results");
  for (const auto& entry : sums) {
    std::vector<Uid> givers, named = contributors;
    for (const auto& given : entry.second.parts) givers.push_back(given.first);
    std::sort(named.begin(), named.end());
    if (givers != named) Violate("E3: " + what + " has contributions of others than it is said to have");
  }
  const auto [applied, is_first] = applied_.insert({step, sums});
  if (!SameSums(applied->second, sums)) Violate("E2: " + what + " is not what others have released");
  if (is_first && !sums.empty()) UsePositions(sums);
  if (settled) return;
  World& world = worlds_[epoch];
  world.released.insert(step);
  if (static_cast<int>(world.members.size()) < plan_.minimum && world.released.size() > 1 && finished_.empty())
    Violate("E10: " + Name(epoch) + " goes on below the minimum");
}

void Judge::UsePositions(const Sums& sums) {
  int64_t weights = 0, positions = 0;
  for (const auto& part : sums.begin()->second.parts) {
    weights += part.second.weight;
    if (part.second.weight == 0) continue;  // another one's, computed once more
    for (int64_t position : part.second.samples) {
      ++positions;
      if (!used_.insert(position).second)
        Violate("E4: position " + std::to_string(position) + " is in two released steps");
    }
  }
  if (plan_.cut != Cut::kPositions && weights != positions)
    Violate("E3: " + std::to_string(positions) + " samples weigh " + std::to_string(weights));
}

void Judge::Reported(size_t bytes) {
  if (bytes > 512) Violate("E14: a report has " + std::to_string(bytes) + " bytes");
}

// Every position up to the last one dealt is in a released step or was given back, and neither is both.
void Judge::Finished(const Uid& uid, const Progress& progress) {
  finished_.insert(uid);
  if (progress.steps != plan_.steps) Violate("E2: " + Name(uid) + " finishes at another step");
  for (int64_t position : progress.given_back)
    if (used_.count(position) > 0) Violate("E4: position " + std::to_string(position) + " is used and given back");
  const auto dealt = static_cast<int64_t>(used_.size() + progress.given_back.size());
  if (dealt != progress.next)
    Violate("E4: of " + std::to_string(progress.next) + " positions " + std::to_string(progress.next - dealt) +
            " are lost");
}

void Judge::Struck(Nanoseconds now, const Fault& fault, const Uid& victim, bool member) {
  if (fault.kind == Fault::kFreeze || fault.kind == Fault::kAnotherWay) struck_rank_ = victim;
  if (fault.kind == Fault::kLauncherCrash && fault.duration == kNever) launcher_gone_ = std::min(launcher_gone_, now);
  if (fault.kind == Fault::kLauncherCrash && newest_run_.count > 0)
    undisturbed_ = worlds_[newest_run_].running == worlds_[newest_run_].members.size();
  if (fault.kind == Fault::kCut) {
    cut_at_ = now;
    cut_in_ = newest_run_;
  }
  // A death is told while a world forms, too; a rank that is stopped then is found by those who cannot connect.
  const auto is_victim = [&](const Member& each) { return each.process.uid == victim; };
  const bool forms = fault.kind != Fault::kFreeze && newest_run_ < formed_.epoch &&
                     std::any_of(formed_.members.begin(), formed_.members.end(), is_victim);
  if (plan_.faults.size() != 1 || !(member || forms)) return;
  struck_ = now;
  struck_in_ = newest_run_;
}

// E8, of a fault that is the only one.
void Judge::CheckTime(Nanoseconds now) {
  if (struck_ == kNever || !(struck_in_ < newest_run_)) return;
  const Fault& fault = plan_.faults[0];
  const bool attested = fault.kind == Fault::kCrash || fault.kind == Fault::kHostReset;
  const bool suspected = fault.kind == Fault::kFreeze && fault.duration > kSilence + 3 * kSecond;
  if (!attested && !suspected) return;
  const Nanoseconds gives_state = struck_in_.count == 0 ? 4 * plan_.window : 0;
  const Nanoseconds bound =
      (attested ? 0 : kSilence) + 2 * kSecond + 30 * plan_.link_delay + 3 * plan_.window + gives_state;
  if (now - struck_ > bound && plan_.minimum == 1)
    Violate("E8: the next world runs " + std::to_string((now - struck_) / kMillisecond) + " ms after the fault");
  struck_ = kNever;
}

// Of a cut between hosts that both reach the launcher, the larger side goes on, or that of the lowest rank. A rank that
// has taken the state over counts more than all that have not.
void Judge::CheckSides(Nanoseconds now, const EpochId& old, const World& world) {
  if (!plan_.only(Fault::kCut) || plan_.minimum > 1 || plan_.link_delay > kSecond) return;
  const Fault& cut = plan_.faults[0];
  const Nanoseconds heals = cut_at_ == kNever ? 0 : cut_at_ + cut.duration;
  if (!cut.spares_launcher || cut.way != Fault::kBoth || old != cut_in_ || now >= heals + kSecond) return;
  const auto is_within = [&](const Member& member) { return IsWithinTheCut(member.process.host); };
  const std::vector<Member>& members = worlds_[old].members;
  size_t within = 0, without = 0;
  for (const Member& member : members)
    (is_within(member) ? within : without) += members_.count(member.process.uid) > 0 ? members.size() : 1;
  if (within == 0 || without == 0) return;
  if (now - cut_at_ > kSilence + 4 * kSecond + 3 * plan_.window) Violate("E8: a cut lasts, and no side goes on");
  const bool stays_within = within == without ? is_within(members[0]) : within > without;
  for (const Member& member : world.members)
    if (is_within(member) != stays_within) Violate("of a cut the smaller side goes on, or both do");
}

// Those that did not fail had not taken the state over yet.
bool Judge::all_state_is_lost() const {
  return !members_.empty() && std::includes(killed_.begin(), killed_.end(), members_.begin(), members_.end());
}

void Judge::AllGone(Nanoseconds now) {
  if (launcher_gone_ != kNever && now > launcher_gone_ + plan_.grace + 40 * kSecond && !ended_)
    Violate("E12: ranks outlive the launcher by more than the grace");
  if (plan_.must_succeed() && !all_state_is_lost() &&
      (applied_.empty() || applied_.rbegin()->first != plan_.steps || !well_))
    Violate("the training does not come to its end, though some ranks have not failed");
  if (plan_.faults.empty() && plan_.late.empty() && granted_.size() != 1)
    Violate("E9: without faults there must be one world");
  if ((plan_.only(Fault::kNotice) || plan_.only(Fault::kHostNotice)) && !ended_) Violate("the job does not end");
}

}  // namespace elastic
}  // namespace ringtrain
