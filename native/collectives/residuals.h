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
// What was lost before the last time is kept beside what the last time has lost. A step whose results are not used,
// since an overflow was found in them, is taken back with it: all are as they were before that step.
#ifndef RINGTRAIN_COLLECTIVES_RESIDUALS_H_
#define RINGTRAIN_COLLECTIVES_RESIDUALS_H_

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <string>
#include <tuple>

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
  // Of elements that this rank rounds.
  Feedback Sent(size_t first, size_t count) { return At(&sent_, first, count); }
  Feedback Finished(size_t first, size_t count) { return At(&finished_, first, count); }

  // The operation is over: what it has lost is what the next one makes up for.
  void Turn() {
    sent_.loaded.reset();
    finished_.loaded.reset();
    newest_ = 1 - newest_;
    can_take_back_ = true;
  }
  // What the next operation makes up for: what this rank keeps, and zeros for the elements that others round; or what
  // was loaded, if no operation came since. Then it is true.
  bool Save(float* sent, float* finished) const {
    const bool is_loaded = sent_.loaded != nullptr;
    std::memcpy(sent, is_loaded ? sent_.loaded->data() : sent_.versions[newest_].data(), elements_ * sizeof(float));
    std::memcpy(finished, is_loaded ? finished_.loaded->data() : finished_.versions[newest_].data(),
                elements_ * sizeof(float));
    return is_loaded;
  }
  // Of all elements: the next operation takes those that this rank rounds.
  void Load(const float* sent, const float* finished) {
    *this = Residual(elements_);
    for (const auto& [kept, from] : {std::pair(&sent_, sent), std::pair(&finished_, finished)}) {
      kept->loaded = std::make_unique<Elements>(elements_);
      std::memcpy(kept->loaded->data(), from, elements_ * sizeof(float));
    }
  }
  // The last operation's results were used.
  void Keep() { can_take_back_ = false; }
  // As if the last operation had not been. Nothing if that was done already, or it was kept.
  void TakeBack() {
    if (can_take_back_) newest_ = 1 - newest_;
    can_take_back_ = false;
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

  size_t elements_;
  Kept sent_, finished_;
  int newest_ = 0;
  bool can_take_back_ = false;
};

// Any thread; but what concerns an operation only while none of its name is under way.
class Residuals {
 public:
  // Of tensor `place` of the operation; stays valid until it comes with another number of elements.
  Residual* Of(int process_set, const std::string& operation, size_t place, size_t elements) {
    MutexLock lock(mutex_);
    std::unique_ptr<Residual>& known = of_[{process_set, operation, place}];
    if (known == nullptr || known->elements() != elements) known = std::make_unique<Residual>(elements);
    return known.get();
  }
  // The results of the last operation of each name that begins with the prefix were used.
  void Keep(int process_set, const std::string& prefix) {
    ForEach(process_set, prefix, [](const Key&, Residual& residual) { residual.Keep(); });
  }
  // Takes those operations back that were not kept.
  void TakeBack(int process_set, const std::string& prefix) {
    ForEach(process_set, prefix, [](const Key&, Residual& residual) { residual.TakeBack(); });
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
  Mutex mutex_;
  std::map<Key, std::unique_ptr<Residual>> of_ RT_GUARDED_BY(mutex_);
};

}  // namespace ringtrain
#endif  // RINGTRAIN_COLLECTIVES_RESIDUALS_H_
