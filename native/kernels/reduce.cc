// The reduction kernels: loops over elements, for each level of vector instructions (level.h).
//
// Called by the collectives on every chunk, from whichever thread drives the context. Only float16 needs intrinsics.
#include "kernels/reduce.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "kernels/float_mode.h"
#include "kernels/formats.h"
#include "kernels/level.h"

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
RT_ALWAYS_INLINE void FinishValues(T* values, size_t n, const Scaling& scaling) {
  int exponent;
  const bool power_of_two = std::frexp(scaling.divisor, &exponent) == 0.5;
  if (scaling.divisor != 1.0) {
    if (std::is_floating_point_v<T> && power_of_two)
      Multiply(values, values, n, 1.0 / scaling.divisor);
    else
      Divide(values, values, n, scaling.divisor);
  }
  if (scaling.finish == Finish::kRoot) Root(values, n);
  if (scaling.postscale != 1.0) Multiply(values, values, n, scaling.postscale);
}

// ---- one dtype ----

constexpr size_t kBlockBytes = 4096;  // accumulator and operand of a block stay in the first-level cache

// One source's values from `begin` on, mapped: where they lie if they can be used as they are, else in `room`.
template <typename Format>
RT_ALWAYS_INLINE const typename Format::Value* Load(const void* source, size_t begin, size_t n, double factor, Map map,
                                                    typename Format::Value* room) {
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
  if (map == Map::kItself) return values;
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
    const Value* left = Load<Format>(sources[0], begin, n, scaling.factor(0), scaling.map, total);
    for (int j = 1; j < source_count; ++j) {
      const Value* right = Load<Format>(sources[j], begin, n, scaling.factor(j), scaling.map, operand);
      Value* out = j + 1 < source_count ? total : result;
      Combine(fold, out, left, right, n);
      left = out;
    }
    if (left != result) std::memmove(result, left, n * sizeof(Value));
    FinishValues(result, n, scaling);
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

// ---- one function per processor level ----

using ReduceFunction = void (*)(DType, Fold, void*, const void* const*, int, size_t, const Scaling&);

void ReduceBaseline(DType dtype, Fold fold, void* dst, const void* const* sources, int source_count, size_t count,
                    const Scaling& scaling) {
  ReduceAny<Float16>(dtype, fold, dst, sources, source_count, count, scaling);
}
#if defined(__x86_64__)
__attribute__((target("avx2,f16c"))) void ReduceAvx2(DType dtype, Fold fold, void* dst, const void* const* sources,
                                                     int source_count, size_t count, const Scaling& scaling) {
  ReduceAny<Float16ByF16c>(dtype, fold, dst, sources, source_count, count, scaling);
}
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c"))) void ReduceAvx512(DType dtype, Fold fold, void* dst,
                                                                                     const void* const* sources,
                                                                                     int source_count, size_t count,
                                                                                     const Scaling& scaling) {
  ReduceAny<Float16ByF16c>(dtype, fold, dst, sources, source_count, count, scaling);
}
constexpr ByLevel<ReduceFunction> kReduce = {ReduceBaseline, ReduceAvx2, ReduceAvx512};
#else
constexpr ByLevel<ReduceFunction> kReduce = {ReduceBaseline};
#endif

}  // namespace

void Reduce(DType dtype, Reduction reduction, void* dst, const void* const* sources, int source_count, size_t count,
            const Scaling& scaling) {
  const DefaultFloatMode mode;
  kReduce.chosen()(dtype, Find(reduction)->fold, dst, sources, source_count, count, scaling);
}

}  // namespace ringtrain
