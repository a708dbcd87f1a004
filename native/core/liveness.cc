#include "core/liveness.h"

#include <algorithm>
#include <cstdio>

#include "base/decimal.h"
#include "base/ranks.h"

namespace ringtrain {
namespace {

constexpr Nanoseconds kLongestPeriod = 500 * INT64_C(1000000);
// Between two looks of a process that runs, however many others want its cores.
constexpr Nanoseconds kLongestGap = 7500 * INT64_C(1000000);
// A bound of silence spans so many looks of a rank that waits for nobody and sleeps twice as long.
constexpr int kPeriodsInBound = 10;

std::string SecondsText(double seconds) { return Decimal("%g s", seconds); }

uint64_t SignOf(const std::vector<int>& ranks, const SignsOfLife& seen) {
  uint64_t count = 0;  // between hosts of tensors too: on a slow wire a beat waits its turn behind them
  for (int rank : ranks) count += seen[rank].count;
  return count;
}

}  // namespace

Liveness::Liveness(const World& world, double dead_after_seconds)
    : world_(world),
      dead_after_seconds_(dead_after_seconds),
      bound_(dead_after_seconds > 0 ? static_cast<Nanoseconds>(dead_after_seconds * 1e9) : kNever),
      period_(std::min(kLongestPeriod, bound_ / kPeriodsInBound)) {
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
  const bool listened = last_look_ != 0 && now - last_look_ < bound_ / 2;
  stood_still_ = last_look_ != 0 && now - last_look_ >= kLongestGap;
  Status verdict;
  for (Peer& peer : peers_) {
    if (!listened) peer.changed = now;
    if (verdict.ok()) verdict = Judge(now, seen, &peer);
  }
  last_look_ = now;
  next_look_ = now + period_;
  return verdict;
}

std::vector<int> Liveness::SilentFor(Nanoseconds now, Nanoseconds time) const {
  std::vector<int> silent;
  if (last_look_ == 0 || now - last_look_ >= time) return silent;
  for (const Peer& peer : peers_)
    if (now - peer.changed >= time) silent.push_back(peer.ranks[0]);
  return silent;
}

void Liveness::Forget(int rank) {
  peers_.erase(std::remove_if(peers_.begin(), peers_.end(), [rank](const Peer& peer) { return peer.ranks[0] == rank; }),
               peers_.end());
}

Status Liveness::Judge(Nanoseconds now, const SignsOfLife& seen, Peer* peer) const {
  const SignOfLife& first = seen[peer->ranks[0]];
  if (peer->local && first.left) return {};
  if (peer->local && first.died)
    return Status::PeerLost(Subject(peer->ranks) +
                            ": expected it to live until shutdown() but its process has ended. Look for its own "
                            "last words, and for its exit code or signal in what the launcher prints.");
  const uint64_t sign = SignOf(peer->ranks, seen);
  if (sign != peer->sign) {
    peer->sign = sign;
    peer->changed = now;
  }
  if (bound_ == kNever || now - peer->changed < bound_) return {};
  return Status::PeerLost(
      Subject(peer->ranks) + ": expected a sign of life every second but heard none for " +
      SecondsText(dead_after_seconds_) + ". " +
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
