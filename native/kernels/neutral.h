// Neutral elements: what leaves a reduction as it is.
#ifndef RINGTRAIN_KERNELS_NEUTRAL_H_
#define RINGTRAIN_KERNELS_NEUTRAL_H_

#include <cstddef>

#include "tables/tables.h"

namespace ringtrain {

// Fills `count` elements with the neutral element of the reduction (0, 1, highest, lowest), for ranks that have joined.
void FillNeutral(DType dtype, Reduction reduction, void* dst, size_t count);

}  // namespace ringtrain
#endif  // RINGTRAIN_KERNELS_NEUTRAL_H_
