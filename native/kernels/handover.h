// Copies into memory that another processor has read and reads again, such as a slot of a window; by whichever stores
// this machine does them faster.
//
// Plain stores must take each line away from the processor that has read it. Between cores that share a cache this
// costs 7 ns a line, and the reader finds the line in that cache; between others (of two sockets, of two core
// complexes) 28 ns, while streaming stores, which write around the caches, cost 2 ns wherever the reader is, and the
// reader some 4 ns more (measured, AMD Zen 4). Where ranks run is the system's to say, and changes; so both ways are
// timed now and then, and the plain way is watched.
#ifndef RINGTRAIN_KERNELS_HANDOVER_H_
#define RINGTRAIN_KERNELS_HANDOVER_H_

#include <cstddef>
#include <cstring>

#include "base/clock.h"

namespace ringtrain {

// Copies like memcpy, and by streaming stores where the processor has them. What it has written can be seen by others
// before any later store of this thread.
void StreamingCopy(char* to, const char* from, size_t bytes);

// Which stores the next copy takes. Pure: it is told how long each one has taken. A few copies of each kind in kPeriod
// are trials; the fastest of a kind counts, since the others may have been interrupted. The very first copies are none:
// they touch fresh pages, which would be taken for the cost of plain stores. Between trials plain stores are watched:
// where ranks have moved to cores far from each other they take ten times as long, which a period would repeat.
class StoreChoice {
 public:
  static constexpr int kTrials = 4, kPeriod = 1024, kFirst = 64;
  static constexpr int kWatched = 4;  // one plain copy in so many is timed; kTrials of them are a judgement
  // What plain stores may cost more, since the reader finds their lines sooner.
  static constexpr double kNanosecondsMore = 0.2;  // a byte

  bool streams() const { return turn_ < kTrials ? false : turn_ < 2 * kTrials ? true : streams_; }
  // Whether the next copy is to be timed.
  bool timed() const { return trial() || (!streams_ && streaming_ > 0 && turn_ % kWatched == 0); }
  void Took(size_t bytes, Nanoseconds nanoseconds) {
    const double each = static_cast<double>(nanoseconds) / static_cast<double>(bytes);
    double& fastest = streams() ? streaming_ : plain_;
    if (taken_ == 0 || each < fastest) fastest = each;
    if (++taken_ < kTrials) return;
    taken_ = 0;
    if (streaming_ > 0) streams_ = plain_ > streaming_ + kNanosecondsMore;
  }
  // A copy is done.
  void Next() {
    if (++turn_ < kPeriod) return;
    turn_ = taken_ = 0;
  }

 private:
  bool trial() const { return turn_ < 2 * kTrials; }

  int turn_ = kPeriod - kFirst;
  int taken_ = 0;  // of the kTrials that are compared
  bool streams_ = false;
  double plain_ = 0, streaming_ = 0;  // nanoseconds a byte; 0: not known yet
};

class Handover {
 public:
  static constexpr size_t kLeast = 16 << 10;  // bytes; less is latency more than rate, and is left in the cache

  // No overlap.
  void Copy(char* to, const char* from, size_t bytes) {
    if (bytes < kLeast) {
      std::memcpy(to, from, bytes);
      return;
    }
    const bool timed = choice_.timed();
    const Nanoseconds begin = timed ? Now() : 0;
    if (choice_.streams())
      StreamingCopy(to, from, bytes);
    else
      std::memcpy(to, from, bytes);
    if (timed) choice_.Took(bytes, Now() - begin);
    choice_.Next();
  }

 private:
  StoreChoice choice_;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_KERNELS_HANDOVER_H_
