// Tuned: the options that may change while a world is open (tables/tunables.def), as they are at the moment. The driver
// changes them, at a place among the operations that is the same on all ranks; any thread reads them.
#ifndef RINGTRAIN_BASE_TUNED_H_
#define RINGTRAIN_BASE_TUNED_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "base/options.h"

namespace ringtrain {

enum class Tunable {
#define RT_TUNABLE(name, ...) name,
#include "tables/tunables.def"
#undef RT_TUNABLE
};

constexpr int kTunables = 0
#define RT_TUNABLE(name, ...) +1
#include "tables/tunables.def"
#undef RT_TUNABLE
    ;

using Settings = std::array<int64_t, kTunables>;  // by tunable

// What the options ask for.
Settings SettingsOf(const Options& options);
// Whether each of them is in its option's range.
bool InRange(const Settings& settings);
// "fusion_threshold_bytes=1048576,tcp_streams=1,..."
std::string TextOf(const Settings& settings);
// Of such a text; false for any other.
bool ParseSettings(const std::string& text, Settings* settings);
// Those that are tried, ascending.
const std::vector<int64_t>& ValuesOf(Tunable tunable);
// The option's name.
const char* NameOf(Tunable tunable);

// Streams that TCP has room for where their number is tuned.
int MostStreams(const Options& options);

class Tuned {
 public:
  struct Change {
    uint64_t operations;  // of the world that had been agreed on before, the same on all ranks
    Settings settings;
  };

  explicit Tuned(const Settings& settings) { Store(settings); }

  int64_t Get(Tunable tunable) const { return values_[static_cast<size_t>(tunable)].load(std::memory_order_relaxed); }
  Settings All() const;
  void Set(uint64_t operations, const Settings& settings);
  std::vector<Change> Changes() const;

  // What rank 0's tuner does, in a word.
  void SetState(const char* state) { state_.store(state); }
  const char* state() const { return state_.load(); }

 private:
  void Store(const Settings& settings);

  std::array<std::atomic<int64_t>, kTunables> values_;
  std::atomic<const char*> state_{"off"};
  mutable Mutex mutex_;
  std::vector<Change> changes_ RT_GUARDED_BY(mutex_);
};

}  // namespace ringtrain
#endif  // RINGTRAIN_BASE_TUNED_H_
