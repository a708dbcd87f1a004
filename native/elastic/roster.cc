#include "elastic/roster.h"

#include <algorithm>

namespace ringtrain {

// ---- processes ----

Roster::Rank* Roster::Find(const Uid& uid) {
  const auto found = ranks_.find(uid);
  return found == ranks_.end() ? nullptr : &found->second;
}

const Roster::Rank* Roster::Find(const Uid& uid) const {
  const auto found = ranks_.find(uid);
  return found == ranks_.end() ? nullptr : &found->second;
}

Uids Roster::On(const std::string& host) const {
  Uids found;
  for (const auto& [uid, rank] : ranks_)
    if (rank.process.host == host) found.push_back(uid);
  return found;
}

bool Roster::AreBeside(const Uid& one, const Uid& other) const {
  return at(one).process.host == at(other).process.host;
}

bool Roster::IsTaken(const std::string& host, int slot) const {
  return std::any_of(ranks_.begin(), ranks_.end(), [&](const auto& entry) {
    const Process& process = entry.second.process;
    return process.host == host && process.slot == slot;
  });
}

Uids Roster::NotAnswered(Nanoseconds now, Nanoseconds bound) const {
  Uids silent;
  for (const auto& [uid, rank] : ranks_)
    if (rank.asked != kNever && now - rank.asked >= bound) silent.push_back(uid);
  return silent;
}

Uids Roster::NotEnded(Nanoseconds now, Nanoseconds bound) const {
  Uids staying;
  for (const auto& [uid, rank] : ranks_)
    if (rank.refused != kNever && now - rank.refused >= bound) staying.push_back(uid);
  return staying;
}

void Roster::Skip(Nanoseconds missed) {
  for (auto& entry : ranks_)
    for (Nanoseconds* since : {&entry.second.asked, &entry.second.refused})
      if (*since != kNever) *since += missed;
}

// ---- the newest granted world ----

void Roster::LeaveOut(const Uids& members) {
  const auto is_one = [&](const Member& member) {
    return std::find(members.begin(), members.end(), member.process.uid) != members.end();
  };
  world_.erase(std::remove_if(world_.begin(), world_.end(), is_one), world_.end());
}

bool Roster::InWorld(const Uid& uid) const {
  return std::any_of(world_.begin(), world_.end(), [&](const Member& member) { return member.process.uid == uid; });
}

bool Roster::IsLiving(const Uid& uid) const {
  const Rank* const found = Find(uid);
  return found != nullptr && !found->finished && InWorld(uid);
}

Uids Roster::Living() const {
  Uids living;
  for (const Member& member : world_) {
    const Rank* const found = Find(member.process.uid);
    if (found != nullptr && !found->finished) living.push_back(member.process.uid);
  }
  return living;
}

Uids Roster::Voters() const {
  Uids voters = Living();
  voters.erase(std::remove_if(voters.begin(), voters.end(), [&](const Uid& uid) { return !at(uid).holds_state; }),
               voters.end());
  return voters;
}

bool Roster::AnyOfTheFirst() const {
  return std::any_of(world_.begin(), world_.end(),
                     [&](const Member& member) { return !member.joins && IsLiving(member.process.uid); });
}

bool Roster::AnyAwaited() const {
  const Uids living = Living();
  return std::any_of(living.begin(), living.end(), [&](const Uid& uid) { return !at(uid).reported; });
}

Uids Roster::Newcomers() const {
  std::map<std::pair<std::string, int>, Uid> ordered;
  for (const auto& [uid, rank] : ranks_)
    if (!rank.holds_state && !rank.leaves && rank.asked == kNever && rank.refused == kNever)
      ordered[{rank.process.host, rank.process.slot}] = uid;
  Uids newcomers;
  for (const auto& entry : ordered) newcomers.push_back(entry.second);
  return newcomers;
}

bool Roster::AllLeave(const Uids& uids) const {
  return std::all_of(uids.begin(), uids.end(), [&](const Uid& uid) { return at(uid).leaves; });
}

bool Roster::AnyLeaves() const {
  return std::any_of(ranks_.begin(), ranks_.end(),
                     [](const auto& entry) { return entry.second.leaves && !entry.second.finished; });
}

}  // namespace ringtrain
