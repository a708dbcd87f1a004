// The floating-point mode in which the kernels run.
//
// A user's thread may drive the context, and it may flush subnormals to zero (torch.set_flush_denormal). Which thread
// reduces must not show in the bits, so the kernels run in IEEE 754's default mode and give the thread its own back.
#ifndef RINGTRAIN_KERNELS_FLOAT_MODE_H_
#define RINGTRAIN_KERNELS_FLOAT_MODE_H_

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ringtrain {

#if defined(__x86_64__)
class DefaultFloatMode {
 public:
  DefaultFloatMode() : saved_(_mm_getcsr()) { Set(kDefault); }
  ~DefaultFloatMode() { Set(saved_); }

 private:
  static constexpr unsigned kDefault = 0x1f80;  // exceptions masked, nearest even, subnormals kept
  static constexpr unsigned kFlags = 0x3f;      // what has happened so far; not a mode
  void Set(unsigned mode) const {
    if (((saved_ ^ kDefault) & ~kFlags) != 0) _mm_setcsr(mode);
  }
  unsigned saved_;
};
#elif defined(__aarch64__)
class DefaultFloatMode {
 public:
  DefaultFloatMode() {
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved_));
    if (saved_ != 0) Set(0);
  }
  ~DefaultFloatMode() {
    if (saved_ != 0) Set(saved_);
  }

 private:
  static void Set(uint64_t mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode)); }
  uint64_t saved_;
};
#else
struct DefaultFloatMode {
  DefaultFloatMode() {}
};
#endif

}  // namespace ringtrain
#endif  // RINGTRAIN_KERNELS_FLOAT_MODE_H_
