#include "kernels/convert.h"

#include <algorithm>
#include <type_traits>

#include "kernels/float_mode.h"
#include "kernels/formats.h"
#include "kernels/level.h"

namespace ringtrain {
namespace {

constexpr size_t kRoom = 1024;  // elements of a block: as float32 they stay in the first-level cache

template <typename Format, typename Wide>
RT_ALWAYS_INLINE void NarrowElements(const Wide* in, uint16_t* out, size_t count) {
  alignas(64) float room[kRoom];
  size_t n;
  for (size_t begin = 0; begin < count; begin += n) {
    n = std::min(count - begin, kRoom);
    if constexpr (std::is_same_v<Wide, float>) {
      Format::Narrow(in + begin, out + begin, n);
    } else {
      for (size_t i = 0; i < n; ++i) room[i] = static_cast<float>(in[begin + i]);
      Format::Narrow(room, out + begin, n);
    }
  }
}

template <typename Format, typename Wide>
RT_ALWAYS_INLINE void WidenElements(const uint16_t* in, Wide* out, size_t count, double factor) {
  alignas(64) float room[kRoom];
  size_t n;
  for (size_t begin = 0; begin < count; begin += n) {
    n = std::min(count - begin, kRoom);
    Format::Widen(in + begin, room, n);
    for (size_t i = 0; i < n; ++i) out[begin + i] = static_cast<Wide>(room[i]) * static_cast<Wide>(factor);
  }
}

template <typename Format>
RT_ALWAYS_INLINE void ConvertElements(DType from, DType to, void* dst, const void* source, size_t count,
                                      double factor) {
  auto* narrowed = static_cast<uint16_t*>(dst);
  const auto* narrow = static_cast<const uint16_t*>(source);
  if (from == DType::kFloat32) return NarrowElements<Format>(static_cast<const float*>(source), narrowed, count);
  if (from == DType::kFloat64) return NarrowElements<Format>(static_cast<const double*>(source), narrowed, count);
  if (to == DType::kFloat32) return WidenElements<Format>(narrow, static_cast<float*>(dst), count, factor);
  WidenElements<Format>(narrow, static_cast<double*>(dst), count, factor);
}

template <typename Float16Format>
RT_ALWAYS_INLINE void ConvertAny(DType from, DType to, void* dst, const void* source, size_t count, double factor) {
  if (from == DType::kFloat16 || to == DType::kFloat16)
    return ConvertElements<Float16Format>(from, to, dst, source, count, factor);
  ConvertElements<BFloat16>(from, to, dst, source, count, factor);
}

using ConvertFunction = void (*)(DType, DType, void*, const void*, size_t, double);

void ConvertBaseline(DType from, DType to, void* dst, const void* source, size_t count, double factor) {
  ConvertAny<Float16>(from, to, dst, source, count, factor);
}
#if defined(__x86_64__)
__attribute__((target("avx2,f16c"))) void ConvertAvx2(DType from, DType to, void* dst, const void* source, size_t count,
                                                      double factor) {
  ConvertAny<Float16ByF16c>(from, to, dst, source, count, factor);
}
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c"))) void ConvertAvx512(DType from, DType to, void* dst,
                                                                                      const void* source, size_t count,
                                                                                      double factor) {
  ConvertAny<Float16ByF16c>(from, to, dst, source, count, factor);
}
constexpr ByLevel<ConvertFunction> kConvert = {ConvertBaseline, ConvertAvx2, ConvertAvx512};
#else
constexpr ByLevel<ConvertFunction> kConvert = {ConvertBaseline};
#endif

}  // namespace

void Convert(DType from, DType to, void* dst, const void* source, size_t count, double factor) {
  const DefaultFloatMode mode;
  kConvert.chosen()(from, to, dst, source, count, factor);
}

}  // namespace ringtrain
