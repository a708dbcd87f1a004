// StageSpans: when the stages of a batch's operations were at work, and how that becomes a timeline's spans.
#ifndef RINGTRAIN_RUN_STAGE_SPANS_H_
#define RINGTRAIN_RUN_STAGE_SPANS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/clock.h"
#include "collectives/batch.h"
#include "observe/timeline.h"
#include "run/submission.h"

namespace ringtrain {

class StageSpans final : public StageObserver {
 public:
  // So many operations are observed from here on.
  void Begin(size_t operations) { of_.resize(operations); }
  bool empty() const { return of_.empty(); }
  void OnStage(Stage stage, int operation, int64_t begin, int64_t end, size_t bytes) override;
  // Of the operation with that index, which all members had agreed on by then.
  void Write(size_t index, const Submission& submission, Nanoseconds agreed, Timeline* timeline) const;

 private:
  struct Span {
    int64_t begin = 0, end = 0, bytes = 0;
  };
  struct Observed {
    Span stages[kStageCount];
  };

  std::vector<Observed> of_;  // by operation
};

}  // namespace ringtrain
#endif  // RINGTRAIN_RUN_STAGE_SPANS_H_
