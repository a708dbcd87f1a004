#include "kernels/adasum.h"

#include "kernels/float_mode.h"
#include "kernels/formats.h"
#include "kernels/level.h"

namespace ringtrain {
namespace {

constexpr size_t kLanes = 8;  // sums side by side, on every processor

template <typename T>
RT_ALWAYS_INLINE Dots DotElements(const T* a, const T* b, size_t count) {
  double aa[kLanes] = {}, ab[kLanes] = {}, bb[kLanes] = {};
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (size_t lane = 0; lane < kLanes; ++lane) {
      const double x = static_cast<double>(a[i + lane]), y = static_cast<double>(b[i + lane]);
      aa[lane] += x * x;
      ab[lane] += x * y;
      bb[lane] += y * y;
    }
  for (size_t lane = 0; i < count; ++i, ++lane) {
    const double x = static_cast<double>(a[i]), y = static_cast<double>(b[i]);
    aa[lane] += x * x;
    ab[lane] += x * y;
    bb[lane] += y * y;
  }
  Dots dots;
  for (size_t lane = 0; lane < kLanes; ++lane) {
    dots.aa += aa[lane];
    dots.ab += ab[lane];
    dots.bb += bb[lane];
  }
  return dots;
}

template <typename T>
RT_ALWAYS_INLINE void CombineElements(T* dst, const T* a, const T* b, size_t count, double factor_a, double factor_b) {
  RT_INDEPENDENT_ITERATIONS
  for (size_t i = 0; i < count; ++i)
    dst[i] = static_cast<T>(factor_a * static_cast<double>(a[i]) + factor_b * static_cast<double>(b[i]));
}

RT_ALWAYS_INLINE Dots DotsAny(DType dtype, const void* a, const void* b, size_t count) {
  if (dtype == DType::kFloat32) return DotElements(static_cast<const float*>(a), static_cast<const float*>(b), count);
  return DotElements(static_cast<const double*>(a), static_cast<const double*>(b), count);
}

RT_ALWAYS_INLINE void CombineAny(DType dtype, void* dst, const void* a, const void* b, size_t count, double factor_a,
                                 double factor_b) {
  if (dtype == DType::kFloat32)
    CombineElements(static_cast<float*>(dst), static_cast<const float*>(a), static_cast<const float*>(b), count,
                    factor_a, factor_b);
  else
    CombineElements(static_cast<double*>(dst), static_cast<const double*>(a), static_cast<const double*>(b), count,
                    factor_a, factor_b);
}

using DotsFunction = Dots (*)(DType, const void*, const void*, size_t);
using CombineFunction = void (*)(DType, void*, const void*, const void*, size_t, double, double);

Dots DotsBaseline(DType dtype, const void* a, const void* b, size_t count) { return DotsAny(dtype, a, b, count); }
#if defined(__x86_64__)
__attribute__((target("avx2"))) Dots DotsAvx2(DType dtype, const void* a, const void* b, size_t count) {
  return DotsAny(dtype, a, b, count);
}
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))) Dots DotsAvx512(DType dtype, const void* a, const void* b,
                                                                              size_t count) {
  return DotsAny(dtype, a, b, count);
}
constexpr ByLevel<DotsFunction> kDots = {DotsBaseline, DotsAvx2, DotsAvx512};
#else
constexpr ByLevel<DotsFunction> kDots = {DotsBaseline};
#endif

void CombineBaseline(DType dtype, void* dst, const void* a, const void* b, size_t count, double factor_a,
                     double factor_b) {
  CombineAny(dtype, dst, a, b, count, factor_a, factor_b);
}
#if defined(__x86_64__)
__attribute__((target("avx2"))) void CombineAvx2(DType dtype, void* dst, const void* a, const void* b, size_t count,
                                                 double factor_a, double factor_b) {
  CombineAny(dtype, dst, a, b, count, factor_a, factor_b);
}
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))) void CombineAvx512(DType dtype, void* dst, const void* a,
                                                                                 const void* b, size_t count,
                                                                                 double factor_a, double factor_b) {
  CombineAny(dtype, dst, a, b, count, factor_a, factor_b);
}
constexpr ByLevel<CombineFunction> kCombine = {CombineBaseline, CombineAvx2, CombineAvx512};
#else
constexpr ByLevel<CombineFunction> kCombine = {CombineBaseline};
#endif

}  // namespace

Dots AdasumDots(DType dtype, const void* a, const void* b, size_t count) {
  const DefaultFloatMode mode;
  return kDots.chosen()(dtype, a, b, count);
}

void AdasumCombine(DType dtype, void* dst, const void* a, const void* b, size_t count, double factor_a,
                   double factor_b) {
  const DefaultFloatMode mode;
  kCombine.chosen()(dtype, dst, a, b, count, factor_a, factor_b);
}

}  // namespace ringtrain
