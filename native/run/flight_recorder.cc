#include "run/flight_recorder.h"

#include <memory>
#include <new>
#include <utility>

namespace ringtrain {
namespace {

constexpr Nanoseconds kStallPeriod = INT64_C(500000000);

}  // namespace

std::string FlightRecorder::Take(const std::string& because) const {
  if (!file_.wanted()) return "";
  try {
    return FlightRecordText(world_, process_sets_.All(), books_.table->Flown(), because);
  } catch (const std::bad_alloc&) {  // the end is more important
    return "";
  }
}

void FlightRecorder::Leave(std::string record) const {
  if (!record.empty()) file_.Write(std::move(record), books_.writer, books_.log);
}

void FlightRecorder::LookForStalls() {
  if (!file_.wanted()) return;
  const Nanoseconds now = Now();
  if (now < looks_again_) return;
  looks_again_ = now + kStallPeriod;
  const std::shared_ptr<Submission> oldest = books_.table->Oldest();
  if (oldest == nullptr || oldest->number == stalled_ || oldest->request.operation == Operation::kJoin) return;
  if (static_cast<double>(now - oldest->submitted) / 1e9 < books_.options.stall_warning_seconds) return;
  stalled_ = oldest->number;
  Leave(Take(oldest->request.Subject() + " has waited for stall_warning_seconds."));
}

}  // namespace ringtrain
