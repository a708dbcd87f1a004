// TuningSearch: which settings make whole steps shortest. Pure: times of steps go in, settings that shall be tried come
// out.
//
// One setting after the other goes a value up, then down, from the best so far. A value is kept if steps are shorter
// twice: in a sample of it and, after one more of what was best, in a second one. The slower of its two counts, and the
// faster of the other's, so neither a lucky sample nor a network that has just become faster decides. Shorter means by
// kGain, and by more than how the steps of a sample differ explains. Whatever is not better is left behind. Few samples
// are enough, since the start is good: the settings that there would be without it.
#ifndef RINGTRAIN_CORE_TUNING_SEARCH_H_
#define RINGTRAIN_CORE_TUNING_SEARCH_H_

#include <array>
#include <optional>
#include <vector>

#include "base/clock.h"
#include "base/tuned.h"

namespace ringtrain {

struct SearchPlan {
  Settings start{};
  std::array<std::vector<int64_t>, kTunables> values;  // that may be tried, ascending; empty: stays as it is
  int steps_per_sample = 10;
  int max_samples = 20;
};

class TuningSearch {
 public:
  static constexpr double kGain = 0.03;  // of a step, which a change must bring

  struct Sample {
    Settings settings;
    Nanoseconds step;  // the median
    const char* verdict;
  };

  explicit TuningSearch(SearchPlan plan);

  // A step under wanted() has ended. Returns the sample that it completes.
  std::optional<Sample> StepTook(Nanoseconds took);
  // What the next steps shall run under; in the end, the best.
  const Settings& wanted() const { return wanted_; }
  const Settings& best() const { return best_; }
  bool done() const { return phase_ == Phase::kDone; }
  // Ends it: the best so far stays.
  void Stop();
  // Ends it with these.
  void Use(const Settings& settings);

 private:
  enum class Phase { kStart, kCandidate, kBestAgain, kCandidateAgain, kDone };
  enum Direction { kUp = 0, kDown = 1, kDirections = 2 };

  // Of a sample's steps.
  struct Times {
    Nanoseconds median = 0, spread = 0;  // spread: the median of how far they are from it
  };
  static Times TimesOf(const std::vector<Nanoseconds>& steps);
  const char* Judge(const Times& step);
  const char* Leave();
  void NextCandidate();
  bool Propose();
  void Want(const Settings& settings);
  bool Gains(const Times& candidate, const Times& best) const;

  const SearchPlan plan_;
  Phase phase_ = Phase::kStart;
  Settings wanted_, best_, candidate_{};
  Times best_step_, candidate_step_;
  size_t tunable_ = 0;
  int direction_ = kUp;
  bool moved_ = false;  // this setting has changed in this direction
  int samples_ = 0;
  bool settles_ = false;  // the next step began under other settings
  std::vector<Nanoseconds> steps_;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_CORE_TUNING_SEARCH_H_
