// The way to the core, which lives in another shared object: its functions, a table that Python hands over
// (rt_functions in ringtrain.h), and its contexts by slot. An operation carries the number of a slot, since
// TensorFlow's threads belong to no rank: slot 0 is the context that init() opened, whichever that is by now; the ranks
// of a testing.World have slots of their own.
#ifndef RINGTRAIN_TENSORFLOW_CORE_LINK_H_
#define RINGTRAIN_TENSORFLOW_CORE_LINK_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <string>

#include "include/ringtrain.h"

namespace ringtrain::tensorflow {

class CoreLink {
 public:
  // One in each process. Never destroyed: TensorFlow's threads outlive static objects.
  static CoreLink& Get();

  void Connect(const rt_functions* functions) { functions_ = functions; }
  // context: NULL empties the slot. cuda_lib: the option, where the driver of its world lies. Returns when no call uses
  // the slot's former context any more.
  void Bind(int64_t slot, rt_context* context, const char* cuda_lib);

  const rt_functions& functions() const { return *functions_; }
  // Index of the GPU on which memory lies, as CUDA counts them; -1 if its driver does not know it. TensorFlow's own
  // numbers are others as soon as a program makes only some GPUs visible to it.
  int32_t DeviceOf(const void* memory);
  // Calls `use(context)` and returns its result; the context cannot go away meanwhile. nullptr stands for an empty
  // slot.
  template <typename Use>
  auto With(int64_t slot, Use use) {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    auto found = slots_.find(slot);
    return use(found == slots_.end() ? nullptr : found->second.context);
  }
  // A name for an unnamed operation: they are matched in the order of submission.
  std::string NextName(int64_t slot, const std::string& operation, int32_t process_set);

 private:
  struct Slot {
    rt_context* context = nullptr;
    std::map<std::pair<std::string, int32_t>, int64_t> unnamed;  // submissions so far, by operation and process set
  };

  const rt_functions* functions_ = nullptr;
  std::shared_mutex mutex_;
  std::map<int64_t, Slot> slots_;  // guarded by mutex_
  std::string cuda_lib_;           // guarded by mutex_; a process has one driver
};

}  // namespace ringtrain::tensorflow
#endif  // RINGTRAIN_TENSORFLOW_CORE_LINK_H_
