// The part that all fuzzers share; see fuzz.h.
#include "fuzz.h"

#include <cstdio>
#include <cstdlib>
#include <fstream>

namespace ringtrain {

void Expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "expected: %s\n", what);
  std::abort();
}

}  // namespace ringtrain

// libFuzzer calls it before anything else.
extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  if (*argc != 3 || std::string((*argv)[1]) != "--write-seeds") return 0;
  int number = 0;
  for (const std::string& seed : ringtrain::Seeds())
    std::ofstream((*argv)[2] + ("/seed" + std::to_string(number++))) << seed;
  std::exit(0);
}
