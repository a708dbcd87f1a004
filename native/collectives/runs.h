// Runs: elements that lie in several places, walked as one stream.
#ifndef RINGTRAIN_COLLECTIVES_RUNS_H_
#define RINGTRAIN_COLLECTIVES_RUNS_H_

#include <algorithm>
#include <cstddef>
#include <vector>

#include "tables/tables.h"

namespace ringtrain {

struct Run {
  char* at;
  size_t count;  // elements
};

class Runs {
 public:
  Runs() = default;
  Runs(DType dtype, std::vector<Run> runs) : dtype_(dtype), runs_(std::move(runs)) {
    for (const Run& run : runs_) left_ += run.count;
  }

  DType dtype() const { return dtype_; }
  size_t left() const { return left_; }  // elements not taken
  size_t taken() const { return taken_; }
  // All that is not taken, where it is one run; else nullptr.
  char* whole() const { return run_ + 1 == runs_.size() ? runs_[run_].at + inside_ * Bytes(dtype_) : nullptr; }

  // The next elements that lie side by side, `most` at most. Requires most > 0 and left() > 0.
  Run Take(size_t most) {
    while (inside_ == runs_[run_].count) ++run_, inside_ = 0;
    const size_t count = std::min(most, runs_[run_].count - inside_);
    char* at = runs_[run_].at + inside_ * Bytes(dtype_);
    inside_ += count;
    taken_ += count;
    left_ -= count;
    return {at, count};
  }

 private:
  DType dtype_ = DType::kUInt8;
  std::vector<Run> runs_;
  size_t run_ = 0, inside_ = 0;  // the next element's place
  size_t taken_ = 0, left_ = 0;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_COLLECTIVES_RUNS_H_
