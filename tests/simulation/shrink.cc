#include "shrink.h"

#include <algorithm>

#include "world.h"

namespace ringtrain {
namespace simulation {
namespace {

bool Fails(const Case& smaller) {
  const Plan plan = MakePlan(smaller);
  return !plan.ranks.empty() && !Simulate(plan).violation.empty();
}

// Leaves out parts of what is kept: halves of it, then quarters, down to single ones. True if any could go.
bool LeaveOut(const std::vector<int>& all, Case::Kept Case::* kept, Case* smallest) {
  std::set<int> left(all.begin(), all.end());
  for (size_t length = std::max<size_t>(all.size() / 2, 1); length > 0; length /= 2)
    for (size_t first = 0; first < all.size(); first += length) {
      std::set<int> fewer = left;
      for (size_t i = first; i < std::min(first + length, all.size()); ++i) fewer.erase(all[i]);
      Case candidate = *smallest;
      candidate.*kept = fewer;
      if (fewer.size() == left.size() || !Fails(candidate)) continue;
      left = fewer;
      *smallest = candidate;
    }
  return left.size() < all.size();
}

}  // namespace

Case Shrink(const Case& from) {
  Case smallest = from;
  for (bool smaller = true; smaller;) {
    const Plan plan = MakePlan(smallest);
    std::vector<int> faults, turns;
    for (const Fault& fault : plan.faults) faults.push_back(fault.number);
    for (const Turn& turn : plan.turns) turns.push_back(turn.number);
    smaller = LeaveOut(faults, &Case::faults, &smallest);
    smaller |= LeaveOut(turns, &Case::turns, &smallest);
    if (plan.ranks.size() > 1) smaller |= LeaveOut(plan.ranks, &Case::ranks, &smallest);
  }
  return smallest;
}

}  // namespace simulation
}  // namespace ringtrain
