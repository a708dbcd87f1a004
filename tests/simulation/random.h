// Random: splitmix64, so that a seed means the same on every machine. Each part of a simulation draws from a stream of
// its own: one more draw in one of them leaves the others as they were.
#ifndef RINGTRAIN_TESTS_SIMULATION_RANDOM_H_
#define RINGTRAIN_TESTS_SIMULATION_RANDOM_H_

#include <cstdint>
#include <initializer_list>
#include <utility>
#include <vector>

namespace ringtrain {
namespace simulation {

inline uint64_t Mix(uint64_t value) {
  value += 0x9e3779b97f4a7c15;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

// The stream's name: a few numbers.
inline uint64_t Mix(std::initializer_list<uint64_t> values) {
  uint64_t mixed = 0;
  for (uint64_t value : values) mixed = Mix(mixed ^ value);
  return mixed;
}

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  Random(std::initializer_list<uint64_t> stream) : state_(Mix(stream)) {}

  uint64_t Next() { return Mix(state_++); }
  uint64_t Below(uint64_t bound) { return Next() % bound; }
  int64_t Between(int64_t lowest, int64_t highest) {
    return lowest + static_cast<int64_t>(Below(highest - lowest + 1));
  }
  bool OneIn(uint64_t bound) { return Below(bound) == 0; }

  template <typename T>
  const T& Pick(const std::vector<T>& values) {
    return values[Below(values.size())];
  }
  // Some of the values, one at least and not all unless there is one only, in their order.
  template <typename T>
  std::vector<T> Some(const std::vector<T>& values) {
    std::vector<T> some;
    for (const T& value : values)
      if (OneIn(2) && some.size() + 1 < values.size()) some.push_back(value);
    if (some.empty()) some.push_back(Pick(values));
    return some;
  }

 private:
  uint64_t state_;
};

}  // namespace simulation
}  // namespace ringtrain
#endif  // RINGTRAIN_TESTS_SIMULATION_RANDOM_H_
