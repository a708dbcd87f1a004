#include "elastic/step.h"

#include <algorithm>

namespace ringtrain {

bool Settle(const std::vector<Standing>& standings, Settlement* settlement) {
  *settlement = {};
  std::vector<Standing> holders;
  for (const Standing& each : standings) {
    settlement->renews_sets |= each.has_sets;
    if (each.holds_state) holders.push_back(each);
  }
  settlement->gives_state = holders.size() < standings.size();
  if (holders.empty()) return true;  // the first world

  int64_t newest = 0;
  for (const Standing& each : holders) newest = std::max(newest, each.released);
  bool all_whole = true;
  for (const Standing& each : holders) {
    const bool behind = each.released < newest;
    if (behind && (each.released + 1 < newest || each.stage != Stage::kWhole)) return false;
    all_whole &= !behind && each.stage == Stage::kWhole;
    if (behind || each.stage == Stage::kIdle) continue;
    settlement->dealt_in = std::max(settlement->dealt_in.value_or(each.dealt_in), each.dealt_in);
  }
  settlement->releases = all_whole;
  settlement->released = newest + all_whole;
  return true;
}

// ---- the open window ----

void Steps::Begin() {
  if (stage_ == Stage::kIdle) stage_ = Stage::kBegun;
}

void Steps::BeginPart() {
  is_apart_ |= stage_ == Stage::kIdle;
  Begin();
}

void Steps::Hold(Part part) {
  held_ = part;
  stage_ = Stage::kWhole;
}

void Steps::Drop() { stage_ = Stage::kBegun; }

void Steps::Release(StepEffects* effects) {
  if (!has_parts_ && held_ != Part::kNothing) {
    applied_ = contributors_;
    has_parts_ = true;
  }
  ++released_;
  stage_ = Stage::kBegun;
  has_step_ |= held_ == Part::kStep;
  is_apart_ &= held_ == Part::kNothing;
  if (held_ != Part::kLast && !(has_step_ && !several_)) return;
  stage_ = Stage::kIdle;
  effects->push_back(step_effect::Finish{applied_});
  applied_.reset();
  contributors_.reset();
  has_parts_ = has_step_ = is_apart_ = false;
  DealIn(world_, effects);
}

// ---- worlds ----

void Steps::EnterWorld(int64_t number, int32_t size, int32_t place) {
  world_ = number;
  worlds_[number] = {size, place};
}

Standing Steps::standing(bool has_sets) const { return {holds_state_, released_, stage_, dealt_in_, has_sets}; }

bool Steps::Hear(const std::vector<Standing>& standings) { return ringtrain::Settle(standings, &settlement_); }

std::optional<int32_t> Steps::place_in_dealing() const {
  if (!settlement_.dealt_in) return {};
  const auto found = worlds_.find(*settlement_.dealt_in);
  return found == worlds_.end() ? -1 : found->second.place;
}

void Steps::Settle(const std::vector<int32_t>& places, StepEffects* effects) {
  if (holds_state_ && settlement_.released > released_)
    Release(effects);
  else if (stage_ == Stage::kWhole)
    stage_ = Stage::kBegun;
  const bool has_ended = settlement_.releases && stage_ == Stage::kIdle;
  const bool is_open = settlement_.dealt_in && !has_ended;
  if (is_open || stage_ == Stage::kIdle) contributors_ = is_open ? Contributors(places) : std::nullopt;
  if (stage_ == Stage::kIdle) DealIn(is_open ? *settlement_.dealt_in : world_, effects);
  worlds_.erase(worlds_.begin(), worlds_.lower_bound(std::min(dealt_in_, world_)));
  if (settlement_.gives_state) effects->push_back(step_effect::RefuseUnlike{});
  if (settlement_.renews_sets) effects->push_back(step_effect::RenewSets{});
  if (settlement_.gives_state) effects->push_back(step_effect::TakeState{});
}

void Steps::TookState() {
  released_ = settlement_.released;
  holds_state_ = true;
}

void Steps::DealIn(int64_t world, StepEffects* effects) {
  dealt_in_ = world;
  const Place place = worlds_.at(world);
  effects->push_back(step_effect::Deal{world, place.size, place.place});
}

}  // namespace ringtrain
