// FlightRecorder: when a rank leaves a flight record (observe/flight_record.h): when others wait for it, when it has
// waited itself for long, and when its world ends. The driver's thread only.
#ifndef RINGTRAIN_RUN_FLIGHT_RECORDER_H_
#define RINGTRAIN_RUN_FLIGHT_RECORDER_H_

#include <string>

#include "base/clock.h"
#include "observe/flight_record.h"
#include "run/books.h"
#include "transport/world.h"
#include "world/process_sets.h"

namespace ringtrain {

class FlightRecorder {
 public:
  FlightRecorder(const World& world, const ProcessSetTable& process_sets, const Books& books)
      : world_(world), process_sets_(process_sets), books_(books), file_(books.options, world.rank) {}

  // What there is to tell now; "" if no record is wanted.
  std::string Take(const std::string& because) const;
  // Has it written.
  void Leave(std::string record) const;
  // Leaves a record when an operation has waited here for stall_warning_seconds, once for each. Each rank that waits
  // does so by its own clock: the coordinator tells those alone that are waited for.
  void LookForStalls();

 private:
  const World& world_;
  const ProcessSetTable& process_sets_;
  const Books& books_;
  const FlightFile file_;
  Nanoseconds looks_again_ = 0;
  uint64_t stalled_ = 0;  // number of the operation whose stall was written down last
};

}  // namespace ringtrain
#endif  // RINGTRAIN_RUN_FLIGHT_RECORDER_H_
