// Steps of a program that need not call Python: a counter in Python's memory, which each execution takes one from.
#include <cstdint>
#include <new>
#include <string>

#include "jax/attributes.h"
#include "jax/ffi.h"

namespace ringtrain::jax {
namespace {

Error* Failed(const Api& api, const std::string& text) {
  ErrorCreate create{sizeof create, nullptr, text.c_str(), Code::kInternal};
  return api.error_create(&create);
}

// The result says whether the rest is over: 1 from the step on in which the counter has fallen below 0.
Error* CountStep(CallFrame* frame) {
  int64_t address = 0;
  AttributeReader reader(frame->attributes);
  reader.Read("steps", &address);
  if (!reader.missing().empty())
    return Failed(*frame->api, "the attribute " + reader.missing() +
                                   " is missing, or of another type. The program was compiled by another version of "
                                   "ringtrain: compile it again.");
  auto* steps = reinterpret_cast<int64_t*>(address);
  const bool rests = __atomic_sub_fetch(steps, 1, __ATOMIC_RELAXED) >= 0;
  *static_cast<uint8_t*>(static_cast<const Buffer*>(frame->results.buffers[0])->data) = rests ? 0 : 1;
  return nullptr;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// The handler that ringtrain/jax/library.py registers with XLA beside that of operations.
Error* rt_jax_rest(CallFrame* frame) {
  if (AnsweredMetadata(frame)) return nullptr;
  try {
    return CountStep(frame);
  } catch (const std::bad_alloc&) {
    return Failed(*frame->api, "no memory left.");
  }
}

}  // extern "C"
#pragma GCC visibility pop

}  // namespace ringtrain::jax
