#include "agree/stall_watch.h"

#include <algorithm>

#include "base/decimal.h"
#include "base/ranks.h"

namespace ringtrain {
namespace {

constexpr char kWhatExtends[] = " (RINGTRAIN_STALL_ABORT_SECONDS; long_phase() on the busy rank extends it).";

std::string SecondsText(Nanoseconds duration) {
  const double seconds = static_cast<double>(duration) / 1e9;
  std::string trimmed = Decimal(seconds < 1 ? "%.2g" : "%.1f", seconds);
  if (trimmed.size() > 2 && trimmed.compare(trimmed.size() - 2, 2, ".0") == 0) trimmed.resize(trimmed.size() - 2);
  return trimmed;
}

std::string StallText(Nanoseconds age, const StallWatch::Waiting& waiting) {
  return waiting.subject + ": waiting " + SecondsText(age) + " s: submitted by " + RanksText(waiting.submitters) +
         "; missing " + RanksText(waiting.missing) +
         ". A branch, the number of batches or the set of gradients may differ between ranks.";
}

}  // namespace

Nanoseconds StallWatch::DueAt(const Clock& clock, const Missing& missing) const {
  return std::min(WarnAt(clock, missing), AbortAt(clock, missing));
}

// When the last of the missing members is, or was, back from its long phase, and this process had stood still.
Nanoseconds StallWatch::BusyUntil(const Missing& missing) const {
  Nanoseconds until = stood_still_until_;
  for (const auto& busy : busy_until_)
    if (missing(busy.first)) until = std::max(until, busy.second);
  return until;
}

Nanoseconds StallWatch::WarnAt(const Clock& clock, const Missing& missing) const {
  const Nanoseconds busy_until = BusyUntil(missing);
  return busy_until == 0 ? clock.warn_at : std::max(clock.warn_at, busy_until + warning_);
}

Nanoseconds StallWatch::AbortAt(const Clock& clock, const Missing& missing) const {
  return abort_ == kNever ? kNever : std::max(clock.since, BusyUntil(missing)) + abort_;
}

StallWatch::Verdict StallWatch::Judge(Nanoseconds now, const Waiting& waiting, const Missing& missing,
                                      Clock* clock) const {
  Verdict verdict;
  verdict.text = StallText(now - clock->since, waiting);
  const Nanoseconds abort_at = AbortAt(*clock, missing);
  verdict.give_up = now >= abort_at;
  if (verdict.give_up) {
    verdict.text += " It was given up after " + SecondsText(abort_) + " s" + kWhatExtends;
    return verdict;
  }
  verdict.text += abort_ == kNever
                      ? " It will not be given up (RINGTRAIN_STALL_ABORT_SECONDS=0)."
                      : " It will fail after " + SecondsText(abort_at - clock->since) + " s" + kWhatExtends;
  while (clock->since + clock->patience <= now) clock->patience *= 2;
  clock->warn_at = clock->since + clock->patience;
  return verdict;
}

void StallWatch::Forget(Nanoseconds now) {
  const Nanoseconds matters = abort_ == kNever ? 0 : abort_;  // after its end, to operations older than that
  for (auto busy = busy_until_.begin(); busy != busy_until_.end();)
    busy = busy->second + matters <= now ? busy_until_.erase(busy) : std::next(busy);
}

}  // namespace ringtrain
