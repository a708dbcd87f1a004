// Lateness: who keeps the others waiting. The coordinator of a process set sees who submits an operation last, and how
// long after the last but one; its driver adds that here, and any thread reads it.
#ifndef RINGTRAIN_OBSERVE_LATENESS_H_
#define RINGTRAIN_OBSERVE_LATENESS_H_

#include <map>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/mutex.h"

namespace ringtrain {

// How often a rank was the last to submit, and how long all the others had to wait for it alone.
struct Late {
  int rank = 0;
  int times = 0;
  Nanoseconds total = 0, longest = 0;
  std::string longest_name = {};  // of the operation

  void Add(const Late& more) {
    times += more.times;
    total += more.total;
    if (more.longest < longest) return;
    longest = more.longest;
    longest_name = more.longest_name;
  }
};

class LatenessTable {
 public:
  void Add(const std::vector<Late>& late) {
    MutexLock lock(mutex_);
    for (const Late& each : late) {
      Late& known = by_rank_[each.rank];
      known.rank = each.rank;
      known.Add(each);
    }
  }
  // By rank.
  std::vector<Late> All() const {
    MutexLock lock(mutex_);
    std::vector<Late> all;
    for (const auto& entry : by_rank_) all.push_back(entry.second);
    return all;
  }

 private:
  mutable Mutex mutex_;
  std::map<int, Late> by_rank_ RT_GUARDED_BY(mutex_);
};

}  // namespace ringtrain
#endif  // RINGTRAIN_OBSERVE_LATENESS_H_
