// Liveness: judges by their signs of life the ranks that this rank listens to, and says who is lost. Sans-I/O: time and
// signs are handed in, so the same code runs in a process and in simulated worlds. The protocol (protocol.h) asks it to
// look; a verdict ends the world.
//
// Within a host every rank listens to every other, through shared memory: a process that has ended is found out by the
// lock that the kernel let go of, one that stands still by its beat. Between hosts the lowest rank of each beats for
// its host, to the hosts 1, 2, 4, ... further on, so each hears of few and a cut is noticed on both of its sides. All
// of this is native: a rank that computes in Python for minutes, or holds the GIL, still beats.
#ifndef RINGTRAIN_WORLD_LIVENESS_H_
#define RINGTRAIN_WORLD_LIVENESS_H_

#include <string>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "transport/wire.h"
#include "transport/world.h"

namespace ringtrain {

// What a rank sees of another's life.
struct SignOfLife {
  bool left = false;   // it left of its own will; of a rank of this host
  bool ended = false;  // its process has, before or after that; of a rank of this host
  uint64_t count = 0;  // of a rank of this host: how often it has beaten; of another: how many frames and tensors came
  bool died() const;
};
using SignsOfLife = std::vector<SignOfLife>;  // by rank

class Liveness {
 public:
  // dead_after_seconds: silence that counts as death; 0: none does.
  Liveness(const World& world, double dead_after_seconds);

  // When this rank must beat and Look, if it waits for others; kNever in a world of one.
  Nanoseconds next_look() const { return next_look_; }
  // How long this rank may sleep while it waits for nobody.
  Nanoseconds idle_period() const { return 2 * period_; }

  // Not ok: who is dead.
  Status Look(Nanoseconds now, const SignsOfLife& seen);

  // Ranks from this one on take over the state of the others, who wait for them: silence of these counts sooner.
  void AwaitStateFrom(int first) { joins_from_ = first; }

  // Whether this process was stopped before the last Look, as by Ctrl-Z of the whole job.
  bool stood_still() const { return stood_still_; }

  // Of whom nothing was heard for the bound of silence, or for half of it; another host by its lowest rank, which
  // speaks for it. Nobody if this rank itself has not looked: it is then one that nobody has heard, as it says for a
  // while.
  std::vector<int> Silent(Nanoseconds now) const { return SilentFor(now, 1); }
  std::vector<int> Unheard(Nanoseconds now) const;
  // Whether a rank has not looked for so long that others may miss it.
  bool IsMissed(Nanoseconds unseen) const { return unseen >= bound_ / 2; }

  // The wire has lost its connection with a rank that had not left. How the error says that.
  Status ConnectionLost(const LostPeer& lost) const;

  // The lowest ranks of the hosts that listen to this one; empty unless this rank beats for its host.
  const std::vector<int>& listeners() const { return listeners_; }
  // The ranks of this rank's host leave of their own will, and beat no longer.
  void Forget(int rank);

 private:
  struct Peer {  // a rank of this host, or another host as a whole
    std::vector<int> ranks;
    bool local;
    uint64_t sign = 0;        // as last seen
    Nanoseconds changed = 0;  // when it was seen to change
  };
  void ListenTo(std::vector<int> ranks, bool local) { peers_.push_back({std::move(ranks), local}); }
  std::vector<int> SilentFor(Nanoseconds now, int part) const;
  Nanoseconds BoundOf(const Peer& peer) const;
  Status JudgeEnds(const SignsOfLife& seen) const;
  Status JudgeSilence(Nanoseconds now, const SignsOfLife& seen, Peer* peer) const;
  std::string Subject(const std::vector<int>& ranks) const;

  const World& world_;
  const double dead_after_seconds_;
  Nanoseconds bound_;   // of silence
  Nanoseconds period_;  // between two looks
  Nanoseconds next_look_ = 0, last_look_ = 0;
  Nanoseconds woke_ = kNever;  // when it looked again after it had not for half the bound
  bool stood_still_ = false;
  int joins_from_;
  std::vector<Peer> peers_;
  std::vector<int> listeners_;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_WORLD_LIVENESS_H_
