// What both fakes are strict with: settings from the environment, calls that are counted and can be made to fail,
// violations.
//
// A call that the real library refuses is refused with the real library's code. What it would let pass, to give wrong
// numbers or crash later, is a violation: it is printed, and the process aborts.
#ifndef RINGTRAIN_TESTS_FAKES_STRICT_H_
#define RINGTRAIN_TESTS_FAKES_STRICT_H_

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace fakes {

[[noreturn]] __attribute__((format(printf, 1, 2))) inline void Violation(const char* format, ...) {
  char text[1024];
  va_list values;
  va_start(values, format);
  std::vsnprintf(text, sizeof text, format, values);
  va_end(values);
  std::fprintf(stderr, "fake GPU, process %d: %s\n", static_cast<int>(getpid()), text);
  std::abort();
}

inline std::string Setting(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : otherwise;
}

inline long Number(const char* name, long otherwise) {
  const char* value = std::getenv(name);
  return value != nullptr ? std::strtol(value, nullptr, 10) : otherwise;
}

// One function of a fake: how often it was called, and which of its calls fails with what code.
// A plan is a list "NAME:CALL=CODE[,...]"; CALL counts from 1, and "2+" stands for the second and all that follow.
struct CountedFunction {
  std::string name;
  std::atomic<long> calls{0};

  // Counts a call; its number.
  long Enter() { return calls.fetch_add(1, std::memory_order_relaxed) + 1; }

  // The code with which that call is to fail, 0 if it is not.
  int Planned(const std::string& plan, long call) const {
    for (size_t start = 0; start < plan.size();) {
      const size_t end = std::min(plan.find(',', start), plan.size());
      const int code = CodeOf(plan.substr(start, end - start), call);
      if (code != 0) return code;
      start = end + 1;
    }
    return 0;
  }

 private:
  int CodeOf(const std::string& entry, long call) const {
    if (entry.compare(0, name.size() + 1, name + ":") != 0) return 0;
    char* rest = nullptr;
    const long first = std::strtol(entry.c_str() + name.size() + 1, &rest, 10);
    const bool and_later = *rest == '+';
    if (and_later) ++rest;
    if (*rest != '=') Violation("'%s' is not NAME:CALL=CODE", entry.c_str());
    return call == first || (and_later && call > first) ? std::atoi(rest + 1) : 0;
  }
};

// Numbers for delays and for answers that come "now and then": the same in every run. A linear congruential generator.
class Dice {
 public:
  explicit Dice(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 1) {}
  uint32_t Below(uint32_t bound) {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return bound == 0 ? 0 : static_cast<uint32_t>(state_ >> 33) % bound;
  }

 private:
  uint64_t state_;
};

}  // namespace fakes
#endif  // RINGTRAIN_TESTS_FAKES_STRICT_H_
