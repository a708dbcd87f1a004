#include "agree/undelivered.h"

#include <algorithm>
#include <iterator>

namespace ringtrain {

bool UndeliveredFailures::Take(int member, const std::string& name, Refusal* failure) {
  auto debt = of_.find(name);
  if (debt == of_.end()) return false;
  auto& members = debt->second;
  auto found = std::find_if(members.begin(), members.end(), [&](const auto& owed) { return owed.first == member; });
  if (found == members.end()) return false;
  *failure = std::move(found->second);
  members.erase(found);
  if (members.empty()) of_.erase(debt);
  return true;
}

void UndeliveredFailures::Cancel(int member) {
  for (auto debt = of_.begin(); debt != of_.end();) {
    auto& members = debt->second;
    members.erase(
        std::remove_if(members.begin(), members.end(), [&](const auto& owed) { return owed.first == member; }),
        members.end());
    debt = members.empty() ? of_.erase(debt) : std::next(debt);
  }
}

}  // namespace ringtrain
