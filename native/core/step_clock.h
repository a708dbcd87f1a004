// StepClock: how long training steps take, by the names of operations. Pure: it is told what has been agreed on, and
// when.
//
// A step ends where an operation comes again. Which one: of those that have come twice the one with the most bytes, a
// gradient as a rule, since a small one may come several times in a step (statistics of a layer that is used twice) or
// once in many (a metric). So no adapter needs to say where its steps are. Operations without names, which never come
// again, are not looked at.
#ifndef RINGTRAIN_CORE_STEP_CLOCK_H_
#define RINGTRAIN_CORE_STEP_CLOCK_H_

#include <map>
#include <optional>
#include <string>

#include "base/clock.h"
#include "core/request.h"

namespace ringtrain {

class StepClock {
 public:
  // One operation was agreed on. Returns how long the step took that has ended with it.
  std::optional<Nanoseconds> Saw(Nanoseconds now, const Response& response);

  // While it learns, it may find a better operation to go by; then it counts steps anew.
  void StopLearning();
  // Whole steps since the operation that it goes by was chosen.
  int steps() const { return steps_; }
  // Operations since that one has come.
  int since() const { return since_; }
  // Those of a whole step.
  int operations() const { return operations_; }
  // What a whole step consists of, the same text in every run: names, kinds, dtypes and shapes.
  const std::string& model() const { return model_; }

 private:
  struct Known {
    int times = 0;
    size_t bytes = 0;
  };
  static constexpr size_t kMostNames = 50000;  // of a step
  void Learn(const Request& request);
  void ForgetThoseThatCameOnce();
  bool GoesBy(const Request& request) const { return request.name == mark_ && !mark_.empty(); }

  bool learns_ = true;
  std::map<std::string, Known> known_;       // while it learns
  std::map<std::string, std::string> step_;  // likewise: of the step so far, by name
  std::string mark_;                         // the name that it goes by
  size_t mark_bytes_ = 0;
  Nanoseconds begun_ = 0;
  int steps_ = 0, since_ = 0, operations_ = 0;
  std::string model_;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_CORE_STEP_CLOCK_H_
