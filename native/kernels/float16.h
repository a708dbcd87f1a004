// float16 and bfloat16 as bits: exact widening to float32, and narrowing that rounds to nearest even.
//
// Free of branches and of tables, so that the compiler vectorises loops over these functions, and bit for bit what the
// processor's own instructions (F16C) give: subnormals are kept, overflow becomes infinity, a NaN keeps its sign and
// the top of its payload and becomes quiet. Used by the reduction kernels.
#ifndef RINGTRAIN_KERNELS_FLOAT16_H_
#define RINGTRAIN_KERNELS_FLOAT16_H_

#include <cstdint>
#include <cstring>

namespace ringtrain {

#define RT_ALWAYS_INLINE inline __attribute__((always_inline))

RT_ALWAYS_INLINE float FloatFromBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

RT_ALWAYS_INLINE uint32_t BitsFromFloat(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// condition ? yes : no, in arithmetic: a conditional would be compiled to a branch, which no loop vectorises.
RT_ALWAYS_INLINE uint32_t Select(bool condition, uint32_t yes, uint32_t no) {
  const uint32_t mask = 0u - static_cast<uint32_t>(condition);
  return (yes & mask) | (no & ~mask);
}

RT_ALWAYS_INLINE float Float16ToFloat32(uint16_t half) {
  const uint32_t magnitude = static_cast<uint32_t>(half & 0x7fff) << 13;
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t rebias = (127u - 15u) << 23;
  // A subnormal is a count of 2^-24: with an exponent put in front it is that much above 2^-14, exactly.
  const uint32_t subnormal =
      BitsFromFloat(FloatFromBits(magnitude + rebias + (1u << 23)) - FloatFromBits(rebias + (1u << 23)));
  const uint32_t infinite = magnitude + 2 * rebias;
  const uint32_t quiet = Select(magnitude > (0x7c00u << 13), 1u << 22, 0);
  uint32_t bits = magnitude + rebias;
  bits = Select(magnitude >= (0x7c00u << 13), infinite | quiet, bits);
  bits = Select(magnitude < (0x0400u << 13), subnormal, bits);
  return FloatFromBits(bits | sign);
}

RT_ALWAYS_INLINE uint16_t Float32ToFloat16(float value) {
  const uint32_t bits = BitsFromFloat(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t odd = (magnitude >> 13) & 1u;
  const uint32_t normal = (magnitude - ((127u - 15u) << 23) + 0xfffu + odd) >> 13;
  // Below 2^-14 the addition of 0.5 lets the processor round at 2^-24, where float16's subnormals end.
  const uint32_t subnormal = BitsFromFloat(FloatFromBits(magnitude) + 0.5f) - BitsFromFloat(0.5f);
  const uint32_t not_a_number = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  uint32_t half = normal;
  half = Select(magnitude < (113u << 23), subnormal, half);
  half = Select(magnitude >= (143u << 23), 0x7c00u, half);
  half = Select(magnitude > (255u << 23), not_a_number, half);
  return static_cast<uint16_t>(half | ((bits >> 16) & 0x8000u));
}

RT_ALWAYS_INLINE float BFloat16ToFloat32(uint16_t brain) { return FloatFromBits(static_cast<uint32_t>(brain) << 16); }

RT_ALWAYS_INLINE uint16_t Float32ToBFloat16(float value) {
  const uint32_t bits = BitsFromFloat(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t not_a_number = (bits >> 16) | 0x40u;
  return static_cast<uint16_t>(Select((bits & 0x7fffffffu) > 0x7f800000u, not_a_number, rounded));
}

}  // namespace ringtrain
#endif  // RINGTRAIN_KERNELS_FLOAT16_H_
