// ProcessSetTable: the process sets of a context and their members. Any thread.
#ifndef RINGTRAIN_CORE_PROCESS_SETS_H_
#define RINGTRAIN_CORE_PROCESS_SETS_H_

#include <map>
#include <mutex>
#include <vector>

namespace ringtrain {

class ProcessSetTable {
 public:
  void Add(int process_set, std::vector<int> members) {
    std::lock_guard<std::mutex> lock(mutex_);
    members_[process_set] = std::move(members);
  }
  void Remove(int process_set) {
    std::lock_guard<std::mutex> lock(mutex_);
    members_.erase(process_set);
  }
  // Global ranks, ascending; empty if there is no such set.
  std::vector<int> Members(int process_set) const {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = members_.find(process_set);
    return found == members_.end() ? std::vector<int>() : found->second;
  }

 private:
  mutable std::mutex mutex_;
  std::map<int, std::vector<int>> members_;  // guarded by mutex_
};

}  // namespace ringtrain
#endif  // RINGTRAIN_CORE_PROCESS_SETS_H_
