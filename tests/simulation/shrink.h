// Shrink: a smaller case that still goes wrong.
#ifndef RINGTRAIN_TESTS_SIMULATION_SHRINK_H_
#define RINGTRAIN_TESTS_SIMULATION_SHRINK_H_

#include "plan.h"

namespace ringtrain {
namespace simulation {

// Leaves out faults, turns and ranks, many at first and then one by one, for as long as something is violated. `from`
// must be.
Case Shrink(const Case& from);

}  // namespace simulation
}  // namespace ringtrain
#endif  // RINGTRAIN_TESTS_SIMULATION_SHRINK_H_
