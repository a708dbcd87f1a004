// Residuals: what a codec with feedback (kernels/codec.h) has lost of each tensor, to be made up for the next time the
// tensor is reduced. Held where the rounding is done:
//
//     sent      of a host's sum: with the member that leads the element's ring on that host
//     finished  of the sum of all hosts: with the leader on the host that finishes the element
//
// The epoch owns them. A tensor is found by its process set, the name of its operation and its place among the
// operation's tensors, which are the same on every rank, also on one that has joined.
// When it comes with another number of elements it is another tensor: it begins with zeros.
//
// Names that came once and never again, as those with a number of a step in them, are forgotten when there are many: of
// these kMostOnce bytes are kept, the latest. So the first loss of a large tensor may be forgotten, too; when its name
// comes again it is known as one that stays.
//
// What was lost before the last time is kept beside what the last time has lost. A step whose results are not used,
// since an overflow was found in them, is taken back with it: all are as they were before that step.
//
// In the next world of an elastic job other members round an element, and sums have another divisor. So what a rank has
// kept becomes a debt, as a part of the result: sent / divisor + finished. The rank's next operation of that name adds
// it to its input (run/error_feedback.h), whoever rounds the element then. So nothing need be sent when a world
// changes, and no rank depends on another: the debts of those that are left are paid, each once, and those of the dead
// are gone.
#ifndef RINGTRAIN_COLLECTIVES_RESIDUALS_H_
#define RINGTRAIN_COLLECTIVES_RESIDUALS_H_

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <new>
#include <string>
#include <tuple>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "kernels/codec.h"

namespace ringtrain {

// Zeros at first. A rank touches its own cells of a tensor alone, and pages that nobody touches take no memory.
class ResidualElements {
 public:
  explicit ResidualElements(size_t count) : memory_(static_cast<float*>(std::calloc(count, sizeof(float))), std::free) {
    if (memory_ == nullptr && count > 0) throw std::bad_alloc();
  }
  float* data() const { return memory_.get(); }

 private:
  std::unique_ptr<float, void (*)(void*)> memory_;
};

class Residual {
 public:
  explicit Residual(size_t count)
      : elements_(count),
        sent_{{Elements(count), Elements(count)}, nullptr},
        finished_{{Elements(count), Elements(count)}, nullptr} {}

  size_t elements() const { return elements_; }
  size_t bytes() const { return 4 * elements_ * sizeof(float); }
  // An operation has begun with it, or it was loaded, and not been turned: it must not go meanwhile.
  void Begin() { under_way_ = true; }
  bool under_way() const { return under_way_; }
  // Its name has come again.
  void Stay() { stays_ = true; }
  bool stays() const { return stays_; }
  // Of elements that this rank rounds.
  Feedback Sent(size_t first, size_t count) { return At(&sent_, first, count); }
  Feedback Finished(size_t first, size_t count) { return At(&finished_, first, count); }

  // What this rank has lost in worlds before, as a part of the result; nullptr for nothing.
  const float* Debt() const { return debts_[newest_] == nullptr ? nullptr : debts_[newest_]->data(); }

  // The operation is over: what it has lost is what the next one makes up for.
  // divisor: of its sum; paid: whether the debt was in its input; number: rises from operation to operation.
  void Turn(double divisor = 1.0, bool paid = true, int64_t number = 0) {
    under_way_ = false;
    sent_.loaded.reset();
    finished_.loaded.reset();
    debts_[1 - newest_] = paid ? nullptr : debts_[newest_];
    newest_ = 1 - newest_;
    divisors_[newest_] = divisor;
    number_ = number;
    can_take_back_ = true;
  }
  // What the next operation makes up for: what this rank keeps, and zeros for the elements that others round; or what
  // was loaded, if no operation came since. Then it is true. A debt is in what is finished, being of the same kind.
  bool Save(float* sent, float* finished) const {
    const bool is_loaded = sent_.loaded != nullptr;
    std::memcpy(sent, is_loaded ? sent_.loaded->data() : sent_.versions[newest_].data(), elements_ * sizeof(float));
    std::memcpy(finished, is_loaded ? finished_.loaded->data() : finished_.versions[newest_].data(),
                elements_ * sizeof(float));
    for (size_t i = 0; Debt() != nullptr && i < elements_; ++i) finished[i] += Debt()[i];
    return is_loaded;
  }
  // Of all elements: the next operation takes those that this rank rounds.
  void Load(const float* sent, const float* finished) {
    const bool stays = stays_, under_way = under_way_;
    *this = Residual(elements_);
    stays_ = stays;
    under_way_ = under_way;
    for (const auto& [kept, from] : {std::pair(&sent_, sent), std::pair(&finished_, finished)}) {
      kept->loaded = std::make_unique<Elements>(elements_);
      std::memcpy(kept->loaded->data(), from, elements_ * sizeof(float));
    }
  }
  // The last operation's results were used.
  void Keep() { can_take_back_ = false; }
  // As if the last operation had not been. Nothing if that was done already, or it was kept, or is number `after` or
  // one before it.
  void TakeBack(int64_t after = -1) {
    if (number_ <= after) return;
    if (can_take_back_) newest_ = 1 - newest_;
    can_take_back_ = false;
  }
  // For the next world. What was loaded, and not taken so far, stays that.
  std::unique_ptr<Residual> HandedOn() const {
    auto next = std::make_unique<Residual>(elements_);
    if (sent_.loaded != nullptr) {
      next->Load(sent_.loaded->data(), finished_.loaded->data());
      return next;
    }
    next->debts_[newest_] = Owed(newest_);
    if (can_take_back_) next->debts_[1 - newest_] = Owed(1 - newest_);
    next->newest_ = newest_;
    next->number_ = number_;
    next->can_take_back_ = can_take_back_;
    return next;
  }

 private:
  using Elements = ResidualElements;
  struct Kept {
    Elements versions[2];
    std::unique_ptr<Elements> loaded;  // and not taken so far
  };

  Feedback At(Kept* kept, size_t first, size_t count) {
    float* const before = kept->versions[newest_].data() + first;
    if (kept->loaded != nullptr) std::memcpy(before, kept->loaded->data() + first, count * sizeof(float));
    return {before, kept->versions[1 - newest_].data() + first};
  }

  // All of a version, as a part of the result.
  std::shared_ptr<const Elements> Owed(int version) const {
    auto owed = std::make_shared<Elements>(elements_);
    const float* const sent = sent_.versions[version].data();
    const float* const finished = finished_.versions[version].data();
    const float* const before = debts_[version] == nullptr ? nullptr : debts_[version]->data();
    const auto divisor = static_cast<float>(divisors_[version]);
    for (size_t i = 0; i < elements_; ++i) {
      const float all = sent[i] / divisor + finished[i] + (before == nullptr ? 0.0f : before[i]);
      if (all != 0.0f) owed->data()[i] = all;  // else its page may stay untouched
    }
    return owed;
  }

  size_t elements_;
  Kept sent_, finished_;
  std::shared_ptr<const Elements> debts_[2];  // by version
  double divisors_[2] = {1.0, 1.0};           // of the sums in which a version was lost
  int newest_ = 0;
  int64_t number_ = 0;
  bool can_take_back_ = false, under_way_ = false, stays_ = false;
};

// Any thread; but what concerns an operation only while none of its name is under way.
class Residuals {
 public:
  static constexpr size_t kMostOnce = 256 << 20;  // bytes

  explicit Residuals(size_t most_once = kMostOnce) : most_once_(most_once) {}

  // Of tensor `place` of the operation, for which it is turned at its end; stays valid until then.
  Residual* Of(int process_set, const std::string& operation, size_t place, size_t elements) {
    MutexLock lock(mutex_);
    const Key key = {process_set, operation, place};
    std::unique_ptr<Residual>& known = of_[key];
    const bool is_first = known == nullptr && seen_.insert(HashOf(key)).second;
    if (known == nullptr || known->elements() != elements) known = std::make_unique<Residual>(elements);
    known->Begin();
    if (is_first)
      NoteFirst(key, known->bytes());
    else
      known->Stay();
    return known.get();
  }
  // Whether some were forgotten; true once.
  bool HasForgotten() {
    MutexLock lock(mutex_);
    return std::exchange(has_news_, false);
  }
  // The results of the last operation of each name that begins with the prefix were used.
  void Keep(int process_set, const std::string& prefix) {
    ForEach(process_set, prefix, [](const Key&, Residual& residual) { residual.Keep(); });
  }
  // Takes those operations back that were not kept.
  // after: the number of the last one that is not to be taken back.
  void TakeBack(int process_set, const std::string& prefix, int64_t after = -1) {
    ForEach(process_set, prefix, [after](const Key&, Residual& residual) { residual.TakeBack(after); });
  }
  // Residual::Turn, with the operation's number.
  void Turn(Residual* residual, double divisor, bool paid) {
    MutexLock lock(mutex_);
    residual->Turn(divisor, paid, ++turns_);
  }
  // The number of the last operation.
  int64_t turns() {
    MutexLock lock(mutex_);
    return turns_;
  }
  // Of one that came with so many elements; else nullptr.
  Residual* Find(int process_set, const std::string& operation, size_t place, size_t elements) {
    MutexLock lock(mutex_);
    const auto known = of_.find({process_set, operation, place});
    return known == of_.end() || known->second->elements() != elements ? nullptr : known->second.get();
  }
  // This world is the next one after that of `former`, in which nothing is under way any more. What a rank has lost in
  // the set of all ranks goes on; other sets are gone.
  void Inherit(Residuals& former) {
    std::vector<std::pair<Key, std::unique_ptr<Residual>>> handed;
    former.ForEach(0, "",
                   [&](const Key& key, const Residual& residual) { handed.emplace_back(key, residual.HandedOn()); });
    const int64_t turns = former.turns();
    MutexLock lock(mutex_);
    for (auto& [key, residual] : handed) {
      residual->Stay();
      of_[key] = std::move(residual);
    }
    turns_ = turns;
  }
  // The process set is gone.
  void Forget(int process_set) {
    MutexLock lock(mutex_);
    const auto begin = of_.lower_bound({process_set, "", 0});
    of_.erase(begin, of_.lower_bound({process_set + 1, "", 0}));
  }

  using Key = std::tuple<int, std::string, size_t>;  // process set, operation, place
  // action(const Key&, Residual&) for each whose operation's name begins with the prefix.
  template <typename Action>
  void ForEach(int process_set, const std::string& prefix, Action action) {
    MutexLock lock(mutex_);
    for (auto at = of_.lower_bound({process_set, prefix, 0}); at != of_.end(); ++at) {
      const auto& [set, operation, place] = at->first;
      if (set != process_set || operation.compare(0, prefix.size(), prefix) != 0) return;
      action(at->first, *at->second);
    }
  }

 private:
  static uint64_t HashOf(const Key& key) {
    return std::hash<std::string>()(std::get<1>(key)) * 31 + std::get<2>(key) * 64 +
           static_cast<uint64_t>(std::get<0>(key));
  }

  // A name has come for the first time; forgets others that came once, the oldest first.
  void NoteFirst(const Key& key, size_t bytes) RT_REQUIRES(mutex_) {
    if (seen_.size() > kMostSeen) seen_.clear();
    once_.emplace_back(key, bytes);
    once_bytes_ += bytes;
    for (size_t left = once_.size(); once_bytes_ > most_once_ && left > 1; --left) {
      const auto [oldest, its_bytes] = once_.front();
      once_.pop_front();
      const auto at = of_.find(oldest);
      if (at != of_.end() && at->second->under_way()) {
        once_.emplace_back(oldest, its_bytes);
        continue;
      }
      once_bytes_ -= its_bytes;
      if (at == of_.end() || at->second->stays()) continue;
      of_.erase(at);
      has_news_ |= !std::exchange(has_forgotten_, true);
    }
  }

  static constexpr size_t kMostSeen = 1 << 20;
  const size_t most_once_;
  Mutex mutex_;
  std::map<Key, std::unique_ptr<Residual>> of_ RT_GUARDED_BY(mutex_);
  std::deque<std::pair<Key, size_t>> once_ RT_GUARDED_BY(mutex_);  // keys in the order in which they came first
  size_t once_bytes_ RT_GUARDED_BY(mutex_) = 0;                    // of these
  std::unordered_set<uint64_t> seen_ RT_GUARDED_BY(mutex_);        // hashes of keys, also of those forgotten
  bool has_forgotten_ RT_GUARDED_BY(mutex_) = false, has_news_ RT_GUARDED_BY(mutex_) = false;
  int64_t turns_ RT_GUARDED_BY(mutex_) = 0;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_COLLECTIVES_RESIDUALS_H_
