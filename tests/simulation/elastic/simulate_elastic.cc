// Simulates elastic jobs, seed after seed.
//
//   simulate_elastic [--seeds FIRST-LAST] [--seconds S] [--mutant NAME]      seeds 1-1000
//   simulate_elastic --seed N [--faults 0,2] [--trace] [--mutant NAME]       one, as a failure prints it
//   simulate_elastic --mutants [--seeds FIRST-LAST]                          until each mutant is caught
//
// The exit code is 0 if nothing was violated or, of --mutants, if all were caught. What goes wrong is printed with as
// few of its faults as show it.
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <sstream>
#include <string>

#include "catch.h"
#include "seeds.h"
#include "fleet.h"
#include "mutants.h"

namespace ringtrain {
namespace elastic {
namespace {

struct Arguments {
  uint64_t first = 1, last = 1000, one = 0;
  double seconds = 0;
  bool trace = false, mutants = false, some = false;
  std::set<int> faults;
};

bool Parse(int argc, char** argv, Arguments* arguments) {
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--trace" || name == "--mutants") {
      (name == "--trace" ? arguments->trace : arguments->mutants) = true;
      continue;
    }
    if (++i == argc) return false;
    char* value = argv[i];
    if (name == "--seeds") {
      arguments->first = arguments->last = std::strtoull(value, &value, 10);
      if (*value == '-') arguments->last = std::strtoull(value + 1, &value, 10);
    } else if (name == "--seed") {
      arguments->one = std::strtoull(value, nullptr, 10);
    } else if (name == "--seconds") {
      arguments->seconds = std::atof(value);
    } else if (name == "--faults") {
      arguments->some = true;
      std::stringstream list(value);
      for (std::string number; std::getline(list, number, ',');) arguments->faults.insert(std::atoi(number.c_str()));
    } else if (name != "--mutant" || !simulation::WakeMutant(value)) {
      return false;
    }
  }
  return true;
}

std::string FaultsText(const std::set<int>& faults) {
  std::string text;
  for (int fault : faults) text += (text.empty() ? "" : ",") + std::to_string(fault);
  return text;
}

void Report(uint64_t seed) {
  std::set<int> faults;
  for (const Fault& fault : Draw(seed).faults) faults.insert(fault.number);
  for (int fault : std::set<int>(faults)) {
    std::set<int> fewer = faults;
    fewer.erase(fault);
    if (!Simulate(Draw(seed, &fewer)).violation.empty()) faults = fewer;
  }
  const Plan plan = Draw(seed, &faults);
  std::printf("seed %" PRIu64 ": %s\n%s", seed, Simulate(plan).violation.c_str(), plan.Text().c_str());
  std::printf("bin/simulate --elastic --seed %" PRIu64 " --faults '%s' --trace replays it\n", seed,
              FaultsText(faults).c_str());
}

int RunOne(const Arguments& arguments) {
  const Plan plan = Draw(arguments.one, arguments.some ? &arguments.faults : nullptr);
  if (arguments.trace) std::fprintf(stderr, "%s", plan.Text().c_str());
  const Result result = Simulate(plan, arguments.trace);
  std::printf("seed %" PRIu64 ": %" PRId64 " events, digest %016" PRIx64 ", %.1f s%s%s\n", arguments.one, result.events,
              result.digest, static_cast<double>(result.time) / 1e9, result.violation.empty() ? "" : ": ",
              result.violation.c_str());
  return result.violation.empty() ? 0 : 1;
}

int RunSeeds(const Arguments& arguments) {
  return simulation::RunSeeds(
      arguments.first, arguments.last, arguments.seconds, [](uint64_t seed) { return Simulate(Draw(seed)); }, Report);
}

// The seed that catches the mutant that is awake.
bool Caught(const Arguments& arguments) {
  for (uint64_t seed = arguments.first; seed <= arguments.last; ++seed) {
    const Result result = Simulate(Draw(seed));
    if (result.violation.empty()) continue;
    std::printf("caught after %" PRIu64 " seeds: %s\n", seed - arguments.first + 1, result.violation.c_str());
    std::fflush(stdout);
    return true;
  }
  return false;
}

}  // namespace
}  // namespace elastic
}  // namespace ringtrain

int main(int argc, char** argv) {
  using namespace ringtrain::elastic;
  Arguments arguments;
  if (!Parse(argc, argv, &arguments)) {
    std::fprintf(stderr,
                 "simulate_elastic: the head of tests/simulation/elastic/simulate_elastic.cc lists the options\n");
    return 2;
  }
  if (arguments.mutants) return ringtrain::simulation::CatchEach([&] { return Caught(arguments); });
  return arguments.one > 0 ? RunOne(arguments) : RunSeeds(arguments);
}
