#include "run/stage_spans.h"

#include <algorithm>
#include <cctype>
#include <string>

namespace ringtrain {
namespace {

std::string InCapitals(std::string text) {
  for (char& letter : text) letter = static_cast<char>(std::toupper(static_cast<unsigned char>(letter)));
  return text;
}

// "allreduce.fc1.bias"; unnamed operations begin so anyway.
std::string TrackName(const std::string& operation, const std::string& name) {
  return name.compare(0, operation.size() + 1, operation + ".") == 0 ? name : operation + "." + name;
}

}  // namespace

void StageSpans::OnStage(Stage stage, int operation, int64_t begin, int64_t end, size_t bytes) {
  Span& span = of_[operation].stages[static_cast<int>(stage)];
  if (span.begin == 0) span.begin = begin;
  span.end = std::max(span.end, end);
  span.bytes += static_cast<int64_t>(bytes);
}

void StageSpans::Write(size_t index, const Submission& submission, Nanoseconds agreed, Timeline* timeline) const {
  static const char* const categories[kStageCount] = {"pack", "wire", "reduce", "unpack"};
  const Observed& observed = of_[index];
  const char* const operation = Text(submission.request.operation);
  // Horovod's names, which its readers search for; where it has none, in its manner.
  const std::string kind = InCapitals(operation);
  const std::string names[kStageCount] = {"MEMCPY_IN_FUSION_BUFFER", "MPI_" + kind, "REDUCE",
                                          "MEMCPY_OUT_FUSION_BUFFER"};
  const std::string name = TrackName(operation, submission.request.name);
  Nanoseconds started = kNever;
  for (const Span& span : observed.stages)
    if (span.begin > 0) started = std::min(started, span.begin);
  timeline->Span(name, kind, submission.submitted, Now(), static_cast<int64_t>(submission.request.bytes()), operation);
  timeline->Span(name, "NEGOTIATE_" + kind, submission.submitted, agreed, 0, "negotiate");
  if (started != kNever) timeline->Span(name, "QUEUE", agreed, std::max(agreed, started), 0, "queue");
  for (int stage = 0; stage < kStageCount; ++stage)
    if (observed.stages[stage].begin > 0)
      timeline->Span(name, names[stage], observed.stages[stage].begin, observed.stages[stage].end,
                     observed.stages[stage].bytes, categories[stage]);
}

}  // namespace ringtrain
