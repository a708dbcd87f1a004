// StallWatch: judges how long operations wait for members that have not submitted them: when to report one, when to
// give it up, and in which words. Sans-I/O; the coordinator's negotiator feeds it with the operations that wait.
//
// A report comes when an operation is as old as the warning, and again at each doubling of that age. A member in a long
// phase (long_phase()) puts off what waits for it: the report until the warning after its end, the end likewise.
#ifndef RINGTRAIN_AGREE_STALL_WATCH_H_
#define RINGTRAIN_AGREE_STALL_WATCH_H_

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "base/clock.h"

namespace ringtrain {

class StallWatch {
 public:
  struct Clock {               // of one operation that waits
    Nanoseconds since = 0;     // when its first member submitted it
    Nanoseconds warn_at = 0;   // when it is to be reported next, unless a long phase puts that off
    Nanoseconds patience = 0;  // from `since` to warn_at
  };
  struct Waiting {  // the operation to the reader of a report
    std::string subject;
    std::vector<int> submitters, missing;  // global ranks
  };
  struct Verdict {
    bool give_up = false;
    std::string text;
  };
  using Missing = std::function<bool(int member)>;

  // warning, abort: ages; kNever for abort: operations are not given up.
  StallWatch(Nanoseconds warning, Nanoseconds abort) : warning_(warning), abort_(abort) {}

  Clock Start(Nanoseconds now) const { return {now, now + warning_, warning_}; }
  void LongPhase(int member, Nanoseconds until) { busy_until_[member] = until; }
  // This process runs again: it was stopped, as the others may have been, so what waits gets the time once more.
  void StoodStill(Nanoseconds now) { stood_still_until_ = now; }

  // When Judge is due. missing: the members that the operation waits for.
  Nanoseconds DueAt(const Clock& clock, const Missing& missing) const;
  // Operations are due in the order in which they began. A long phase may change that.
  bool DueInOrder() const { return busy_until_.empty(); }
  // Of an operation that is due; moves its clock on to the next report.
  Verdict Judge(Nanoseconds now, const Waiting& waiting, const Missing& missing, Clock* clock) const;
  // Drops long phases that no longer matter to any operation.
  void Forget(Nanoseconds now);

 private:
  Nanoseconds BusyUntil(const Missing& missing) const;
  Nanoseconds WarnAt(const Clock& clock, const Missing& missing) const;
  Nanoseconds AbortAt(const Clock& clock, const Missing& missing) const;

  const Nanoseconds warning_, abort_;
  Nanoseconds stood_still_until_ = 0;
  std::map<int, Nanoseconds> busy_until_;  // members that are, or of late were, in a long phase
};

}  // namespace ringtrain
#endif  // RINGTRAIN_AGREE_STALL_WATCH_H_
