#include "tensorflow/core_link.h"

#include "tensorflow/kernel_api.h"

namespace ringtrain::tensorflow {

CoreLink& CoreLink::Get() {
  static CoreLink* const link = new CoreLink;
  return *link;
}

void CoreLink::Bind(int64_t slot, rt_context* context) {
  std::unique_lock<std::shared_mutex> lock(mutex_);
  slots_.erase(slot);
  if (context != nullptr) slots_[slot].context = context;
}

std::string CoreLink::NextName(int64_t slot, const std::string& operation, int32_t process_set) {
  std::unique_lock<std::shared_mutex> lock(mutex_);
  auto found = slots_.find(slot);
  const int64_t number = found == slots_.end() ? 0 : ++found->second.unnamed[{operation, process_set}];
  return "tensorflow." + operation + ".noname." + std::to_string(number);
}

}  // namespace ringtrain::tensorflow

using ringtrain::tensorflow::CoreFunctions;
using ringtrain::tensorflow::CoreLink;

// Called by ringtrain/tensorflow/library.py.
#pragma GCC visibility push(default)
extern "C" {

// What of TensorFlow's C API is missing; "" if everything is there and the operations are registered. Static.
const char* rt_tensorflow_missing(void) { return ringtrain::tensorflow::tf().missing.c_str(); }

void rt_tensorflow_connect(const CoreFunctions* functions) { CoreLink::Get().Connect(*functions); }

void rt_tensorflow_bind(int64_t slot, rt_context* context) { CoreLink::Get().Bind(slot, context); }

}  // extern "C"
#pragma GCC visibility pop
