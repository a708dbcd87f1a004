// The way to the core, which lives in another shared object: its functions, a table that Python hands over
// (rt_functions in ringtrain.h), and its contexts by slot. A call of a compiled program carries the number of a slot,
// since XLA's threads belong to no rank: slot 0 is the context that init() opened, whichever that is by now; the ranks
// of a testing.World have slots of their own.
#ifndef RINGTRAIN_JAX_WORLDS_H_
#define RINGTRAIN_JAX_WORLDS_H_

#include <cstdint>
#include <map>
#include <mutex>
#include <shared_mutex>

#include "include/ringtrain.h"

namespace ringtrain::jax {

class Worlds {
 public:
  // One in each process. Never destroyed: XLA's threads outlive static objects.
  static Worlds& Get();

  void Connect(const rt_functions* functions) { functions_ = functions; }
  // context: NULL empties the slot. Returns when no call uses the slot's former context any more.
  void Bind(int64_t slot, rt_context* context);

  const rt_functions& functions() const { return *functions_; }
  // Calls `use(context)` and returns its result; the context cannot go away meanwhile. nullptr stands for an empty
  // slot.
  template <typename Use>
  auto With(int64_t slot, Use use) {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    auto found = contexts_.find(slot);
    return use(found == contexts_.end() ? nullptr : found->second);
  }

 private:
  const rt_functions* functions_ = nullptr;
  std::shared_mutex mutex_;
  std::map<int64_t, rt_context*> contexts_;  // guarded by mutex_
};

}  // namespace ringtrain::jax
#endif  // RINGTRAIN_JAX_WORLDS_H_
