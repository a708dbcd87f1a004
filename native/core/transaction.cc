#include "core/transaction.h"

#include <algorithm>

namespace ringtrain {
namespace {

bool Contains(const Uids& uids, const Uid& uid) { return std::find(uids.begin(), uids.end(), uid) != uids.end(); }

}  // namespace

Settlement Settle(const std::vector<Standing>& survivors) {
  Step newest = 0;
  for (const Standing& survivor : survivors) newest = std::max(newest, survivor.released);
  const auto any = [&](WindowStage least) {
    return [=](const Standing& survivor) { return survivor.released == newest && survivor.stage >= least; };
  };
  if (std::all_of(survivors.begin(), survivors.end(), any(WindowStage::kWhole))) return {newest + 1, true};
  // Who is behind is whole for the newest step, since somebody has released it, and has begun nothing after it.
  return {newest, std::none_of(survivors.begin(), survivors.end(), any(WindowStage::kBegun))};
}

// ---- the order of the samples ----

std::vector<Positions> SampleOrder::Slice(uint64_t from, uint64_t count) const {
  std::vector<Positions> slice;
  std::vector<Positions> left = given_back_;
  left.push_back({next_, next_ + from + count});
  for (const Positions& range : left) {
    const uint64_t length = range.last - range.first, skipped = std::min(from, length);
    const uint64_t taken = std::min(count, length - skipped);
    from -= skipped;
    count -= taken;
    if (taken > 0) slice.push_back({range.first + skipped, range.first + skipped + taken});
  }
  return slice;
}

void SampleOrder::Take(uint64_t count) {
  for (const Positions& range : Slice(0, count)) {
    if (range.first >= next_) {
      next_ = range.last;
    } else if (range.last < given_back_.front().last) {
      given_back_.front().first = range.last;
    } else {
      given_back_.erase(given_back_.begin());
    }
  }
}

void SampleOrder::GiveBack(const std::vector<Positions>& positions) {
  given_back_.insert(given_back_.end(), positions.begin(), positions.end());
  std::sort(given_back_.begin(), given_back_.end(),
            [](const Positions& a, const Positions& b) { return a.first < b.first; });
  std::vector<Positions> merged;
  for (const Positions& range : given_back_)
    if (!merged.empty() && merged.back().last == range.first)
      merged.back().last = range.last;
    else
      merged.push_back(range);
  given_back_ = std::move(merged);
}

// ---- the program ----

std::vector<Positions> Transaction::Begin() {
  stage_ = WindowStage::kBegun;
  if (dealt_.empty()) dealt_ = members_;
  return ShareOf(me_);
}

bool Transaction::Submitted(const std::string& name) {
  operations_[name] = false;
  return running_;
}

void Transaction::Closed(TransactionEffects* effects) {
  closed_ = true;
  BecomeWhole(effects);
}

// ---- the present epoch ----

void Transaction::ResultHeld(const std::string& name, TransactionEffects* effects) {
  if (!running_) return;
  operations_.at(name) = true;
  BecomeWhole(effects);
}

void Transaction::PeerIsWhole(const Uid& peer, Step step, bool pauses, TransactionEffects* effects) {
  if (!running_) return;
  whole_[peer] = std::max(whole_[peer], step);
  if (pauses) pause_after_ = std::max(pause_after_, step);
  ReleaseIfAllAreWhole(effects);
}

void Transaction::BecomeWhole(TransactionEffects* effects) {
  const bool all_held =
      std::all_of(operations_.begin(), operations_.end(), [](const auto& operation) { return operation.second; });
  if (!running_ || stage_ != WindowStage::kBegun || !closed_ || !all_held) return;
  stage_ = WindowStage::kWhole;
  effects->push_back(transaction_effect::TellWhole{released_ + 1, asked_to_pause_});
  PeerIsWhole(me_, released_ + 1, asked_to_pause_, effects);
}

void Transaction::ReleaseIfAllAreWhole(TransactionEffects* effects) {
  const Step step = released_ + 1;
  const auto is_whole = [&](const Uid& member) { return whole_[member] >= step; };
  if (stage_ != WindowStage::kWhole || !std::all_of(members_.begin(), members_.end(), is_whole)) return;
  Release(effects);
  if (pause_after_ < step) return;
  paused_ = true;
  effects->push_back(transaction_effect::Pause{});
}

void Transaction::Release(TransactionEffects* effects) {
  std::vector<Positions> unused;
  for (const Uid& member : gone_)
    for (const Positions& range : ShareOf(member)) unused.push_back(range);
  order_.Take(dealt_.size() * share_);
  order_.GiveBack(unused);
  effects->push_back(transaction_effect::Release{++released_, dealt_.size() - gone_.size()});
  stage_ = WindowStage::kIdle;
  closed_ = false;
  dealt_.clear();
  gone_.clear();
  operations_.clear();
}

std::vector<Positions> Transaction::ShareOf(const Uid& member) const {
  const auto place = std::find(dealt_.begin(), dealt_.end(), member) - dealt_.begin();
  return order_.Slice(static_cast<uint64_t>(place) * share_, share_);
}

// ---- a change of the world ----

Standing Transaction::Stop() {
  running_ = false;
  return {released_, stage_};
}

bool Transaction::Settle(const Settlement& settlement, const Uids& members, TransactionEffects* effects) {
  const bool behind = settlement.released == released_ + 1;
  if (!behind && settlement.released != released_) return false;
  if (behind && stage_ != WindowStage::kWhole) return false;
  if (behind) Release(effects);
  if (settlement.fresh && stage_ != WindowStage::kIdle) return false;
  if (stage_ == WindowStage::kWhole) stage_ = WindowStage::kBegun;
  for (auto& operation : operations_) operation.second = false;
  // It may have been dealt by a settlement before, when somebody who is gone now had begun.
  if (settlement.fresh) dealt_.clear();
  if (!settlement.fresh && dealt_.empty()) dealt_ = members_;
  gone_.clear();
  for (const Uid& member : dealt_)
    if (!Contains(members, member)) gone_.push_back(member);
  members_ = members;
  return true;
}

void Transaction::Adopt(const StepProgress& progress) {
  released_ = progress.released;
  order_ = progress.order;
}

void Transaction::Run(const Uids& members, bool pauses, TransactionEffects* effects) {
  members_ = members;
  running_ = true;
  paused_ = false;
  asked_to_pause_ = pauses;
  pause_after_ = 0;
  whole_.clear();
  transaction_effect::Submit again;
  for (const auto& operation : operations_) again.names.push_back(operation.first);
  if (!again.names.empty()) effects->push_back(std::move(again));
  BecomeWhole(effects);
}

}  // namespace ringtrain
