// The native tests' harness: tests that register themselves, checks that print both values, a main that takes name
// filters.
//
//   RT_TEST(adds_two_sources) { RT_CHECK_EQ(Add(1, 2), 3); }
//
// A failed RT_CHECK* is printed with its place, and the test goes on; a failed RT_REQUIRE* ends the test. Checks may be
// made from any thread, requirements from the test's own thread and those that RunRanks started. Each *_test.cc is one
// executable: `name_test [PART OF A NAME]...` runs the tests whose names contain one of the parts, all without any; its
// exit code is 0 if all passed. A file that must set something up first defines RT_CHECK_OWN_MAIN and calls RunTests
// from a main of its own.
#ifndef RINGTRAIN_TESTS_NATIVE_CHECK_H_
#define RINGTRAIN_TESTS_NATIVE_CHECK_H_

#include <atomic>
#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "base/status.h"

namespace ringtrain {
namespace check {

struct Test {
  const char* name;
  void (*body)();
};

inline std::vector<Test>& Tests() {
  static std::vector<Test> tests;
  return tests;
}

inline bool Register(const char* name, void (*body)()) {
  Tests().push_back({name, body});
  return true;
}

inline std::atomic<int>& Failures() {
  static std::atomic<int> failures{0};
  return failures;
}

// It takes ten times as long, and sees a race in any order.
#ifdef __SANITIZE_THREAD__
constexpr bool kThreadSanitizer = true;
#else
constexpr bool kThreadSanitizer = false;
#endif

// How often a test tries again what may interleave otherwise.
constexpr int Rounds(int wanted) { return kThreadSanitizer ? (wanted + 2) / 3 : wanted; }

struct RequirementFailed {};  // thrown to end a test after the failure was printed

inline bool Report(const char* file, int line, const std::string& text) {
  constexpr int kMaxPrinted = 20;
  static std::mutex mutex;
  const int number = ++Failures();
  std::lock_guard<std::mutex> lock(mutex);
  if (number <= kMaxPrinted) std::fprintf(stderr, "%s:%d: %s\n", file, line, text.c_str());
  if (number == kMaxPrinted) std::fprintf(stderr, "further failures are counted, not printed\n");
  return false;
}

template <typename T>
std::string Show(const T& value) {
  std::ostringstream text;
  text.precision(17);
  if constexpr (std::is_enum_v<T>)
    text << static_cast<long long>(value);
  else if constexpr (std::is_integral_v<T>)
    text << +value;
  else
    text << value;
  return text.str();
}

template <typename A, typename B>
bool Equal(const char* file, int line, const char* expression, const A& found, const B& expected) {
  if (found == expected) return true;
  return Report(file, line, std::string(expression) + ": found " + Show(found) + ", expected " + Show(expected));
}

inline bool Ok(const char* file, int line, const char* expression, const Status& status) {
  if (status.ok()) return true;
  return Report(file, line, std::string(expression) + ": " + Text(status.code()) + ": " + status.message());
}

// Runs body(rank) on `count` threads and waits for them all; a requirement that fails in one ends that thread and the
// test.
inline void RunRanks(int count, const std::function<void(int)>& body) {
  std::atomic<bool> failed{false};
  std::vector<std::thread> threads;
  for (int rank = 0; rank < count; ++rank)
    threads.emplace_back([&body, &failed, rank] {
      try {
        body(rank);
      } catch (const RequirementFailed&) {
        failed = true;
      }
    });
  for (std::thread& thread : threads) thread.join();
  if (failed) throw RequirementFailed();
}

inline bool Selected(const char* name, int argc, char** argv) {
  if (argc < 2) return true;
  for (int i = 1; i < argc; ++i)
    if (std::strstr(name, argv[i]) != nullptr) return true;
  return false;
}

// Whether the test passed.
inline bool Run(const Test& test) {
  const int before = Failures();
  try {
    test.body();
  } catch (const RequirementFailed&) {
  } catch (const std::exception& error) {
    Report(test.name, 0, std::string("exception: ") + error.what());
  }
  const bool passed = Failures() == before;
  std::printf("%s %s\n", passed ? "ok  " : "FAIL", test.name);
  std::fflush(stdout);
  return passed;
}

// The exit code: 0 if at least one test was selected and all that were have passed.
inline int RunTests(int argc, char** argv) {
  int run = 0, passed = 0;
  for (const Test& test : Tests()) {
    if (!Selected(test.name, argc, argv)) continue;
    ++run;
    passed += Run(test) ? 1 : 0;
  }
  std::printf("%d of %d tests passed\n", passed, run);
  return run > 0 && passed == run ? 0 : 1;
}

}  // namespace check
}  // namespace ringtrain

#define RT_TEST(name)                                                                                   \
  static void name();                                                                                   \
  [[maybe_unused]] static const bool rt_registered_##name = ::ringtrain::check::Register(#name, &name); \
  static void name()

#define RT_CHECK(condition) ((condition) || ::ringtrain::check::Report(__FILE__, __LINE__, #condition ": is false"))
#define RT_CHECK_EQ(found, expected) \
  ::ringtrain::check::Equal(__FILE__, __LINE__, #found " == " #expected, (found), (expected))
#define RT_CHECK_OK(status) ::ringtrain::check::Ok(__FILE__, __LINE__, #status, (status))

#define RT_REQUIRE(condition) (RT_CHECK(condition) ? (void)0 : throw ::ringtrain::check::RequirementFailed())
#define RT_REQUIRE_EQ(found, expected) \
  (RT_CHECK_EQ(found, expected) ? (void)0 : throw ::ringtrain::check::RequirementFailed())
#define RT_REQUIRE_OK(status) (RT_CHECK_OK(status) ? (void)0 : throw ::ringtrain::check::RequirementFailed())

#ifndef RT_CHECK_OWN_MAIN
int main(int argc, char** argv) { return ::ringtrain::check::RunTests(argc, argv); }
#endif

#endif  // RINGTRAIN_TESTS_NATIVE_CHECK_H_
