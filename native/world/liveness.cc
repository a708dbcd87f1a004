#include "world/liveness.h"

#include <algorithm>
#include <climits>
#include <cstdio>

#include "base/decimal.h"
#include "base/ranks.h"

namespace ringtrain {
namespace {

constexpr Nanoseconds kLongestPeriod = 500 * INT64_C(1000000);
// Between two looks of a process that runs, however many others want its cores.
constexpr Nanoseconds kLongestGap = 7500 * INT64_C(1000000);
// Of ranks that take the state over: two looks of theirs at least.
constexpr Nanoseconds kJoinersBound = 4 * kLongestPeriod;
// A bound of silence spans so many looks of a rank that waits for nobody and sleeps twice as long.
constexpr int kPeriodsInBound = 10;

std::string SecondsText(double seconds) { return Decimal("%g s", seconds); }

uint64_t SignOf(const std::vector<int>& ranks, const SignsOfLife& seen) {
  uint64_t count = 0;  // between hosts of tensors too: on a slow wire a beat waits its turn behind them
  for (int rank : ranks) count += seen[rank].count;
  return count;
}

}  // namespace

bool SignOfLife::died() const { return ended && !left; }

Liveness::Liveness(const World& world, double dead_after_seconds)
    : world_(world),
      dead_after_seconds_(dead_after_seconds),
      bound_(dead_after_seconds > 0 ? static_cast<Nanoseconds>(dead_after_seconds * 1e9) : kNever),
      period_(std::min(kLongestPeriod, bound_ / kPeriodsInBound)),
      joins_from_(INT_MAX) {
  for (int rank : world.my_host())
    if (rank != world.rank) ListenTo({rank}, true);
  const int hosts = static_cast<int>(world.hosts.size()), mine = world.host_of[world.rank];
  for (int distance = 1; distance < hosts && world.local_rank() == 0; distance *= 2) {
    listeners_.push_back(world.hosts[(mine + distance) % hosts][0]);
    ListenTo(world.hosts[(mine + hosts - distance) % hosts], false);
  }
  if (world.size == 1) next_look_ = kNever;
}

Status Liveness::Look(Nanoseconds now, const SignsOfLife& seen) {
  // Whoever was stopped itself, as by Ctrl-Z of the whole job, has not listened: the others get the time once more.
  const auto listened = [&](const Peer& peer) { return last_look_ != 0 && now - last_look_ < BoundOf(peer) / 2; };
  stood_still_ = last_look_ != 0 && now - last_look_ >= kLongestGap;
  if (last_look_ != 0 && IsMissed(now - last_look_)) woke_ = now;
  Status silent;
  for (Peer& peer : peers_) {
    if (!listened(peer)) peer.changed = now;
    if (silent.ok()) silent = JudgeSilence(now, seen, &peer);
  }
  last_look_ = now;
  next_look_ = now + period_;
  const Status ended = JudgeEnds(seen);
  return ended.ok() ? silent : ended;
}

std::vector<int> Liveness::Unheard(Nanoseconds now) const {
  std::vector<int> unheard = SilentFor(now, 2);
  if (woke_ != kNever && now - woke_ < bound_) unheard.push_back(world_.rank);
  return unheard;
}

std::vector<int> Liveness::SilentFor(Nanoseconds now, int part) const {
  std::vector<int> silent;
  if (last_look_ == 0 || now - last_look_ >= bound_ / part) return silent;
  for (const Peer& peer : peers_)
    if (now - peer.changed >= BoundOf(peer) / part) silent.push_back(peer.ranks[0]);
  return silent;
}

// Another host as its lowest rank, behind which none is that does not join if that does.
Nanoseconds Liveness::BoundOf(const Peer& peer) const {
  const bool joins = peer.ranks[0] >= joins_from_;
  return joins && bound_ != kNever ? std::min(bound_, kJoinersBound) : bound_;
}

void Liveness::Forget(int rank) {
  peers_.erase(std::remove_if(peers_.begin(), peers_.end(), [rank](const Peer& peer) { return peer.ranks[0] == rank; }),
               peers_.end());
}

// All that have ended since the last look: one of them may have, or have been ended, because of another, and which one
// was first cannot be seen.
Status Liveness::JudgeEnds(const SignsOfLife& seen) const {
  std::vector<int> ended;
  for (const Peer& peer : peers_) {
    if (peer.local && seen[peer.ranks[0]].died()) ended.push_back(peer.ranks[0]);
  }
  if (ended.empty()) return {};
  if (ended.size() == 1)
    return Status::PeerLost(Subject(ended) +
                            ": expected it to live until shutdown() but its process has ended. Look for its own "
                            "last words, and for its exit code or signal in what the launcher prints.");
  return Status::PeerLost(Subject(ended) +
                          ": expected them to live until shutdown() but their processes have ended. Look for their "
                          "own last words, and for their exit codes or signals in what the launcher prints.");
}

Status Liveness::JudgeSilence(Nanoseconds now, const SignsOfLife& seen, Peer* peer) const {
  if (peer->local && seen[peer->ranks[0]].left) return {};
  const uint64_t sign = SignOf(peer->ranks, seen);
  if (sign != peer->sign) {
    peer->sign = sign;
    peer->changed = now;
  }
  const Nanoseconds bound = BoundOf(*peer);
  if (bound == kNever || now - peer->changed < bound) return {};
  return Status::PeerLost(
      Subject(peer->ranks) + ": expected a sign of life every second but heard none for " +
      SecondsText(std::min(dead_after_seconds_, static_cast<double>(bound) / 1e9)) + ". " +
      (peer->local ? "It is stopped" : "The host is down or stopped, or the network to it is cut") +
      "; to compute for long is no cause. RINGTRAIN_DEAD_AFTER_SECONDS sets the bound, 0 lifts it.");
}

Status Liveness::ConnectionLost(const LostPeer& lost) const {
  const std::string text =
      Subject({lost.rank}) + ": the connection to it must last until shutdown(), but was lost: " + lost.cause + ". ";
  if (lost.loses_large)
    return Status::PeerLost(
        text + "Small packets pass between host '" + world_.host_names[world_.rank] +
        "' and it, large ones do not: MTU. Lower that of the interfaces on these hosts (ip link set "
        "dev ... mtu 1400), or let ICMP through.");
  // Within a host no network can break it.
  const bool here = world_.host_of[lost.rank] == world_.host_of[world_.rank];
  const char* const advice =
      here ? "It runs on this host, so its process has ended: look for its own last words, and for its exit code or "
             "signal in what the launcher prints; after signal 9 look at the memory of this host (dmesg)."
           : "It has ended, or the network to its host is cut: look for its own last words, and for its exit code or "
             "signal in what the launcher prints; if there are none, look at that host and at the network to it.";
  return Status::PeerLost(text + advice);
}

std::string Liveness::Subject(const std::vector<int>& ranks) const {
  return RanksText(ranks) + " on host '" + world_.host_names[ranks[0]] + "'";
}

}  // namespace ringtrain
