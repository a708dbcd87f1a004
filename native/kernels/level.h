// Level: which vector instructions the kernels use. The process has one: the best that its processor knows, unless a
// test or a benchmark takes another, to compare the bits.
//
// Each kernel is one set of loops, plain C++ that the compiler vectorises. They are forced inline into a function for
// each level, whose target attribute decides the instructions. Nothing depends on the level but the speed: the
// operations are the same, in the same order, and each is rounded as IEEE 754 says.
#ifndef RINGTRAIN_KERNELS_LEVEL_H_
#define RINGTRAIN_KERNELS_LEVEL_H_

// Promises the compiler that iterations do not depend on each other although `dst` may be the very address of a source.
#if defined(__clang__)
#define RT_INDEPENDENT_ITERATIONS _Pragma("clang loop vectorize(assume_safety)")
#else
#define RT_INDEPENDENT_ITERATIONS _Pragma("GCC ivdep")
#endif

namespace ringtrain {

enum class Level { kBaseline, kAvx2, kAvx512 };

Level ChosenLevel();

// One kernel: its functions by level.
template <typename Functions>
struct ByLevel {
  Functions baseline;
#if defined(__x86_64__)
  Functions avx2, avx512;
#endif

  const Functions& chosen() const {
    switch (ChosenLevel()) {
#if defined(__x86_64__)
      case Level::kAvx512:
        return avx512;
      case Level::kAvx2:
        return avx2;
#endif
      default:
        return baseline;
    }
  }
};

// The level's name: "avx512", "avx2" or "baseline".
const char* KernelVariant();
// Forces a level ("" for the best one); false if this processor has not got it.
bool SelectKernelVariant(const char* name);

}  // namespace ringtrain
#endif  // RINGTRAIN_KERNELS_LEVEL_H_
