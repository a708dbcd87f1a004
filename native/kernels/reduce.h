// Element-wise reduction of several contributions in one pass.
//
// The order of additions is the order of `sources`, left to right, for every element and on every processor:
// dst = ((s0 ∘ s1) ∘ s2) …, so the caller's order of sources alone decides the bits (compiled without fused
// multiply-add). float16 and bfloat16 are accumulated in float32 and rounded once, to nearest even, at the end.
#ifndef RINGTRAIN_KERNELS_REDUCE_H_
#define RINGTRAIN_KERNELS_REDUCE_H_

#include <cstddef>

#include "tables/tables.h"

namespace ringtrain {

// What happens to the values besides the reduction; both are skipped where they would change nothing.
struct Scaling {
  double prescale = 1.0;            // of each source, before the reduction
  double postscale = 1.0;           // of the result, after division and root
  double divisor = 1.0;             // of the result; a whole number for integers, which truncate towards zero
  const double* weights = nullptr;  // of the sources, besides the prescale; not for integers
  Map map = Map::kItself;           // of each source, once it is multiplied; another one of floats alone
  Finish finish =
      Finish::kLeave;  // of the result, behind the division, which is the divisor's, and before the postscale

  // The halves, for a reduction in several steps: what the first one does, and what the last one does.
  Scaling of_sources() const {
    Scaling half;
    half.prescale = prescale;
    half.weights = weights;
    half.map = map;
    return half;
  }
  Scaling of_result() const {
    Scaling half;
    half.divisor = divisor;
    half.finish = finish;
    half.postscale = postscale;
    return half;
  }
  bool identity() const {
    return prescale == 1.0 && postscale == 1.0 && divisor == 1.0 && weights == nullptr && map == Map::kItself &&
           only_divides();
  }
  bool only_divides() const {
    return finish == Finish::kLeave || finish == Finish::kDivide || finish == Finish::kDivideByWeights;
  }
  double factor(int source) const { return weights == nullptr ? prescale : prescale * weights[source]; }
};

// dst[i] = scale(s0[i] ∘ s1[i] ∘ …) for `count` elements. Requires source_count >= 1. `dst` may be one of the sources
// (exactly the same address), no other overlap. Addresses need no alignment beyond the element's.
// Only the fold is the reduction's: what it does before and after, such as an average's division, is in `scaling`.
// float32 is scaled in float32, float64 in float64, 16-bit floats in float32. Integers are divided exactly; their pre-
// and postscale are multiplied in double and truncated to int64, saturating, before they wrap to the dtype. bool is not
// scaled: sum and max are OR, product and min are AND. Integer sums and products wrap; uint64 saturates at its own
// highest value. Complex numbers are added and scaled by their parts, and floats of 8 bits are not reduced; both as
// agree/check.cc admits them. min and max propagate NaN; the
// sign and payload of a NaN that two others make are open.
void Reduce(DType dtype, Reduction reduction, void* dst, const void* const* sources, int source_count, size_t count,
            const Scaling& scaling);

}  // namespace ringtrain
#endif  // RINGTRAIN_KERNELS_REDUCE_H_
