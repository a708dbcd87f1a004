#include "elastic/samples.h"

#include <algorithm>
#include <utility>

namespace ringtrain {
namespace {

template <typename Slice>
int64_t SizeOf(const Slice& slice) {
  return (slice.end - slice.first + slice.step - 1) / slice.step;
}

}  // namespace

Samples::Samples(const SamplePlan& plan, int64_t next, std::vector<int64_t> given_back)
    : plan_(plan), next_(next), given_back_(std::move(given_back)), batch_(plan.batch) {}

void Samples::Deal(int32_t size, int32_t place) {
  if (size != size_ || place != place_) {
    ForgetAhead();
    before_.clear();
  }
  size_ = size;
  place_ = place;
  if (plan_.cut == Cut::kGrowingBatches) batch_ = plan_.batch * size;
}

void Samples::Share(const std::vector<int64_t>& parts) {
  std::vector<int64_t> before = {0};
  for (int64_t part : parts) before.push_back(before.back() + part);
  if (by_position() || parts.size() != static_cast<size_t>(size_) || before.back() == 0) before.clear();
  if (before == before_) return;
  ForgetAhead();
  before_ = std::move(before);
}

void Samples::Cost(std::vector<int64_t> costs) {
  if (by_position()) costs.clear();
  if (costs == costs_) return;
  ForgetAhead();
  costs_ = std::move(costs);
}

std::vector<int64_t> Samples::DrawAhead() {
  std::vector<int64_t> positions;
  const int64_t number = drawn_;
  if (by_position()) {
    if (number * size_ < left()) positions.push_back(At((number * size_ + place_) % left()));
  } else if (number < Batches(left())) {
    const Slice slice = SliceOf(number);
    for (int64_t at = slice.first; at < slice.end; at += slice.step) positions.push_back(At(number * batch_ + at));
  }
  drawn_ += !positions.empty();
  return positions;
}

int64_t Samples::Take(int64_t draws) {
  const int64_t first = std::exchange(taken_, taken_ + draws);
  return by_position() ? draws : SizeOfShares(first, taken_);
}

void Samples::Release(const Contributors& contributors) {
  const int64_t dealt = Dealt(taken_);
  std::vector<int64_t> again;
  if (contributors) again = Lost(dealt, *contributors);
  const bool lost = !again.empty();
  const int64_t were_given_back = std::min(dealt, static_cast<int64_t>(given_back_.size()));
  again.insert(again.end(), given_back_.begin() + were_given_back, given_back_.end());
  std::sort(again.begin(), again.end());
  given_back_ = std::move(again);
  next_ += dealt - were_given_back;
  drawn_ -= std::exchange(taken_, 0);
  if (lost) ForgetAhead();  // what is left begins with them now
}

int64_t Samples::Weight(const Contributors& contributors) const {
  int64_t counts = 0;
  for (int64_t number = 0; number < taken_; ++number) {
    const int64_t count = CountIn(number);
    if (count >= size_) {
      counts += SizeOf(SliceOf(number));
      continue;
    }
    bool is_lowest = true;
    const auto same = [&](int32_t other) { return other < place_ && other % count == place_ % count; };
    if (contributors) {
      is_lowest = std::none_of(contributors->begin(), contributors->end(), same);
    } else {
      is_lowest = place_ < count;
    }
    counts += is_lowest;
  }
  return counts;
}

int64_t Samples::Work() const {
  int64_t work = 0;
  for (int64_t number = 0; number < taken_; ++number) {
    const Slice slice = SliceOf(number);
    for (int64_t at = slice.first; at < slice.end; at += slice.step) work += CostAt(number * batch_ + at);
  }
  return work;
}

int64_t Samples::draws_left() const {
  const int64_t draws = by_position() ? (left() + size_ - 1) / size_ : Batches(left());
  return std::max<int64_t>(0, draws - taken_);
}

int64_t Samples::shares_left() const {
  return by_position() ? draws_left() : SizeOfShares(taken_, taken_ + draws_left());
}

// ----

int64_t Samples::Batches(int64_t positions) const {
  return plan_.drops_last ? positions / batch_ : (positions + batch_ - 1) / batch_;
}

int64_t Samples::At(int64_t index) const {
  const auto again = static_cast<int64_t>(given_back_.size());
  return index < again ? given_back_[static_cast<size_t>(index)] : next_ + index - again;
}

int64_t Samples::CountIn(int64_t number) const { return std::min(batch_, left() - number * batch_); }

std::vector<int64_t> Samples::Begins(int64_t number) const {
  const int64_t count = CountIn(number);
  if (count < size_ || (before_.empty() && costs_.empty())) return {};
  std::vector<int64_t> begins;
  for (int64_t place = 0; place <= size_; ++place) {
    const bool is_equal = before_.empty();
    const int64_t parts = is_equal ? place : before_[static_cast<size_t>(place)];
    begins.push_back(place + (count - size_) * parts / (is_equal ? size_ : before_.back()));
  }
  return costs_.empty() ? begins : BeginsByCost(number, begins);
}

int64_t Samples::CostAt(int64_t index) const {
  return costs_.empty() ? 1 : costs_[static_cast<size_t>(At(index)) % costs_.size()];
}

// As large a part of what the batch costs as `parts` are of its positions, to within one of them; one position at
// least.
std::vector<int64_t> Samples::BeginsByCost(int64_t number, const std::vector<int64_t>& parts) const {
  const int64_t count = parts.back();
  std::vector<double> before = {0};  // of each position, what those before it cost
  for (int64_t at = 0; at < count; ++at)
    before.push_back(before.back() + static_cast<double>(CostAt(number * batch_ + at)));
  std::vector<int64_t> begins = {0};
  for (int64_t place = 1; place < size_; ++place) {
    const double due =
        before.back() * static_cast<double>(parts[static_cast<size_t>(place)]) / static_cast<double>(count);
    auto at = std::lower_bound(before.begin(), before.end(), due);
    if (at != before.begin() && due - at[-1] < at[0] - due) --at;
    begins.push_back(std::clamp<int64_t>(at - before.begin(), begins.back() + 1, count - (size_ - place)));
  }
  begins.push_back(count);
  return begins;
}

Samples::Slice Samples::SliceOf(int64_t number) const {
  const int64_t count = CountIn(number);
  const std::vector<int64_t> begins = Begins(number);
  const auto place = static_cast<size_t>(place_);
  if (!begins.empty()) return {begins[place], begins[place + 1], 1};
  return {count < size_ ? place_ % count : place_, count, size_};
}

int64_t Samples::SizeOfShares(int64_t first, int64_t end) const {
  int64_t positions = 0;
  for (int64_t number = first; number < end; ++number) positions += SizeOf(SliceOf(number));
  return positions;
}

int64_t Samples::Dealt(int64_t draws) const { return std::min(draws * (by_position() ? size_ : batch_), left()); }

std::vector<int64_t> Samples::Lost(int64_t dealt, const std::vector<int32_t>& contributors) const {
  std::vector<int64_t> lost;
  const int64_t batch = by_position() ? dealt : batch_;
  for (int64_t first = 0; first < dealt; first += batch) {
    const int64_t count = std::min(batch, dealt - first);
    const int64_t among = by_position() ? size_ : std::min<int64_t>(size_, count);
    const std::vector<int64_t> begins = by_position() ? std::vector<int64_t>() : Begins(first / batch);
    for (int64_t at = 0; at < count; ++at) {
      const auto has = [&](int32_t place) {
        if (begins.empty()) return place % among == at % among;
        return begins[static_cast<size_t>(place)] <= at && at < begins[static_cast<size_t>(place) + 1];
      };
      if (std::none_of(contributors.begin(), contributors.end(), has)) lost.push_back(At(first + at));
    }
  }
  return lost;
}

}  // namespace ringtrain
