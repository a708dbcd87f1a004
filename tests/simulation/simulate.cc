// Simulates worlds of negotiators, seed after seed, and shrinks what goes wrong.
//
//   simulate [--seeds FIRST-LAST] [--size N | N-M] [--seconds S] [--mutant NAME]   seeds 1-1000, sizes as they draw
//   them simulate --case 'seed=7 size=0 without-turns=3' [--trace] [--mutant NAME]      one, as a failure prints it
//   simulate --cases FILE                                                          one on each line; # starts a comment
//   simulate --mutants [--seeds ...] [--size ...]                                  until each mutant is caught
//
// The exit code is 0 if nothing was violated or, of --mutants, if all were caught. With --seconds, seeds follow until
// the time is up.
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>

#include "catch.h"
#include "random.h"
#include "seeds.h"
#include "shrink.h"
#include "world.h"

namespace ringtrain {
namespace simulation {
namespace {

struct Arguments {
  uint64_t first = 1, last = 1000;
  int least_size = 0, most_size = 0;  // 0: the seed chooses
  double seconds = 0;
  bool trace = false, all_mutants = false;
  std::string one_case, cases;
};

int UsageError(const char* argument) {
  std::fprintf(stderr, "simulate: '%s' is not understood; the head of tests/simulation/simulate.cc lists the options\n",
               argument);
  return 2;
}

bool ParseRange(const char* text, uint64_t* first, uint64_t* last) {
  char* end;
  *first = *last = std::strtoull(text, &end, 10);
  if (*end == '-') *last = std::strtoull(end + 1, &end, 10);
  return *end == 0 && *first <= *last;
}

bool ParseSize(const char* text, Arguments* arguments) {
  uint64_t least, most;
  if (!ParseRange(text, &least, &most) || most > 4096) return false;
  arguments->least_size = static_cast<int>(least);
  arguments->most_size = static_cast<int>(most);
  return true;
}

// The first argument that is not understood, or nullptr.
const char* Parse(int argc, char** argv, Arguments* arguments) {
  for (int i = 1; i < argc; ++i) {
    const char* name = argv[i];
    const auto is = [&](const char* option) { return std::strcmp(name, option) == 0; };
    if (is("--trace")) {
      arguments->trace = true;
      continue;
    }
    if (is("--mutants")) {
      arguments->all_mutants = true;
      continue;
    }
    if (++i == argc) return name;
    const char* value = argv[i];
    if (is("--seconds"))
      arguments->seconds = std::atof(value);
    else if (is("--case"))
      arguments->one_case = value;
    else if (is("--cases"))
      arguments->cases = value;
    else if (is("--seeds") && ParseRange(value, &arguments->first, &arguments->last))
      continue;
    else if (is("--size") && ParseSize(value, arguments))
      continue;
    else if (is("--mutant") && WakeMutant(value))
      continue;
    else
      return value;
  }
  return nullptr;
}

Case CaseOf(uint64_t seed, const Arguments& arguments) {
  Case drawn;
  drawn.seed = seed;
  if (arguments.most_size > 0)
    drawn.size = arguments.least_size +
                 static_cast<int>(Mix(seed) % static_cast<uint64_t>(arguments.most_size - arguments.least_size + 1));
  return drawn;
}

void Report(const Case& failed) {
  const Case small = Shrink(failed);
  const Plan plan = MakePlan(small);
  std::printf("case %s: %s\n", failed.Text().c_str(), Simulate(MakePlan(failed)).violation.c_str());
  std::printf("shrunk to: %s\n%s\n%s", small.Text().c_str(), Simulate(plan).violation.c_str(), plan.Text().c_str());
  std::printf("bin/simulate --case '%s' --trace replays it\n", small.Text().c_str());
}

bool RunOne(const Case& one, bool trace) {
  const Result result = Simulate(MakePlan(one), trace);
  std::printf("case %s: %" PRId64 " events, digest %016" PRIx64 "%s%s\n", one.Text().c_str(), result.events,
              result.digest, result.violation.empty() ? "" : ": ", result.violation.c_str());
  return result.violation.empty();
}

int RunCases(const std::string& path) {
  std::ifstream file(path);
  if (!file) return UsageError(path.c_str());
  bool all_well = true;
  for (std::string line; std::getline(file, line);) {
    line = line.substr(0, line.find('#'));
    if (line.find_first_not_of(' ') == std::string::npos) continue;
    Case one;
    if (!Case::Parse(line, &one)) return UsageError(line.c_str());
    all_well &= RunOne(one, false);
  }
  return all_well ? 0 : 1;
}

int RunSeeds(const Arguments& arguments) {
  return simulation::RunSeeds(
      arguments.first, arguments.last, arguments.seconds,
      [&](uint64_t seed) { return Simulate(MakePlan(CaseOf(seed, arguments))); },
      [&](uint64_t seed) { Report(CaseOf(seed, arguments)); });
}

// How many seeds it takes, 0 if none of them catches it.
uint64_t SeedsToCatch(const Arguments& arguments) {
  for (uint64_t seed = arguments.first; seed <= arguments.last; ++seed)
    if (!Simulate(MakePlan(CaseOf(seed, arguments))).violation.empty()) return seed - arguments.first + 1;
  return 0;
}

bool Caught(const Arguments& arguments) {
  const uint64_t seeds = SeedsToCatch(arguments);
  if (seeds == 0) return false;
  const Case one = CaseOf(arguments.first + seeds - 1, arguments);
  std::printf("caught after %" PRIu64 " seeds by %s: %s\n", seeds, one.Text().c_str(),
              Simulate(MakePlan(one)).violation.c_str());
  std::fflush(stdout);
  return true;
}

int Main(int argc, char** argv) {
  Arguments arguments;
  if (const char* wrong = Parse(argc, argv, &arguments)) return UsageError(wrong);
  if (arguments.all_mutants) return CatchEach([&] { return Caught(arguments); });
  if (!arguments.cases.empty()) return RunCases(arguments.cases);
  if (arguments.one_case.empty()) return RunSeeds(arguments);
  Case one;
  if (!Case::Parse(arguments.one_case, &one)) return UsageError(arguments.one_case.c_str());
  return RunOne(one, arguments.trace) ? 0 : 1;
}

}  // namespace
}  // namespace simulation
}  // namespace ringtrain

int main(int argc, char** argv) { return ringtrain::simulation::Main(argc, argv); }
