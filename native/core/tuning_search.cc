#include "core/tuning_search.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <utility>

namespace ringtrain {
namespace {

Nanoseconds Median(std::vector<Nanoseconds> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

TuningSearch::TuningSearch(SearchPlan plan) : plan_(std::move(plan)), wanted_(plan_.start), best_(plan_.start) {}

std::optional<TuningSearch::Sample> TuningSearch::StepTook(Nanoseconds took) {
  if (done() || std::exchange(settles_, false)) return {};
  steps_.push_back(took);
  if (static_cast<int>(steps_.size()) < plan_.steps_per_sample) return {};
  const Times times = TimesOf(std::exchange(steps_, {}));
  Sample sample{wanted_, times.median, ""};
  ++samples_;
  sample.verdict = Judge(times);
  if (samples_ >= plan_.max_samples) Stop();
  return sample;
}

TuningSearch::Times TuningSearch::TimesOf(const std::vector<Nanoseconds>& steps) {
  Times times;
  times.median = Median(steps);
  std::vector<Nanoseconds> distances;
  for (Nanoseconds step : steps) distances.push_back(std::abs(step - times.median));
  times.spread = Median(std::move(distances));
  return times;
}

// The medians of two samples of one setting differ by less than twice their spreads over the root of their steps, as a
// rule: a median's standard error is 1.25 standard deviations over that root, and those are 1.48 spreads.
bool TuningSearch::Gains(const Times& candidate, const Times& best) const {
  const double root = std::sqrt(static_cast<double>(plan_.steps_per_sample));
  const double by_chance = 2 * static_cast<double>(candidate.spread + best.spread) / root;
  const double gain = static_cast<double>(best.median - candidate.median);
  return gain > std::max(by_chance, kGain * static_cast<double>(best.median));
}

const char* TuningSearch::Judge(const Times& step) {
  switch (phase_) {
    case Phase::kStart:
      best_step_ = step;
      NextCandidate();
      return "start";
    case Phase::kCandidate:
      candidate_step_ = step;
      if (!Gains(step, best_step_)) return Leave();
      phase_ = Phase::kBestAgain;
      Want(best_);
      return "shorter";
    case Phase::kBestAgain:
      if (step.median < best_step_.median) best_step_ = step;
      if (!Gains(candidate_step_, best_step_)) return Leave();
      phase_ = Phase::kCandidateAgain;
      Want(candidate_);
      return "best so far";
    case Phase::kCandidateAgain:
      if (step.median > candidate_step_.median) candidate_step_ = step;
      if (!Gains(candidate_step_, best_step_)) return Leave();
      best_ = candidate_;
      best_step_ = candidate_step_;
      moved_ = true;
      NextCandidate();
      return "taken";
    case Phase::kDone:
      break;
  }
  return "";
}

// The candidate is not better: from here on the other direction, or, where this one has gained or was the second, the
// next setting.
const char* TuningSearch::Leave() {
  ++direction_;
  if (std::exchange(moved_, false)) direction_ = kDirections;
  NextCandidate();
  return "left";
}

void TuningSearch::NextCandidate() {
  for (; tunable_ < plan_.values.size(); ++tunable_, direction_ = kUp, moved_ = false) {
    for (; direction_ < kDirections; ++direction_) {
      if (Propose()) return;
      if (moved_) break;  // to the last value in one direction: the other one is where it came from
    }
  }
  Stop();
}

// The next value of the setting in the direction, if there is one.
bool TuningSearch::Propose() {
  const std::vector<int64_t>& values = plan_.values[tunable_];
  const auto here = std::find(values.begin(), values.end(), best_[tunable_]);
  if (here == values.end()) return false;
  if (direction_ == kUp ? here + 1 == values.end() : here == values.begin()) return false;
  candidate_ = best_;
  candidate_[tunable_] = direction_ == kUp ? *(here + 1) : *(here - 1);
  phase_ = Phase::kCandidate;
  Want(candidate_);
  return true;
}

void TuningSearch::Want(const Settings& settings) {
  settles_ = settings != wanted_;
  wanted_ = settings;
}

void TuningSearch::Use(const Settings& settings) {
  best_ = settings;
  Stop();
}

void TuningSearch::Stop() {
  phase_ = Phase::kDone;
  Want(best_);
}

}  // namespace ringtrain
