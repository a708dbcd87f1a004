// ProcessSetTable: the process sets of a context, their members, and the lane of each, which keeps their messages
// apart. Any thread. All ranks add and remove the same sets in the same order, so a set has the same lane on all of
// them.
#ifndef RINGTRAIN_WORLD_PROCESS_SETS_H_
#define RINGTRAIN_WORLD_PROCESS_SETS_H_

#include <map>
#include <set>
#include <vector>

#include "base/mutex.h"

namespace ringtrain {

class ProcessSetTable {
 public:
  // Gives the set the lowest lane that none has.
  int Add(int process_set, std::vector<int> members) {
    MutexLock lock(mutex_);
    int lane = 0;
    while (lanes_.count(lane) > 0) ++lane;
    lanes_.insert(lane);
    sets_[process_set] = {std::move(members), lane};
    return lane;
  }
  void Remove(int process_set) {
    MutexLock lock(mutex_);
    auto found = sets_.find(process_set);
    if (found == sets_.end()) return;
    lanes_.erase(found->second.lane);
    sets_.erase(found);
  }
  // Members by process set.
  std::map<int, std::vector<int>> All() const {
    MutexLock lock(mutex_);
    std::map<int, std::vector<int>> all;
    for (const auto& [process_set, set] : sets_) all[process_set] = set.members;
    return all;
  }
  int count() const {
    MutexLock lock(mutex_);
    return static_cast<int>(sets_.size());
  }
  // Global ranks, ascending; empty if there is no such set.
  std::vector<int> Members(int process_set) const {
    MutexLock lock(mutex_);
    auto found = sets_.find(process_set);
    return found == sets_.end() ? std::vector<int>() : found->second.members;
  }
  // The oldest set with these ranks, ascending; -1 if there is none.
  int Find(const std::vector<int>& members) const {
    MutexLock lock(mutex_);
    for (const auto& [process_set, set] : sets_)
      if (set.members == members) return process_set;
    return -1;
  }

 private:
  struct Set {
    std::vector<int> members;
    int lane;
  };

  mutable Mutex mutex_;
  std::map<int, Set> sets_ RT_GUARDED_BY(mutex_);
  std::set<int> lanes_ RT_GUARDED_BY(mutex_);  // those in use
};

}  // namespace ringtrain
#endif  // RINGTRAIN_WORLD_PROCESS_SETS_H_
