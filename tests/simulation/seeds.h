// What every simulator does with seeds that nothing else chooses.
#ifndef RINGTRAIN_TESTS_SIMULATION_SEEDS_H_
#define RINGTRAIN_TESTS_SIMULATION_SEEDS_H_

#include <chrono>
#include <cinttypes>
#include <cstdio>

namespace ringtrain {
namespace simulation {

// From `first` to `last`, or for so many seconds; the first that violates something is reported, and ends it. simulate:
// gives a seed's result. Returns the exit code.
template <typename Simulated, typename Reporter>
int RunSeeds(uint64_t first, uint64_t last, double seconds, Simulated simulate, Reporter report) {
  const auto start = std::chrono::steady_clock::now();
  const auto passed = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };
  uint64_t seed = first;
  int64_t events = 0;
  for (; seconds > 0 ? passed() < seconds : seed <= last; ++seed) {
    const auto result = simulate(seed);
    events += result.events;
    if (result.violation.empty()) continue;
    report(seed);
    return 1;
  }
  std::printf("%" PRIu64 " seeds from %" PRIu64 ", %" PRId64 " events in %.1f s: nothing violated\n", seed - first,
              first, events, passed());
  return 0;
}

}  // namespace simulation
}  // namespace ringtrain
#endif  // RINGTRAIN_TESTS_SIMULATION_SEEDS_H_
