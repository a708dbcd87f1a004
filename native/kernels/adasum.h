// The arithmetic of Adasum on two vectors. float32 and float64, in double; rounded once, to nearest even.
#ifndef RINGTRAIN_KERNELS_ADASUM_H_
#define RINGTRAIN_KERNELS_ADASUM_H_

#include <cstddef>

#include "tables/tables.h"

namespace ringtrain {

struct Dots {
  double aa = 0, ab = 0, bb = 0;
};

// The products of `count` elements. The order of additions depends on `count` alone, not on the processor.
Dots AdasumDots(DType dtype, const void* a, const void* b, size_t count);

// dst[i] = factor_a * a[i] + factor_b * b[i]. `dst` may be `a` or `b`, no other overlap.
void AdasumCombine(DType dtype, void* dst, const void* a, const void* b, size_t count, double factor_a,
                   double factor_b);

}  // namespace ringtrain
#endif  // RINGTRAIN_KERNELS_ADASUM_H_
