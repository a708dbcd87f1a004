#include "base/scheduling.h"

#include <sched.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace ringtrain {
namespace {

constexpr uint64_t kSliceNanoseconds = 100000;  // the shortest that the kernel takes
constexpr unsigned long kTimerSlackNanoseconds = 1000;

// As sched_getattr(2) and sched_setattr(2) have it; older C libraries have no name for it.
struct SchedulingAttributes {
  uint32_t size, policy;
  uint64_t flags;
  int32_t nice;
  uint32_t priority;
  uint64_t runtime, deadline, period;
};

}  // namespace

int UsableCores() {
  cpu_set_t cores;
  return sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 1;
}

void RunPromptly() {
  prctl(PR_SET_TIMERSLACK, kTimerSlackNanoseconds, 0, 0, 0);
  SchedulingAttributes mine = {};
  if (syscall(SYS_sched_getattr, 0, &mine, sizeof mine, 0) != 0 || mine.policy != SCHED_OTHER) return;
  mine.size = sizeof mine;
  mine.runtime = kSliceNanoseconds;
  syscall(SYS_sched_setattr, 0, &mine, 0);
}

}  // namespace ringtrain
