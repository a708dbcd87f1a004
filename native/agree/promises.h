// Promises: how many batches of its process set's schedule (schedule.h) each member has promised, as far as one member
// knows. Sans-I/O.
//
// Within a host the counters lie in the host's memory, where each member writes its own and reads the others'. Of a set
// on several hosts the lowest member of each host leads: it tells its neighbours, the leaders next to it in a tree of
// hosts, the least counter on its side of the tree, hears theirs, and writes for its host how many batches all members
// have promised. Counters only rise, so what is lost between two looks is made up by the second.
#ifndef RINGTRAIN_AGREE_PROMISES_H_
#define RINGTRAIN_AGREE_PROMISES_H_

#include <cstdint>
#include <deque>
#include <vector>

#include "base/clock.h"

namespace ringtrain {

// One member's counters in its host's memory.
struct PromiseSign {
  uint32_t schedule = 0;  // of which; 0: none yet
  uint64_t promised = 0;
  uint64_t agreed = 0;  // a leader's: so many all members have promised
  Nanoseconds at = 0;   // of the last promise

  bool operator==(const PromiseSign& that) const {
    return schedule == that.schedule && promised == that.promised && agreed == that.agreed;
  }
};

// Who came last to a batch, of those of whom a member knows.
struct LastPromise {
  int member = 0;
  Nanoseconds at = 0, before = 0;  // its promise, and the last but one
};

class Promises {
 public:
  static constexpr int kFanout = 8;
  // hosts: by member, any numbers that are equal for members of one host. fanout: hosts below one in the tree, fewer in
  // simulations, whose worlds are small.
  Promises(const std::vector<int>& hosts, int me, int fanout);

  // Members of this host, ascending. The first leads.
  const std::vector<int>& here() const { return here_; }
  bool leads() const { return here_[0] == me_; }
  bool one_host() const { return one_host_; }

  // From now on counters are those of this schedule, which has a number above those before.
  void Begin(uint32_t schedule);
  // What lies in the host's memory, by place in here().
  void See(const std::vector<PromiseSign>& signs);
  // A neighbour's words. last and gap: as of a Frame.
  void Hear(Nanoseconds now, int neighbour, uint32_t schedule, uint64_t count, int last, Nanoseconds gap);

  uint64_t here_promised() const { return here_promised_; }  // the least counter of this host
  uint64_t agreed() const { return agreed_; }                // the least of all
  struct Told {
    int member;
    uint64_t count, before;  // the latter was told before
  };
  // What neighbours have to be told by now. Each once.
  std::vector<Told> TakeNews();
  // The next batch starts here. Returns who came last to it: on the coordinator of all, on a leader of its side.
  LastPromise TakeLast();
  // Of the batches below `count`, the last one that has not started.
  LastPromise LastBelow(uint64_t count) const;

 private:
  struct Neighbour {
    int member;
    bool above;  // on the way to the coordinator
    uint32_t schedule = 0;
    uint64_t theirs = 0, told = 0;
  };
  uint64_t Theirs(const Neighbour& neighbour) const;
  void Note(uint64_t from, uint64_t to, int member, Nanoseconds at, Nanoseconds before);
  void Agree(uint64_t told_by_leader);

  const int me_;
  bool one_host_ = true;
  std::vector<int> here_;
  std::vector<Neighbour> neighbours_;  // of a leader
  uint32_t schedule_ = 0;
  std::vector<uint64_t> counters_;  // by place in here_
  uint64_t here_promised_ = 0, agreed_ = 0;
  uint64_t taken_ = 0;            // batches that have started
  std::deque<LastPromise> last_;  // of those that have not
};

}  // namespace ringtrain
#endif  // RINGTRAIN_AGREE_PROMISES_H_
