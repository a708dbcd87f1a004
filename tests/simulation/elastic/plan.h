// Plan: an elastic job drawn from a seed: hosts and slots, how long everything takes, and the faults that strike.
#ifndef RINGTRAIN_TESTS_SIMULATION_ELASTIC_PLAN_H_
#define RINGTRAIN_TESTS_SIMULATION_ELASTIC_PLAN_H_

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "elastic/control.h"
#include "elastic/samples.h"

namespace ringtrain {
namespace elastic {

constexpr Nanoseconds kMillisecond = 1000000;
constexpr Nanoseconds kSilence = 5 * kSecond;  // D
constexpr Nanoseconds kStall = 30 * kSecond;   // that an operation waits for ranks
constexpr int kLauncher = -1;                  // where hosts are named by number

struct Fault {
  enum Kind {
    kCrash,
    kFreeze,
    kHang,
    kHostLost,
    kHostReset,
    kCut,
    kLauncherCrash,
    kNotice,
    kHostNotice,
    kOtherProgram,
    kOtherValues,
    kAnotherWay
  };
  enum Way { kBoth, kOutward, kInward };
  int number;
  Kind kind;
  Nanoseconds at = kNever;  // or instead of that:
  ControlType frame{};      // when the launcher or a rank is about to send the nth of this type
  int nth = 0;
  bool follows = false;  // counted from the moment at which the fault before it strikes
  int host = 0, slot = 0;
  // Of a freeze, a program that hangs while its process lives, a cut, the launcher's absence; kNever: for good.
  Nanoseconds duration = 0;
  std::set<int> places = {};  // kCut: hosts, or kLauncher, that are on this side
  Way way = kBoth;
  bool spares_launcher = false;  // a cut between hosts that both reach it
};

struct Plan {
  uint64_t seed = 0;
  std::vector<int> slots;  // by host
  std::set<int> late;      // hosts that come after some seconds
  int minimum = 1;
  int operations = 1;  // in each window
  int64_t steps = 0;
  int draws = 1;  // of samples, in each step
  Cut cut = Cut::kPositions;
  int64_t batch = 1, positions = int64_t{1} << 40;
  Nanoseconds window = 0, link_delay = 0, grace = 60 * kSecond, first_pause = kSecond;
  Nanoseconds start_up = 0;  // of a process
  int64_t cache_capacity = 1024, fusion_threshold_bytes = 1 << 20;
  std::vector<Fault> faults;

  int ranks() const;
  // Of the step behind so many: whether a metric comes before it, whether something is summed and used within it, and
  // whether its gradients are waited for in two parts.
  bool has_metric(int64_t done) const { return OneIn(5, done, 1); }
  bool has_statistics(int64_t done) const { return OneIn(4, done, 2); }
  bool has_two_parts(int64_t done) const { return operations > 1 && OneIn(4, done, 3); }
  bool Has(Fault::Kind kind) const;
  bool only(Fault::Kind kind) const { return faults.size() == 1 && faults[0].kind == kind; }
  // Some rank is struck by nothing, and the launcher comes back: the training must come to its end.
  bool must_succeed() const;
  std::string Text() const;

 private:
  bool OneIn(uint64_t count, int64_t done, uint64_t what) const;
};

std::string HostName(int host);

// Some: of the faults, by number; else all.
Plan Draw(uint64_t seed, const std::set<int>* some = nullptr);

}  // namespace elastic
}  // namespace ringtrain
#endif  // RINGTRAIN_TESTS_SIMULATION_ELASTIC_PLAN_H_
