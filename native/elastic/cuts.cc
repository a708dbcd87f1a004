#include "elastic/cuts.h"

#include <string>

namespace ringtrain {

// The others of a host whose lowest rank stands still may be cut off all the same; but only a world that cannot be
// connected with them shows that.
void Cuts::DoubtThoseBesideTheStopped(const Roster& roster) {
  const std::set<Uid> stopped = Stopped(roster);
  for (const auto& [one, other] : cuts_) {
    if (stopped.count(other) == 0 || !roster.IsLiving(one) || roster.AreBeside(one, other)) continue;
    for (const Uid& uid : roster.Living())
      if (roster.AreBeside(uid, other)) doubts_.insert({one, uid});
  }
}

std::optional<Uid> Cuts::MostUnheard(const Roster& roster) const {
  const std::map<Uid, size_t> unheard = Unheard(roster);
  std::optional<Uid> most;
  for (const Uid& uid : roster.Living())  // of equals, the last
    if (unheard.count(uid) > 0 && (!most || unheard.at(uid) >= unheard.at(*most))) most = uid;
  return most;
}

// How many do not hear a rank, or are not heard by it. Those who hold the state count more than all who do not, and the
// lowest rank a little more, so that of two halves it is its that stays. A rank that is not heard from another host
// speaks for all of its own, unless it does not live, or was stopped: then it was silent, and not cut off, and has no
// vote.
std::map<Uid, size_t> Cuts::Unheard(const Roster& roster) const {
  const std::set<Uid> stopped = Stopped(roster);
  const Uids living = roster.Living();
  std::map<std::string, Uids> on;
  for (const Uid& uid : living) on[roster.at(uid).process.host].push_back(uid);
  const auto votes = [&](const Uids& uids) {
    size_t sum = 0;
    for (const Uid& uid : uids)
      if (stopped.count(uid) == 0)
        sum += (roster.at(uid).holds_state ? 2 * living.size() : 2) + (uid == living[0] ? 1 : 0);
    return sum;
  };
  std::set<std::pair<Uids, Uids>> sides;
  for (const auto& [one, other] : cuts_) {
    if (one == other || !roster.IsLiving(one) || !roster.IsLiving(other)) continue;
    const auto side = [&, within = roster.AreBeside(one, other)](const Uid& uid) {
      return within || stopped.count(uid) > 0 ? Uids{uid} : on.at(roster.at(uid).process.host);
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
std::set<Uid> Cuts::Stopped(const Roster& roster) const {
  std::set<Uid> stopped;
  for (const auto& [one, other] : cuts_)
    if (roster.IsLiving(one) && roster.IsLiving(other) && roster.AreBeside(one, other)) stopped.insert(other);
  return stopped;
}

}  // namespace ringtrain
