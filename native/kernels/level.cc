#include "kernels/level.h"

#include <atomic>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace ringtrain {
namespace {

bool Always() { return true; }

struct Variant {
  const char* name;
  bool (*available)();
  Level level;
};

#if defined(__x86_64__)
// __builtin_cpu_supports has no name for F16C in the older compilers that we support.
bool HasF16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
}
bool HasAvx2() { return __builtin_cpu_supports("avx2") && HasF16c(); }
bool HasAvx512() {
  return HasAvx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

constexpr Variant kVariants[] = {
    {"avx512", HasAvx512, Level::kAvx512}, {"avx2", HasAvx2, Level::kAvx2}, {"baseline", Always, Level::kBaseline}};
#else
constexpr Variant kVariants[] = {{"baseline", Always, Level::kBaseline}};
#endif

// The best variant of that name, any name if it is empty; nullptr if this processor has none.
const Variant* FindVariant(const char* name) {
  for (const Variant& variant : kVariants)
    if ((*name == '\0' || std::strcmp(variant.name, name) == 0) && variant.available()) return &variant;
  return nullptr;
}

std::atomic<const Variant*>& ChosenVariant() {
  static std::atomic<const Variant*> chosen{FindVariant("")};
  return chosen;
}

}  // namespace

Level ChosenLevel() { return ChosenVariant().load(std::memory_order_relaxed)->level; }

const char* KernelVariant() { return ChosenVariant().load(std::memory_order_relaxed)->name; }

bool SelectKernelVariant(const char* name) {
  const Variant* variant = FindVariant(name);
  if (variant == nullptr) return false;
  ChosenVariant().store(variant, std::memory_order_relaxed);
  return true;
}

}  // namespace ringtrain
