// Elements in blocks that share a scale, so that a large value spoils the rounding of its neighbours alone.
//
//             elements   scale      an element         a whole block   of float32's bytes
//     int8    256        float32    8 bits, [-127, 127]   260 bytes    1/3.94
//     int4    128        bfloat16   4 bits, [-7, 7]        66 bytes    1/7.76
//
//     block     scale, then the elements' codes; in int4 byte i has element i in its low half, and in its high half
//               element i + n/2 of the block's n, n/2 rounded up
//     scale     the largest magnitude of the block / the highest code; for bfloat16 rounded up
//     element   code * scale
//
// Codes are rounded to nearest, ties to even: all ranks get the same bits, and a value is off by half a scale at most.
// What is smaller than half a scale becomes 0. A block with an infinity or a NaN is all NaN, on every rank. A block
// with no magnitude of 2^-119 or more, where scales would be subnormal, is all 0.
//
// Sums are taken in float32, in host order, and rounded once more. With feedback, what both roundings have lost is
// added before the next ones, so that it is late and not lost; of a block that is NaN it stays what it was.
//
// Compare Dettmers, "8-Bit Approximations for Parallelism in Deep Learning" (2015), Dettmers et al., "8-bit Optimizers
// via Block-wise Quantization" (2021), and for the feedback Seide et al., "1-Bit Stochastic Gradient Descent" (2014),
// and Tang et al., "DoubleSqueeze" (2019), which has it at both roundings.
#ifndef RINGTRAIN_KERNELS_SCALED_BLOCKS_H_
#define RINGTRAIN_KERNELS_SCALED_BLOCKS_H_

#include "kernels/codec.h"

namespace ringtrain {

struct Int8Form {
  static constexpr size_t kBlock = 256, kScaleBytes = 4;
  static constexpr float kMostCode = 127.0f;
  static constexpr size_t CodeBytes(size_t elements) { return elements; }
};

struct Int4Form {
  static constexpr size_t kBlock = 128, kScaleBytes = 2;
  static constexpr float kMostCode = 7.0f;
  static constexpr size_t CodeBytes(size_t elements) { return (elements + 1) / 2; }
};

// Of float32 and float64, which is rounded to float32 first. For sums and averages.
template <typename BlockForm>
class ScaledBlocks : public Codec {
 public:
  // Small tensors are vectors mostly, such as biases, which have few bytes and much influence: they travel as they are.
  explicit ScaledBlocks(bool feedback) : Codec({BlockForm::kBlock, 4096, feedback}) {}

  size_t WireBytes(DType dtype, size_t count) const override;
  void Encode(DType dtype, char* wire, const void* elements, size_t count, Feedback feedback) const override;
  void Decode(DType dtype, void* elements, const char* wire, size_t count, double factor) const override;
  void Reduce(DType dtype, Reduction reduction, char* wire, const void* const* sources, int source_count, size_t count,
              const Scaling& scaling, Feedback feedback) const override;
};

extern template class ScaledBlocks<Int8Form>;
extern template class ScaledBlocks<Int4Form>;

}  // namespace ringtrain
#endif  // RINGTRAIN_KERNELS_SCALED_BLOCKS_H_
