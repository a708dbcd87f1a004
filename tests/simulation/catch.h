// What every simulator does with the mutants that it is linked with.
#ifndef RINGTRAIN_TESTS_SIMULATION_CATCH_H_
#define RINGTRAIN_TESTS_SIMULATION_CATCH_H_

#include <functional>
#include <string>

namespace ringtrain {
namespace simulation {

// False if there is none of that name.
bool WakeMutant(const std::string& name);

// Wakes one after the other and asks whether it is caught, each in a process of its own, because some read what is not
// there. The exit code: 0 if all are.
int CatchEach(const std::function<bool()>& caught);

}  // namespace simulation
}  // namespace ringtrain
#endif  // RINGTRAIN_TESTS_SIMULATION_CATCH_H_
