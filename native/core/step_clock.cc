#include "core/step_clock.h"

#include <iterator>
#include <utility>

namespace ringtrain {
namespace {

std::string Described(const Request& request) {
  std::string text = request.Subject();
  for (const TensorSpec& tensor : request.tensors) {
    text += std::string(" ") + Find(tensor.dtype)->text;
    for (int64_t length : tensor.shape) text += "," + std::to_string(length);
  }
  return text;
}

}  // namespace

std::optional<Nanoseconds> StepClock::Saw(Nanoseconds now, const Response& response) {
  const Request& request = response.request;
  ++since_;
  if (!request.cacheable || request.tensors.empty()) return {};
  if (learns_) Learn(request);
  if (!GoesBy(request)) return {};
  const Nanoseconds took = now - std::exchange(begun_, now);
  operations_ = std::exchange(since_, 0);
  if (learns_) {
    model_.clear();
    for (const auto& entry : step_) model_ += entry.second + "\n";
    step_.clear();
  }
  if (steps_++ == 0) return {};  // a step begins
  return took;
}

// Names that never come again, as those with a number of a step in them, would add up.
void StepClock::ForgetThoseThatCameOnce() {
  step_.clear();
  for (auto at = known_.begin(); at != known_.end();) at = at->second.times == 1 ? known_.erase(at) : std::next(at);
}

void StepClock::Learn(const Request& request) {
  if (step_.size() >= kMostNames || known_.size() >= 2 * kMostNames) ForgetThoseThatCameOnce();
  step_[request.name] = Described(request);
  Known& known = known_[request.name];
  known.bytes = request.bytes();
  if (++known.times < 2 || known.bytes <= mark_bytes_) return;
  mark_ = request.name;
  mark_bytes_ = known.bytes;
  steps_ = 0;
}

void StepClock::StopLearning() {
  learns_ = false;
  known_.clear();
  step_.clear();
}

}  // namespace ringtrain
