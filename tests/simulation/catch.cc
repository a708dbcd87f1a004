#include "catch.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>

#include "mutants.h"

namespace ringtrain {
namespace simulation {

bool WakeMutant(const std::string& name) {
  for (size_t number = 0; number < kMutants.size(); ++number)
    if (kMutants[number] == name) awake_mutant = static_cast<int>(number);
  return awake_mutant >= 0;
}

int CatchEach(const std::function<bool()>& caught) {
  int survivors = 0;
  for (size_t number = 0; number < kMutants.size(); ++number) {
    std::printf("%-50s ", kMutants[number].c_str());
    std::fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
      awake_mutant = static_cast<int>(number);
      _exit(caught() ? 0 : 1);
    }
    int status = 0;
    waitpid(child, &status, 0);
    if (WIFSIGNALED(status)) std::printf("caught by signal %d\n", WTERMSIG(status));
    if (WIFEXITED(status) && WEXITSTATUS(status) != 0) std::printf("survives\n"), ++survivors;
  }
  std::printf("%zu mutants, %d survive\n", kMutants.size(), survivors);
  return survivors == 0 && !kMutants.empty() ? 0 : 1;
}

}  // namespace simulation
}  // namespace ringtrain
