#include "tensorflow/core_link.h"

#include <cstdio>

#include "tensorflow/kernel_api.h"

namespace ringtrain::tensorflow {

CoreLink& CoreLink::Get() {
  static CoreLink* const link = new CoreLink;
  return *link;
}

void CoreLink::Bind(int64_t slot, rt_context* context, const char* cuda_lib) {
  std::unique_lock<std::shared_mutex> lock(mutex_);
  cuda_lib_ = cuda_lib;
  slots_.erase(slot);
  if (context != nullptr) slots_[slot].context = context;
}

int32_t CoreLink::DeviceOf(const void* memory) {
  std::shared_lock<std::shared_mutex> lock(mutex_);
  return functions_->device_of(cuda_lib_.c_str(), memory);
}

std::string CoreLink::NextName(int64_t slot, const std::string& operation, int32_t process_set) {
  std::unique_lock<std::shared_mutex> lock(mutex_);
  auto found = slots_.find(slot);
  const int64_t number = found == slots_.end() ? 0 : ++found->second.unnamed[{operation, process_set}];
  return "tensorflow." + operation + ".noname." + std::to_string(number);
}

}  // namespace ringtrain::tensorflow

using ringtrain::tensorflow::CoreLink;

// Called by ringtrain/tensorflow/library.py.
#pragma GCC visibility push(default)
extern "C" {

// What of TensorFlow's C API is missing; "" if everything is there and the operations are registered. Static.
const char* rt_tensorflow_missing(void) { return ringtrain::tensorflow::tf().missing.c_str(); }

// Of ringtrain.h, as this library was built with it: the version of the functions that it takes.
int32_t rt_tensorflow_abi_version(void) { return RT_ABI_VERSION; }

void rt_tensorflow_connect(const rt_functions* functions) { CoreLink::Get().Connect(functions); }

void rt_tensorflow_bind(int64_t slot, rt_context* context, const char* cuda_lib) {
  CoreLink::Get().Bind(slot, context, cuda_lib);
}

// Writes the name of the next unnamed eager operation, which is then counted; at most `bytes` with the 0 at its end.
void rt_tensorflow_next_name(int64_t slot, const char* operation, int32_t process_set, char* name, size_t bytes) {
  std::snprintf(name, bytes, "%s", CoreLink::Get().NextName(slot, operation, process_set).c_str());
}

}  // extern "C"
#pragma GCC visibility pop
