// The planted mutants that this executable has in it. mutants.py writes them into copies of the core's sources;
// `simulate` is linked with the sources themselves and has none.
#ifndef RINGTRAIN_TESTS_SIMULATION_MUTANTS_H_
#define RINGTRAIN_TESTS_SIMULATION_MUTANTS_H_

#include <string>
#include <vector>

namespace ringtrain {
namespace simulation {

extern const std::vector<std::string> kMutants;
// The mutant that is awake, as a place in kMutants; none is at -1.
extern int awake_mutant;

}  // namespace simulation
}  // namespace ringtrain
#endif  // RINGTRAIN_TESTS_SIMULATION_MUTANTS_H_
