// The reduction kernels: one set of loops, compiled for each level of vector instructions and chosen at run time.
//
// Called by the collectives on every chunk, from whichever thread drives the context. The loops are plain C++ that the
// compiler vectorises; they are forced inline into one function per processor level (kVariants at the end), whose
// target attribute decides the instructions. Only float16 needs intrinsics. Nothing here depends on the level but the
// speed: the operations are the same, in the same order, and each is rounded as IEEE 754 says.
#include "kernels/reduce.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <type_traits>

#include "kernels/adasum.h"
#include "kernels/float_mode.h"
#include "kernels/formats.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

// Promises the compiler that iterations do not depend on each other although `dst` may be the very address of a source.
#if defined(__clang__)
#define RT_INDEPENDENT_ITERATIONS _Pragma("clang loop vectorize(assume_safety)")
#else
#define RT_INDEPENDENT_ITERATIONS _Pragma("GCC ivdep")
#endif

namespace ringtrain {
namespace {

// ---- the operations on one element ----

// Integers wrap: they are combined without sign, and at least as wide as `unsigned`, where overflow is defined.
template <typename T>
using Wrapping = std::conditional_t<(sizeof(T) > sizeof(unsigned)), uint64_t, unsigned>;

template <typename T>
RT_ALWAYS_INLINE T Sum(T a, T b) {
  if constexpr (std::is_integral_v<T>)
    return static_cast<T>(static_cast<Wrapping<T>>(a) + static_cast<Wrapping<T>>(b));
  else
    return a + b;
}
template <typename T>
RT_ALWAYS_INLINE T Product(T a, T b) {
  if constexpr (std::is_integral_v<T>)
    return static_cast<T>(static_cast<Wrapping<T>>(a) * static_cast<Wrapping<T>>(b));
  else
    return a * b;
}
// A NaN in `a` is taken because it differs from itself, one in `b` because no comparison with it is true.
template <typename T>
RT_ALWAYS_INLINE T Min(T a, T b) {
  return ((a < b) | (a != a)) ? a : b;
}
template <typename T>
RT_ALWAYS_INLINE T Max(T a, T b) {
  return ((a > b) | (a != a)) ? a : b;
}
// Of integers; others are refused when they are submitted.
template <typename T>
RT_ALWAYS_INLINE T And(T a, T b) {
  return static_cast<T>(a & b);
}
template <typename T>
RT_ALWAYS_INLINE T Or(T a, T b) {
  return static_cast<T>(a | b);
}
template <typename T>
RT_ALWAYS_INLINE T Xor(T a, T b) {
  return static_cast<T>(a ^ b);
}

#define RT_COMBINE(operation) \
  RT_INDEPENDENT_ITERATIONS   \
  for (size_t i = 0; i < n; ++i) out[i] = operation(a[i], b[i])

// out[i] = a[i] ∘ b[i]
template <typename T>
RT_ALWAYS_INLINE void Combine(Fold fold, T* out, const T* a, const T* b, size_t n) {
  switch (fold) {
    case Fold::kAdd:
    case Fold::kProject:  // of one source; more are AdasumCombine's
      RT_COMBINE(Sum<T>);
      return;
    case Fold::kLeast:
      RT_COMBINE(Min<T>);
      return;
    case Fold::kGreatest:
      RT_COMBINE(Max<T>);
      return;
    case Fold::kMultiply:
      RT_COMBINE(Product<T>);
      return;
    case Fold::kAnd:
      if constexpr (std::is_integral_v<T>) RT_COMBINE(And<T>);
      return;
    case Fold::kOr:
      if constexpr (std::is_integral_v<T>) RT_COMBINE(Or<T>);
      return;
    case Fold::kXor:
      if constexpr (std::is_integral_v<T>) RT_COMBINE(Xor<T>);
      return;
  }
}

// ---- scaling ----

template <typename T>
RT_ALWAYS_INLINE T Truncate(double value) {
  constexpr double kLimit = 9223372036854775808.0;  // 2^63
  if (value != value) return 0;
  if constexpr (std::is_same_v<T, uint64_t>) {
    if (value >= 2 * kLimit) return std::numeric_limits<uint64_t>::max();
    if (value >= kLimit) return static_cast<uint64_t>(value);
  }
  if (value >= kLimit) return static_cast<T>(std::numeric_limits<int64_t>::max());
  if (value < -kLimit) return static_cast<T>(std::numeric_limits<int64_t>::min());
  return static_cast<T>(static_cast<int64_t>(value));
}

template <typename T>
RT_ALWAYS_INLINE void Multiply(T* out, const T* in, size_t n, double factor) {
  RT_INDEPENDENT_ITERATIONS
  for (size_t i = 0; i < n; ++i) {
    if constexpr (std::is_integral_v<T>)
      out[i] = Truncate<T>(static_cast<double>(in[i]) * factor);
    else
      out[i] = in[i] * static_cast<T>(factor);
  }
}

// Up to 32 bits the quotient of two integers, rounded to a double, never reaches the next integer, so truncating it is
// exact (and vectorises, unlike integer division).
template <typename T>
RT_ALWAYS_INLINE void Divide(T* out, const T* in, size_t n, double divisor) {
  RT_INDEPENDENT_ITERATIONS
  for (size_t i = 0; i < n; ++i) {
    if constexpr (std::is_floating_point_v<T>)
      out[i] = in[i] / static_cast<T>(divisor);
    else if constexpr (sizeof(T) == 8)
      out[i] = in[i] / static_cast<T>(divisor);
    else
      out[i] = static_cast<T>(static_cast<double>(in[i]) / divisor);
  }
}

template <typename T>
RT_ALWAYS_INLINE void Square(T* out, const T* in, size_t n) {
  RT_INDEPENDENT_ITERATIONS
  for (size_t i = 0; i < n; ++i) out[i] = Product<T>(in[i], in[i]);
}

template <typename T>
RT_ALWAYS_INLINE void Root(T* values, size_t n) {
  if constexpr (std::is_floating_point_v<T>)
    for (size_t i = 0; i < n; ++i) values[i] = std::sqrt(values[i]);
}

// Division, root and postscale, in place, over a block that is in the first-level cache.
template <typename T>
RT_ALWAYS_INLINE void Finish(T* values, size_t n, const Scaling& scaling) {
  int exponent;
  const bool power_of_two = std::frexp(scaling.divisor, &exponent) == 0.5;
  if (scaling.divisor != 1.0) {
    if (std::is_floating_point_v<T> && power_of_two)
      Multiply(values, values, n, 1.0 / scaling.divisor);
    else
      Divide(values, values, n, scaling.divisor);
  }
  if (scaling.roots) Root(values, n);
  if (scaling.postscale != 1.0) Multiply(values, values, n, scaling.postscale);
}

// ---- one dtype ----

constexpr size_t kBlockBytes = 4096;  // accumulator and operand of a block stay in the first-level cache

// One source's values from `begin` on, mapped: where they lie if they can be used as they are, else in `room`.
template <typename Format>
RT_ALWAYS_INLINE const typename Format::Value* Load(const void* source, size_t begin, size_t n, double factor,
                                                    bool squares, typename Format::Value* room) {
  using Value = typename Format::Value;
  const auto* stored = static_cast<const typename Format::Stored*>(source) + begin;
  const Value* values;
  if constexpr (Format::kConverts) {
    Format::Widen(stored, room, n);
    values = room;
  } else {
    values = stored;
  }
  if (factor != 1.0) {
    Multiply<Value>(room, values, n, factor);
    values = room;
  }
  if (!squares) return values;
  Square<Value>(room, values, n);
  return room;
}

// Block by block: total = s0 ∘ s1, total = total ∘ s2, …; the last step writes where the result belongs. Two plain
// sources need no room of ours, and are one block.
template <typename Format>
RT_ALWAYS_INLINE void ReduceElements(Fold fold, void* dst, const void* const* sources, int source_count, size_t count,
                                     const Scaling& scaling) {
  using Value = typename Format::Value;
  constexpr size_t kRoom = kBlockBytes / sizeof(Value);
  alignas(64) Value total[kRoom];
  alignas(64) Value operand[kRoom];
  const bool one_pass = !Format::kConverts && source_count == 2 && scaling.identity();
  const size_t block = one_pass ? count : kRoom;
  size_t n;
  for (size_t begin = 0; begin < count; begin += n) {
    n = count - begin < block ? count - begin : block;
    auto* stored = static_cast<typename Format::Stored*>(dst) + begin;
    Value* result = total;
    if constexpr (!Format::kConverts) result = stored;
    const Value* left = Load<Format>(sources[0], begin, n, scaling.factor(0), scaling.squares, total);
    for (int j = 1; j < source_count; ++j) {
      const Value* right = Load<Format>(sources[j], begin, n, scaling.factor(j), scaling.squares, operand);
      Value* out = j + 1 < source_count ? total : result;
      Combine(fold, out, left, right, n);
      left = out;
    }
    if (left != result) std::memmove(result, left, n * sizeof(Value));
    Finish(result, n, scaling);
    if constexpr (Format::kConverts) Format::Narrow(result, stored, n);
  }
}

// Any non-zero byte is true on the way in, and true is 1 on the way out. Scaling a truth value has no meaning.
RT_ALWAYS_INLINE void ReduceBool(Fold fold, void* dst, const void* const* sources, int source_count, size_t count) {
  const bool all = fold == Fold::kLeast || fold == Fold::kMultiply || fold == Fold::kAnd;
  auto* out = static_cast<uint8_t*>(dst);
  size_t n;
  for (size_t begin = 0; begin < count; begin += n) {
    n = count - begin < kBlockBytes ? count - begin : kBlockBytes;
    uint8_t total[kBlockBytes];
    std::memset(total, all, n);
    for (int j = 0; j < source_count; ++j) {
      const auto* in = static_cast<const uint8_t*>(sources[j]) + begin;
      if (all)
        for (size_t i = 0; i < n; ++i) total[i] = total[i] & static_cast<uint8_t>(in[i] != 0);
      else if (fold == Fold::kXor)
        for (size_t i = 0; i < n; ++i) total[i] = total[i] ^ static_cast<uint8_t>(in[i] != 0);
      else
        for (size_t i = 0; i < n; ++i) total[i] = total[i] | static_cast<uint8_t>(in[i] != 0);
    }
    std::memcpy(out + begin, total, n);
  }
}

template <typename Float16Format>
RT_ALWAYS_INLINE void ReduceAny(DType dtype, Fold fold, void* dst, const void* const* sources, int source_count,
                                size_t count, const Scaling& scaling) {
  switch (dtype) {
    case DType::kUInt8:
      return ReduceElements<Native<uint8_t>>(fold, dst, sources, source_count, count, scaling);
    case DType::kInt8:
      return ReduceElements<Native<int8_t>>(fold, dst, sources, source_count, count, scaling);
    case DType::kInt16:
      return ReduceElements<Native<int16_t>>(fold, dst, sources, source_count, count, scaling);
    case DType::kInt32:
      return ReduceElements<Native<int32_t>>(fold, dst, sources, source_count, count, scaling);
    case DType::kInt64:
      return ReduceElements<Native<int64_t>>(fold, dst, sources, source_count, count, scaling);
    case DType::kFloat16:
      return ReduceElements<Float16Format>(fold, dst, sources, source_count, count, scaling);
    case DType::kBFloat16:
      return ReduceElements<BFloat16>(fold, dst, sources, source_count, count, scaling);
    case DType::kFloat32:
      return ReduceElements<Native<float>>(fold, dst, sources, source_count, count, scaling);
    case DType::kFloat64:
      return ReduceElements<Native<double>>(fold, dst, sources, source_count, count, scaling);
    case DType::kBool:
      return ReduceBool(fold, dst, sources, source_count, count);
    case DType::kUInt16:
      return ReduceElements<Native<uint16_t>>(fold, dst, sources, source_count, count, scaling);
    case DType::kUInt32:
      return ReduceElements<Native<uint32_t>>(fold, dst, sources, source_count, count, scaling);
    case DType::kUInt64:
      return ReduceElements<Native<uint64_t>>(fold, dst, sources, source_count, count, scaling);
    case DType::kComplex64:  // whose sums, quotients and multiples are those of both parts
      return ReduceElements<Native<float>>(fold, dst, sources, source_count, 2 * count, scaling);
    case DType::kComplex128:
      return ReduceElements<Native<double>>(fold, dst, sources, source_count, 2 * count, scaling);
    case DType::kFloat8E4M3FN:
    case DType::kFloat8E4M3FNUZ:
    case DType::kFloat8E5M2:
    case DType::kFloat8E5M2FNUZ:
    case DType::kFloat8E8M0FNU:
      return;  // refused when it is submitted
  }
}

// ---- between a wide format and a 16-bit one ----

template <typename Format, typename Wide>
RT_ALWAYS_INLINE void NarrowElements(const Wide* in, uint16_t* out, size_t count) {
  constexpr size_t kRoom = kBlockBytes / sizeof(float);
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
  constexpr size_t kRoom = kBlockBytes / sizeof(float);
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

// ---- Adasum ----

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

// ---- one set of functions per processor level ----

using ReduceFunction = void (*)(DType, Fold, void*, const void* const*, int, size_t, const Scaling&);
using ConvertFunction = void (*)(DType, DType, void*, const void*, size_t, double);
using DotsFunction = Dots (*)(DType, const void*, const void*, size_t);
using CombineFunction = void (*)(DType, void*, const void*, const void*, size_t, double, double);

void ReduceBaseline(DType dtype, Fold fold, void* dst, const void* const* sources, int source_count, size_t count,
                    const Scaling& scaling) {
  ReduceAny<Float16>(dtype, fold, dst, sources, source_count, count, scaling);
}
void ConvertBaseline(DType from, DType to, void* dst, const void* source, size_t count, double factor) {
  ConvertAny<Float16>(from, to, dst, source, count, factor);
}
Dots DotsBaseline(DType dtype, const void* a, const void* b, size_t count) { return DotsAny(dtype, a, b, count); }
void CombineBaseline(DType dtype, void* dst, const void* a, const void* b, size_t count, double factor_a,
                     double factor_b) {
  CombineAny(dtype, dst, a, b, count, factor_a, factor_b);
}
bool Always() { return true; }

struct Variant {
  const char* name;
  bool (*available)();
  ReduceFunction reduce;
  ConvertFunction convert;
  DotsFunction dots;
  CombineFunction combine;
};

#if defined(__x86_64__)
__attribute__((target("avx2,f16c"))) void ReduceAvx2(DType dtype, Fold fold, void* dst, const void* const* sources,
                                                     int source_count, size_t count, const Scaling& scaling) {
  ReduceAny<Float16ByF16c>(dtype, fold, dst, sources, source_count, count, scaling);
}
__attribute__((target("avx2,f16c"))) void ConvertAvx2(DType from, DType to, void* dst, const void* source, size_t count,
                                                      double factor) {
  ConvertAny<Float16ByF16c>(from, to, dst, source, count, factor);
}
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c"))) void ReduceAvx512(DType dtype, Fold fold, void* dst,
                                                                                     const void* const* sources,
                                                                                     int source_count, size_t count,
                                                                                     const Scaling& scaling) {
  ReduceAny<Float16ByF16c>(dtype, fold, dst, sources, source_count, count, scaling);
}
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c"))) void ConvertAvx512(DType from, DType to, void* dst,
                                                                                      const void* source, size_t count,
                                                                                      double factor) {
  ConvertAny<Float16ByF16c>(from, to, dst, source, count, factor);
}

__attribute__((target("avx2"))) Dots DotsAvx2(DType dtype, const void* a, const void* b, size_t count) {
  return DotsAny(dtype, a, b, count);
}
__attribute__((target("avx2"))) void CombineAvx2(DType dtype, void* dst, const void* a, const void* b, size_t count,
                                                 double factor_a, double factor_b) {
  CombineAny(dtype, dst, a, b, count, factor_a, factor_b);
}
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))) Dots DotsAvx512(DType dtype, const void* a, const void* b,
                                                                              size_t count) {
  return DotsAny(dtype, a, b, count);
}
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))) void CombineAvx512(DType dtype, void* dst, const void* a,
                                                                                 const void* b, size_t count,
                                                                                 double factor_a, double factor_b) {
  CombineAny(dtype, dst, a, b, count, factor_a, factor_b);
}

// __builtin_cpu_supports has no name for F16C in the older compilers that we support.
bool HasF16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
}
bool HasAvx2() { return __builtin_cpu_supports("avx2") && HasF16c(); }
bool HasAvx512() {
  return HasAvx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

constexpr Variant kVariants[] = {{"avx512", HasAvx512, ReduceAvx512, ConvertAvx512, DotsAvx512, CombineAvx512},
                                 {"avx2", HasAvx2, ReduceAvx2, ConvertAvx2, DotsAvx2, CombineAvx2},
                                 {"baseline", Always, ReduceBaseline, ConvertBaseline, DotsBaseline, CombineBaseline}};
#else
constexpr Variant kVariants[] = {{"baseline", Always, ReduceBaseline, ConvertBaseline, DotsBaseline, CombineBaseline}};
#endif

// The best variant of that name, any name if it is empty; nullptr if this processor has none.
const Variant* FindVariant(const char* name) {
  for (const Variant& variant : kVariants)
    if ((*name == '\0' || std::strcmp(variant.name, name) == 0) && variant.available()) return &variant;
  return nullptr;
}

std::atomic<const Variant*>& ChosenVariant() {
  static std::atomic<const Variant*> chosen{FindVariant("")};
  return chosen;
}

// ---- neutral elements ----

template <typename T>
void Fill(void* dst, size_t count, T value) {
  auto* out = static_cast<T*>(dst);
  for (size_t i = 0; i < count; ++i) out[i] = value;
}

// zero, one, highest, lowest, all bits, by the fold; a map leaves zero and one as they are.
template <typename T>
T Neutral(Fold fold, T one, T highest, T lowest, T bits = 0) {
  switch (fold) {
    case Fold::kAdd:
    case Fold::kProject:
    case Fold::kOr:
    case Fold::kXor:
      return 0;
    case Fold::kAnd:
      return bits;
    case Fold::kMultiply:
      return one;
    case Fold::kLeast:
      return highest;
    case Fold::kGreatest:
      return lowest;
  }
  return 0;
}

template <typename T>
void FillNumber(Fold fold, void* dst, size_t count) {
  using Limits = std::numeric_limits<T>;
  if constexpr (Limits::has_infinity)
    Fill<T>(dst, count, Neutral<T>(fold, 1, Limits::infinity(), -Limits::infinity()));
  else
    Fill<T>(dst, count, Neutral<T>(fold, 1, Limits::max(), Limits::min(), static_cast<T>(-1)));
}

}  // namespace

void Reduce(DType dtype, Reduction reduction, void* dst, const void* const* sources, int source_count, size_t count,
            const Scaling& scaling) {
  const DefaultFloatMode mode;
  ChosenVariant()
      .load(std::memory_order_relaxed)
      ->reduce(dtype, Find(reduction)->fold, dst, sources, source_count, count, scaling);
}

void Convert(DType from, DType to, void* dst, const void* source, size_t count, double factor) {
  const DefaultFloatMode mode;
  ChosenVariant().load(std::memory_order_relaxed)->convert(from, to, dst, source, count, factor);
}

Dots AdasumDots(DType dtype, const void* a, const void* b, size_t count) {
  const DefaultFloatMode mode;
  return ChosenVariant().load(std::memory_order_relaxed)->dots(dtype, a, b, count);
}

void AdasumCombine(DType dtype, void* dst, const void* a, const void* b, size_t count, double factor_a,
                   double factor_b) {
  const DefaultFloatMode mode;
  ChosenVariant().load(std::memory_order_relaxed)->combine(dtype, dst, a, b, count, factor_a, factor_b);
}

void FillNeutral(DType dtype, Reduction reduction, void* dst, size_t count) {
  const Fold fold = Find(reduction)->fold;
  switch (dtype) {
    case DType::kUInt8:
      return FillNumber<uint8_t>(fold, dst, count);
    case DType::kInt8:
      return FillNumber<int8_t>(fold, dst, count);
    case DType::kInt16:
      return FillNumber<int16_t>(fold, dst, count);
    case DType::kInt32:
      return FillNumber<int32_t>(fold, dst, count);
    case DType::kInt64:
      return FillNumber<int64_t>(fold, dst, count);
    case DType::kFloat16:
      return Fill<uint16_t>(dst, count, Neutral<uint16_t>(fold, 0x3c00, 0x7c00, 0xfc00));
    case DType::kBFloat16:
      return Fill<uint16_t>(dst, count, Neutral<uint16_t>(fold, 0x3f80, 0x7f80, 0xff80));
    case DType::kFloat32:
      return FillNumber<float>(fold, dst, count);
    case DType::kFloat64:
      return FillNumber<double>(fold, dst, count);
    case DType::kBool:
      return Fill<uint8_t>(dst, count, Neutral<uint8_t>(fold, 1, 1, 0, 1));
    case DType::kUInt16:
      return FillNumber<uint16_t>(fold, dst, count);
    case DType::kUInt32:
      return FillNumber<uint32_t>(fold, dst, count);
    case DType::kUInt64:
      return FillNumber<uint64_t>(fold, dst, count);
    case DType::kComplex64:
      return FillNumber<float>(fold, dst, 2 * count);
    case DType::kComplex128:
      return FillNumber<double>(fold, dst, 2 * count);
    case DType::kFloat8E4M3FN:
    case DType::kFloat8E4M3FNUZ:
    case DType::kFloat8E5M2:
    case DType::kFloat8E5M2FNUZ:
    case DType::kFloat8E8M0FNU:
      return;
  }
}

const char* KernelVariant() { return ChosenVariant().load(std::memory_order_relaxed)->name; }

bool SelectKernelVariant(const char* name) {
  const Variant* variant = FindVariant(name);
  if (variant == nullptr) return false;
  ChosenVariant().store(variant, std::memory_order_relaxed);
  return true;
}

}  // namespace ringtrain
