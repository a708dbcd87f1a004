// The C ABI of what a context tells of itself: counters, traffic, who comes last, lines, records, its log and timeline.
#include <algorithm>
#include <string>

#include "c_api/context.h"
#include "c_api/translate.h"
#include "include/ringtrain.h"

using ringtrain::CopyText;
using ringtrain::Guard;
using ringtrain::Report;
using ringtrain::TextBy;
using ringtrain::TextOf;

namespace {

// A name in a line of its own.
std::string OnOneLine(std::string name) {
  std::replace(name.begin(), name.end(), '\n', ' ');
  return name;
}

}  // namespace

int32_t rt_counters(rt_context* context, int64_t* values, int32_t capacity) {
  for (int counter = 0; counter < std::min(capacity, ringtrain::kCounterCount); ++counter)
    values[counter] = context->context->counters().Get(counter);
  return ringtrain::kCounterCount;
}

char* rt_lateness(rt_context* context) {
  return TextBy([&] {
    std::string text;
    for (const ringtrain::Late& late : context->context->lateness().All())
      text += std::to_string(late.rank) + "|" + std::to_string(late.times) + "|" + std::to_string(late.total) + "|" +
              std::to_string(late.longest) + "|" + OnOneLine(late.longest_name) + "\n";
    return text;
  });
}

char* rt_lines(rt_context* context) {
  return TextBy([&] { return context->context->Lines(); });
}

char* rt_traffic(rt_context* context) {
  return TextBy([&] {
    std::string lines;
    for (const ringtrain::Traffic& each : context->context->traffic().All())
      lines += std::string(ringtrain::Text(each.operation)) + "|" + std::to_string(each.size_class) + "|" +
               std::to_string(each.count) + "|" + std::to_string(each.bytes) + "|" + std::to_string(each.link_bytes) +
               "|" + std::to_string(each.time) + "|" + std::to_string(each.waiting) + "\n";
    return lines;
  });
}

int64_t rt_burst_bytes(rt_context*) { return ringtrain::kBurstBytes; }

char* rt_flight_record(rt_context* context) {
  return TextBy([&] { return context->context->FlightRecord(); });
}

char* rt_log_next(rt_context* context) {
  std::string line;
  return context->context->log().Next(&line) ? CopyText(line) : nullptr;  // without an allocation of C++'s
}

int32_t rt_timeline_start(rt_context* context, const char* path, int32_t mark_cycles, char** error) {
  return Report(Guard([&] { return context->context->StartTimeline(TextOf(path), mark_cycles != 0); }), error);
}

int32_t rt_timeline_stop(rt_context* context, char** error) {
  return Report(Guard([&] { return context->context->StopTimeline(); }), error);
}
