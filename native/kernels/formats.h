// Formats: how the elements of a dtype lie in memory, and the type in which they are added. Used by the kernels.
#ifndef RINGTRAIN_KERNELS_FORMATS_H_
#define RINGTRAIN_KERNELS_FORMATS_H_

#include <cstddef>
#include <cstdint>

#include "kernels/float16.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ringtrain {

template <typename T>
struct Native {
  using Stored = T;
  using Value = T;
  static constexpr bool kConverts = false;
  static RT_ALWAYS_INLINE void Widen(const T*, T*, size_t) {}
  static RT_ALWAYS_INLINE void Narrow(const T*, T*, size_t) {}
};

struct BFloat16 {
  using Stored = uint16_t;
  using Value = float;
  static constexpr bool kConverts = true;
  static RT_ALWAYS_INLINE void Widen(const uint16_t* in, float* out, size_t n) {
    for (size_t i = 0; i < n; ++i) out[i] = BFloat16ToFloat32(in[i]);
  }
  static RT_ALWAYS_INLINE void Narrow(const float* in, uint16_t* out, size_t n) {
    for (size_t i = 0; i < n; ++i) out[i] = Float32ToBFloat16(in[i]);
  }
};

struct Float16 {
  using Stored = uint16_t;
  using Value = float;
  static constexpr bool kConverts = true;
  static RT_ALWAYS_INLINE void Widen(const uint16_t* in, float* out, size_t n) {
    for (size_t i = 0; i < n; ++i) out[i] = Float16ToFloat32(in[i]);
  }
  static RT_ALWAYS_INLINE void Narrow(const float* in, uint16_t* out, size_t n) {
    for (size_t i = 0; i < n; ++i) out[i] = Float32ToFloat16(in[i]);
  }
};

#if defined(__x86_64__)
// The same conversions by the processor's instructions, eight at a time.
struct Float16ByF16c {
  using Stored = uint16_t;
  using Value = float;
  static constexpr bool kConverts = true;
  __attribute__((target("avx,f16c"))) static void Widen(const uint16_t* in, float* out, size_t n) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8)
      _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i))));
    for (; i < n; ++i) out[i] = Float16ToFloat32(in[i]);
  }
  __attribute__((target("avx,f16c"))) static void Narrow(const float* in, uint16_t* out, size_t n) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i),
                       _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT));
    for (; i < n; ++i) out[i] = Float32ToFloat16(in[i]);
  }
};
#endif

}  // namespace ringtrain
#endif  // RINGTRAIN_KERNELS_FORMATS_H_
