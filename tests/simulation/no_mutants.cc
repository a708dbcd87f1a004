#include "mutants.h"

namespace ringtrain {
namespace simulation {

const std::vector<std::string> kMutants;
int awake_mutant = -1;

}  // namespace simulation
}  // namespace ringtrain
