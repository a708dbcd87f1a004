#include "agree/schedule.h"

#include <algorithm>
#include <utility>

namespace ringtrain {

// ---- what the coordinator sees ----

void Repetition::Note(const std::vector<ResponseCache::Id>& batch) {
  if (std::any_of(batch.begin(), batch.end(), [&](ResponseCache::Id id) { return ids_.count(id) > 0; })) EndCycle();
  batches_.push_back(batch);
  ids_.insert(batch.begin(), batch.end());
  if (ids_ == last_ids_) EndCycle();  // at its end, and not only when it begins again
}

void Repetition::EndCycle() {
  if (ids_ != last_ids_) {
    repeats_ = 0;
    last_.clear();
  }
  ++repeats_;
  last_.push_front(std::exchange(batches_, {}));
  last_.resize(std::min(last_.size(), kKept));
  last_ids_ = std::exchange(ids_, {});
}

const Cycle& Repetition::cycle() const {
  std::vector<const Cycle*> by_size;
  for (const Cycle& cycle : last_) by_size.push_back(&cycle);
  std::sort(by_size.begin(), by_size.end(), [](const Cycle* a, const Cycle* b) { return a->size() < b->size(); });
  return *by_size[by_size.size() / 2];
}

void Repetition::Forget() {
  batches_.clear();
  last_.clear();
  ids_.clear();
  last_ids_.clear();
  repeats_ = 0;
}

void Repetition::Ended(uint64_t batches) {
  const uint64_t cycles = batches / cycle().size();
  patience_ = cycles >= 4 * patience_ ? std::max(patience_ / 2, kLeast) : std::min(2 * patience_, kMost);
  Forget();
}

// ---- a member's side ----

BatchSchedule::BatchSchedule(uint32_t number, Cycle cycle, Nanoseconds longest_wait, Nanoseconds now)
    : number_(number),
      cycle_(std::move(cycle)),
      longest_wait_(longest_wait),
      ready_(cycle_.size(), 0),
      unpromised_since_(now),
      unstarted_since_(now) {
  for (size_t place = 0; place < cycle_.size(); ++place)
    for (ResponseCache::Id id : cycle_[place]) place_of_[id] = place;
}

bool BatchSchedule::Take(Nanoseconds now, ResponseCache::Id id) {
  const auto found = place_of_.find(id);
  if (found == place_of_.end()) return false;
  ++ready_[found->second];
  if (unpromised_++ == 0) unpromised_since_ = now;
  return true;
}

// Not beyond the next time of a batch that is promised and has not started: what is ready for that is of this time.
bool BatchSchedule::Promise(Nanoseconds now) {
  const uint64_t before = promised_;
  while (!frozen_ && promised_ < started_ + cycle_.size() &&
         ready_[PlaceOf(promised_)] == cycle_[PlaceOf(promised_)].size())
    unpromised_ -= cycle_[PlaceOf(promised_++)].size();
  if (promised_ == before) return false;
  if (before == started_) unstarted_since_ = now;
  unpromised_since_ = now;
  return true;
}

const std::vector<ResponseCache::Id>& BatchSchedule::StartNext(Nanoseconds now) {
  const size_t place = PlaceOf(started_++);
  ready_[place] = 0;
  unstarted_since_ = now;
  return cycle_[place];
}

Nanoseconds BatchSchedule::due() const {
  if (frozen_) return kNever;
  const Nanoseconds stuck = unpromised_ > 0 ? unpromised_since_ + kStuck : kNever;
  return std::min(stuck, promised_ > started_ ? unstarted_since_ + longest_wait_ : kNever);
}

}  // namespace ringtrain
