// When the steps of a world look at the parameters. Python has it in its memory (ringtrain/_training/look_schedule.py),
// and an operation that takes a step of a graph by itself reads it there.
#ifndef RINGTRAIN_TABLES_LOOK_SCHEDULE_H_
#define RINGTRAIN_TABLES_LOOK_SCHEDULE_H_

#include <chrono>
#include <cstdint>

namespace ringtrain {

// The fields of LookSchedule in Python, where they are explained.
struct LookSchedule {
  int64_t steps;
  int64_t first_look;
  int64_t due_from;
  double due;  // of the steady clock, in seconds, which is Python's time.monotonic()
  int32_t asked;
  int32_t muted;
};
static_assert(sizeof(LookSchedule) == 40);

struct TakenStep {
  bool counts;  // what it says of its settings
  bool asks;    // for a look
};

// LookSchedule.take() of Python.
inline TakenStep TakeStep(LookSchedule* schedule) {
  const double now = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  const int64_t step = schedule->steps++;
  const bool is_due = step >= schedule->due_from && now >= schedule->due;
  const bool asks = schedule->asked != 0 || step == schedule->first_look || is_due;
  schedule->asked = 0;
  return {schedule->muted == 0 && step > 0, schedule->muted == 0 && asks};
}

}  // namespace ringtrain
#endif  // RINGTRAIN_TABLES_LOOK_SCHEDULE_H_
