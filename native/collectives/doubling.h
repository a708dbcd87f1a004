// Exchanges between many hosts in log2(H) steps, for what is small (Bruck, Ho, Kipnis, Upfal and Weathersby, 1997).
//
// In step k each host sends to the one 2^k behind it, and receives from the one 2^k before it. A gather doubles what
// each has; five hosts, parts a to e:
//
//     start    step 0    step 1      step 2
//     0: a     a e       a e d c     a e d c b
//     1: b     b a       b a e d     b a e d c
//     ...
//
// A scatter hands each host what all others have for it. Block j, for the host j behind, travels in the steps k of
// which j has the bit: block 5 to the host 1 behind, and from there to the one 4 behind that one. It sends log2(H) / 2
// times the bytes of messages to each host at once, in log2(H) messages for H - 1. Nothing is added on the way, so
// additions can have any order.
#ifndef RINGTRAIN_COLLECTIVES_DOUBLING_H_
#define RINGTRAIN_COLLECTIVES_DOUBLING_H_

#include <vector>

#include "collectives/host_messages.h"
#include "collectives/image.h"

namespace ringtrain {

class Doubling {
 public:
  Doubling(HostMessages* messages, int hosts, int me) : messages_(messages), hosts_(hosts), me_(me) {}

  int steps() const;

  // Of each host's part: what this host has for it, which is in the image, goes there.
  void BeginScatter(const Image& image);
  Status StartScatter(int step);
  void FinishScatter(int step);
  // What came from the host that is so far before this one, or this host's own at 0, in the form of this host's part.
  char* Came(int distance) { return blocks_.data() + static_cast<size_t>(distance) * stride_; }

  // Of each host's part, which it has in the image: all come there.
  Status StartGather(int step, const Image& image);
  // Of so many bytes that each host has at `own`: those of the host at a distance before this one come to
  // others + bytes * (distance - 1).
  Status StartGatherOfEqual(int step, const char* own, char* others, size_t bytes);

 private:
  int Behind(int distance) const { return (me_ + distance) % hosts_; }
  int Before(int distance) const { return (me_ + hosts_ - distance) % hosts_; }
  // Of a scatter: calls what(block) for those that a step carries.
  template <typename What>
  void ForEachOnTheWay(int step, What what) const;
  // Of a gather: blocks that a step carries.
  int Carried(int step) const;
  // Bytes of block j before or after so many steps, which is for the host at the rest of its way.
  size_t Bytes(int from, int block, int steps_done) const;

  HostMessages* const messages_;
  const int hosts_, me_;
  const Image* image_ = nullptr;  // of the scatter under way
  size_t stride_ = 0;             // of blocks
  std::vector<char> blocks_;      // by distance
  std::vector<char> leaving_, coming_;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_COLLECTIVES_DOUBLING_H_
