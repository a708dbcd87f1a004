#include "jax/worlds.h"

namespace ringtrain::jax {

Worlds& Worlds::Get() {
  static Worlds* const worlds = new Worlds;
  return *worlds;
}

void Worlds::Bind(int64_t slot, rt_context* context) {
  std::unique_lock<std::shared_mutex> lock(mutex_);
  contexts_.erase(slot);
  if (context != nullptr) contexts_[slot] = context;
}

}  // namespace ringtrain::jax

using ringtrain::jax::Worlds;

// Called by ringtrain/jax/library.py.
#pragma GCC visibility push(default)
extern "C" {

// Of ringtrain.h, as this library was built with it: the version of the functions that it takes.
int32_t rt_jax_abi_version(void) { return RT_ABI_VERSION; }

void rt_jax_connect(const rt_functions* functions) { Worlds::Get().Connect(functions); }

void rt_jax_bind(int64_t slot, rt_context* context) { Worlds::Get().Bind(slot, context); }

}  // extern "C"
#pragma GCC visibility pop
