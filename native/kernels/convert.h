// Conversion between a wide dtype and one of 16 bits, for a narrower wire.
#ifndef RINGTRAIN_KERNELS_CONVERT_H_
#define RINGTRAIN_KERNELS_CONVERT_H_

#include <cstddef>

#include "tables/tables.h"

namespace ringtrain {

// dst[i] = source[i] rounded to nearest even, from float32 or float64 (by way of float32) to float16 or bfloat16; or
// the other way, exactly but for the product with `factor`, in the wide type. Overflow becomes infinity, NaN stays NaN.
// No overlap.
void Convert(DType from, DType to, void* dst, const void* source, size_t count, double factor = 1.0);

}  // namespace ringtrain
#endif  // RINGTRAIN_KERNELS_CONVERT_H_
