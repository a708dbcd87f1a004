#include "agree/promises.h"

#include <algorithm>
#include <map>

namespace ringtrain {

Promises::Promises(const std::vector<int>& hosts, int me, int fanout) : me_(me) {
  std::map<int, size_t> place_of;  // of a host in the order of their lowest members
  std::vector<int> leaders;        // by place
  for (size_t member = 0; member < hosts.size(); ++member) {
    if (place_of.emplace(hosts[member], leaders.size()).second) leaders.push_back(static_cast<int>(member));
    if (hosts[member] == hosts[static_cast<size_t>(me)]) here_.push_back(static_cast<int>(member));
  }
  one_host_ = leaders.size() == 1;
  counters_.resize(here_.size());
  if (!leads()) return;
  const auto width = static_cast<size_t>(std::max(fanout, 1));
  const size_t mine = place_of.at(hosts[static_cast<size_t>(me)]);
  if (mine > 0) neighbours_.push_back({leaders[(mine - 1) / width], true});
  for (size_t below = mine * width + 1; below <= mine * width + width && below < leaders.size(); ++below)
    neighbours_.push_back({leaders[below], false});
}

void Promises::Begin(uint32_t schedule) {
  schedule_ = schedule;
  counters_.assign(counters_.size(), 0);
  here_promised_ = agreed_ = taken_ = 0;
  last_.clear();
  for (Neighbour& neighbour : neighbours_) neighbour.told = 0;
  Agree(0);  // neighbours may have begun before
}

void Promises::See(const std::vector<PromiseSign>& signs) {
  for (size_t place = 0; place < signs.size(); ++place) {
    const PromiseSign& sign = signs[place];
    if (sign.schedule != schedule_ || sign.promised <= counters_[place]) continue;
    Note(counters_[place], sign.promised, here_[place], sign.at, 0);
    counters_[place] = sign.promised;
  }
  here_promised_ = *std::min_element(counters_.begin(), counters_.end());
  Agree(signs[0].schedule == schedule_ ? signs[0].agreed : 0);
}

void Promises::Hear(Nanoseconds now, int member, uint32_t schedule, uint64_t count, int last, Nanoseconds gap) {
  for (Neighbour& neighbour : neighbours_) {
    if (neighbour.member != member || schedule < neighbour.schedule) continue;
    if (schedule == schedule_ && !neighbour.above && count > Theirs(neighbour))
      Note(Theirs(neighbour), count, last, now, now - gap);
    neighbour.theirs = schedule == neighbour.schedule ? std::max(neighbour.theirs, count) : count;
    neighbour.schedule = schedule;
  }
  Agree(0);
}

uint64_t Promises::Theirs(const Neighbour& neighbour) const {
  return neighbour.schedule == schedule_ ? neighbour.theirs : 0;
}

// A leader finds it out; the others of a set on several hosts are told by theirs.
void Promises::Agree(uint64_t told_by_leader) {
  uint64_t agreed = one_host_ || leads() ? here_promised_ : told_by_leader;
  for (const Neighbour& neighbour : neighbours_) agreed = std::min(agreed, Theirs(neighbour));
  agreed_ = std::max(agreed_, agreed);
}

std::vector<Promises::Told> Promises::TakeNews() {
  std::vector<Told> news;
  for (Neighbour& told : neighbours_) {
    uint64_t count = here_promised_;
    for (const Neighbour& other : neighbours_)
      if (other.member != told.member) count = std::min(count, Theirs(other));
    if (count <= told.told) continue;
    news.push_back({told.member, count, told.told});
    told.told = count;
  }
  return news;
}

// ---- who comes last ----

void Promises::Note(uint64_t from, uint64_t to, int member, Nanoseconds at, Nanoseconds before) {
  for (uint64_t batch = std::max(from, taken_); batch < to; ++batch) {
    const auto place = static_cast<size_t>(batch - taken_);
    if (place >= last_.size()) last_.resize(place + 1);
    LastPromise& last = last_[place];
    if (at >= last.at)
      last = {member, at, std::max(last.at, before)};
    else
      last.before = std::max(last.before, at);
  }
}

LastPromise Promises::TakeLast() {
  ++taken_;
  if (last_.empty()) return {};
  const LastPromise last = last_.front();
  last_.pop_front();
  return last;
}

LastPromise Promises::LastBelow(uint64_t count) const {
  const auto place = static_cast<size_t>(count - taken_ - 1);
  return count > taken_ && place < last_.size() ? last_[place] : LastPromise();
}

}  // namespace ringtrain
