// UndeliveredFailures: which members have yet to hear that an operation has failed: they do when they submit it.
#ifndef RINGTRAIN_AGREE_UNDELIVERED_H_
#define RINGTRAIN_AGREE_UNDELIVERED_H_

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "agree/frame.h"

namespace ringtrain {

class UndeliveredFailures {
 public:
  bool empty() const { return of_.empty(); }
  void Add(const std::string& name, int member, const Refusal& failure) { of_[name].emplace_back(member, failure); }
  // The oldest failure that the member has not heard of, if there is one for that name.
  bool Take(int member, const std::string& name, Refusal* failure);
  // The member has joined: all that it submitted before has arrived, so what it has not asked about it left out.
  void Cancel(int member);

 private:
  std::map<std::string, std::vector<std::pair<int, Refusal>>> of_;  // by name: members, in the order of the failures
};

}  // namespace ringtrain
#endif  // RINGTRAIN_AGREE_UNDELIVERED_H_
