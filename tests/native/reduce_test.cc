// The reduction kernels against loops that follow the contract in kernels/reduce.h word by word, one element at a time.
//
// The oracle has its own conversions of the 16-bit floats, by arithmetic on doubles instead of on bits, and every
// variant that this processor has must give the oracle's bits.
#include "kernels/reduce.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "kernels/adasum.h"
#include "kernels/convert.h"
#include "kernels/float16.h"
#include "kernels/level.h"
#include "kernels/neutral.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

using namespace ringtrain;

namespace {

constexpr DType kDTypes[] = {DType::kUInt8,   DType::kInt8,     DType::kInt16,   DType::kInt32,   DType::kInt64,
                             DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64, DType::kBool,
                             DType::kUInt16,  DType::kUInt32,   DType::kUInt64};
constexpr Reduction kReductions[] = {Reduction::kAverage, Reduction::kSum, Reduction::kMin, Reduction::kMax,
                                     Reduction::kProduct};

std::vector<const char*> AvailableVariants() {
  std::vector<const char*> names;
  for (const char* name : {"baseline", "avx2", "avx512"})
    if (SelectKernelVariant(name)) names.push_back(name);
  SelectKernelVariant("");
  return names;
}

// ---- the oracle ----

// A binary float of `mantissa_bits` stored bits and exponents from 1 - bias on, as a number and back.
struct SmallFloat {
  int mantissa_bits, exponent_bits;
  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  uint16_t infinity() const { return static_cast<uint16_t>(((1 << exponent_bits) - 1) << mantissa_bits); }

  double Decode(uint16_t bits) const {
    const double sign = (bits & 0x8000) ? -1.0 : 1.0;
    const int magnitude = bits & 0x7fff;
    if (magnitude > infinity()) return std::nan("");
    if (magnitude == infinity()) return sign * std::numeric_limits<double>::infinity();
    const int exponent = magnitude >> mantissa_bits;
    const int mantissa = magnitude & ((1 << mantissa_bits) - 1);
    if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias() - mantissa_bits);
    return sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias() - mantissa_bits);
  }

  uint16_t Encode(double value) const {
    if (std::isnan(value)) return static_cast<uint16_t>(infinity() | (1 << (mantissa_bits - 1)));
    const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    const double magnitude = std::fabs(value);
    if (std::isinf(magnitude)) return sign | infinity();
    int exponent = magnitude == 0 ? 1 - bias() : std::max(std::ilogb(magnitude), 1 - bias());
    const double units = std::nearbyint(std::ldexp(magnitude, mantissa_bits - exponent));  // ties to even
    const int biased = exponent + bias() - 1;
    const double bits = units + std::ldexp(biased, mantissa_bits);  // a carry moves into the exponent
    return static_cast<uint16_t>(sign | static_cast<uint16_t>(std::min<double>(bits, infinity())));
  }
};
constexpr SmallFloat kHalf = {10, 5};
constexpr SmallFloat kBrain = {7, 8};

template <typename T>
T ScaledInteger(T value, double factor) {
  if (factor == 1.0) return value;
  const double product = std::trunc(static_cast<double>(value) * factor);
  if constexpr (std::is_same_v<T, uint64_t>) {
    if (product >= std::ldexp(1.0, 64)) return std::numeric_limits<uint64_t>::max();
    if (product >= std::ldexp(1.0, 63)) return static_cast<uint64_t>(product);
  }
  if (product >= std::ldexp(1.0, 63)) return static_cast<T>(std::numeric_limits<int64_t>::max());
  if (product < -std::ldexp(1.0, 63)) return static_cast<T>(std::numeric_limits<int64_t>::min());
  return static_cast<T>(static_cast<int64_t>(product));
}

template <typename T>
T Combined(Reduction reduction, T a, T b) {
  if (a != a) return reduction == Reduction::kMin || reduction == Reduction::kMax ? a : a + b;
  if (b != b) return reduction == Reduction::kMin || reduction == Reduction::kMax ? b : a + b;
  switch (reduction) {
    case Reduction::kMin:
      return a < b ? a : b;
    case Reduction::kMax:
      return a > b ? a : b;
    case Reduction::kProduct:
      if constexpr (std::is_integral_v<T>)
        return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
      else
        return a * b;
    default:
      if constexpr (std::is_integral_v<T>)
        return static_cast<T>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
      else
        return a + b;
  }
}

template <typename T>
T ReducedElement(Reduction reduction, const std::vector<T>& values, const Scaling& scaling) {
  constexpr bool kInteger = std::is_integral_v<T>;
  T total = 0;
  for (size_t j = 0; j < values.size(); ++j) {
    T value = values[j];
    if constexpr (kInteger)
      value = ScaledInteger(value, scaling.prescale);
    else if (scaling.factor(static_cast<int>(j)) != 1.0)
      value = value * static_cast<T>(scaling.factor(static_cast<int>(j)));
    if constexpr (!kInteger)
      if (scaling.map == Map::kSquare) value = value * value;
    total = j == 0 ? value : Combined(reduction, total, value);
  }
  if constexpr (kInteger) {
    using Wide = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
    return ScaledInteger(static_cast<T>(static_cast<Wide>(total) / static_cast<Wide>(scaling.divisor)),
                         scaling.postscale);
  } else {
    if (scaling.divisor != 1) total = total / static_cast<T>(scaling.divisor);
    if (scaling.finish == Finish::kRoot) total = std::sqrt(total);
    if (scaling.postscale != 1.0) total = total * static_cast<T>(scaling.postscale);
    return total;
  }
}

// Element i of the result, from the sources' bytes to the result's bytes.
template <typename T>
void ReduceOne(Reduction reduction, void* dst, const std::vector<const void*>& sources, size_t i,
               const Scaling& scaling) {
  std::vector<T> values;
  for (const void* source : sources) values.push_back(static_cast<const T*>(source)[i]);
  static_cast<T*>(dst)[i] = ReducedElement(reduction, values, scaling);
}

void ReduceOneSmall(const SmallFloat& format, Reduction reduction, void* dst, const std::vector<const void*>& sources,
                    size_t i, const Scaling& scaling) {
  std::vector<float> values;
  for (const void* source : sources)
    values.push_back(static_cast<float>(format.Decode(static_cast<const uint16_t*>(source)[i])));
  static_cast<uint16_t*>(dst)[i] = format.Encode(ReducedElement(reduction, values, scaling));
}

void ReduceOneBool(Reduction reduction, void* dst, const std::vector<const void*>& sources, size_t i) {
  int set = 0;
  for (const void* source : sources) set += static_cast<const uint8_t*>(source)[i] != 0;
  const bool all = reduction == Reduction::kMin || reduction == Reduction::kProduct;
  static_cast<uint8_t*>(dst)[i] = all ? set == static_cast<int>(sources.size()) : set > 0;
}

void OracleReduce(DType dtype, Reduction reduction, void* dst, const std::vector<const void*>& sources, size_t count,
                  const Scaling& scaling) {
  for (size_t i = 0; i < count; ++i) switch (dtype) {
      case DType::kUInt8:
        ReduceOne<uint8_t>(reduction, dst, sources, i, scaling);
        break;
      case DType::kInt8:
        ReduceOne<int8_t>(reduction, dst, sources, i, scaling);
        break;
      case DType::kInt16:
        ReduceOne<int16_t>(reduction, dst, sources, i, scaling);
        break;
      case DType::kInt32:
        ReduceOne<int32_t>(reduction, dst, sources, i, scaling);
        break;
      case DType::kInt64:
        ReduceOne<int64_t>(reduction, dst, sources, i, scaling);
        break;
      case DType::kFloat16:
        ReduceOneSmall(kHalf, reduction, dst, sources, i, scaling);
        break;
      case DType::kBFloat16:
        ReduceOneSmall(kBrain, reduction, dst, sources, i, scaling);
        break;
      case DType::kFloat32:
        ReduceOne<float>(reduction, dst, sources, i, scaling);
        break;
      case DType::kFloat64:
        ReduceOne<double>(reduction, dst, sources, i, scaling);
        break;
      case DType::kBool:
        ReduceOneBool(reduction, dst, sources, i);
        break;
      case DType::kUInt16:
        ReduceOne<uint16_t>(reduction, dst, sources, i, scaling);
        break;
      case DType::kUInt32:
        ReduceOne<uint32_t>(reduction, dst, sources, i, scaling);
        break;
      case DType::kUInt64:
        ReduceOne<uint64_t>(reduction, dst, sources, i, scaling);
        break;
      case DType::kComplex64:  // two floats, see reduce_adds_the_parts_of_complex_numbers
      case DType::kComplex128:
      case DType::kFloat8E4M3FN:  // not reduced
      case DType::kFloat8E4M3FNUZ:
      case DType::kFloat8E5M2:
      case DType::kFloat8E5M2FNUZ:
      case DType::kFloat8E8M0FNU:
        break;
    }
}

// ---- data ----

// `count` elements behind one element of padding, so that nothing is aligned beyond the element, and a guard after the
// end.
class Tensor {
 public:
  Tensor(DType dtype, size_t count) : dtype_(dtype), count_(count), bytes_((count + 2) * Bytes(dtype), kGuard) {}
  void* data() { return bytes_.data() + Bytes(dtype_); }
  const void* data() const { return bytes_.data() + Bytes(dtype_); }
  size_t count() const { return count_; }

  void FillRandom(std::mt19937_64& random) {
    auto* out = bytes_.data() + Bytes(dtype_);
    for (size_t i = 0; i < count_; ++i) {
      const double normal = std::normal_distribution<double>(0.0, 4.0)(random);
      switch (dtype_) {
        case DType::kFloat32:
          Put(out, i, static_cast<float>(normal));
          break;
        case DType::kFloat64:
          Put(out, i, normal);
          break;
        case DType::kFloat16:
          Put(out, i, kHalf.Encode(normal));
          break;
        case DType::kBFloat16:
          Put(out, i, kBrain.Encode(normal));
          break;
        case DType::kBool:
          Put(out, i, static_cast<uint8_t>(random() % 3));
          break;
        case DType::kInt64:
          Put(out, i, static_cast<int64_t>(random()) >> (random() % 64));
          break;
        case DType::kUInt64:
          Put(out, i, static_cast<uint64_t>(random()) >> (random() % 64));
          break;
        default:
          std::memset(out + i * Bytes(dtype_), static_cast<int>(random() & 0xff), Bytes(dtype_));
      }
    }
  }
  bool GuardsIntact() const {
    const size_t size = Bytes(dtype_);
    for (size_t i = 0; i < size; ++i)
      if (bytes_[i] != kGuard || bytes_[bytes_.size() - 1 - i] != kGuard) return false;
    return true;
  }
  bool IsNan(size_t i) const {
    switch (dtype_) {
      case DType::kFloat32:
        return std::isnan(Get<float>(i));
      case DType::kFloat64:
        return std::isnan(Get<double>(i));
      case DType::kFloat16:
        return std::isnan(kHalf.Decode(Get<uint16_t>(i)));
      case DType::kBFloat16:
        return std::isnan(kBrain.Decode(Get<uint16_t>(i)));
      default:
        return false;
    }
  }
  // The first element whose bits differ, NaNs being equal; count() if there is none.
  size_t FirstDifference(const Tensor& other) const {
    const size_t size = Bytes(dtype_);
    for (size_t i = 0; i < count_; ++i) {
      const bool same = std::memcmp(bytes_.data() + (i + 1) * size, other.bytes_.data() + (i + 1) * size, size) == 0;
      if (!same && !(IsNan(i) && other.IsNan(i))) return i;
    }
    return count_;
  }
  template <typename T>
  T Get(size_t i) const {
    T value;
    std::memcpy(&value, bytes_.data() + (i + 1) * sizeof(T), sizeof(T));
    return value;
  }

 private:
  static constexpr uint8_t kGuard = 0xa5;
  template <typename T>
  static void Put(uint8_t* out, size_t i, T value) {
    std::memcpy(out + i * sizeof(T), &value, sizeof(T));
  }
  DType dtype_;
  size_t count_;
  std::vector<uint8_t> bytes_;
};

std::string Case(const char* variant, DType dtype, Reduction reduction, size_t sources, size_t count,
                 const Scaling& scaling) {
  std::ostringstream text;
  text << variant << " " << Text(dtype) << " " << Text(reduction) << " of " << sources << " sources, count " << count
       << ", prescale " << scaling.prescale << ", divisor " << scaling.divisor << ", postscale " << scaling.postscale;
  return text.str();
}

void CheckSame(const std::string& what, const Tensor& found, const Tensor& expected) {
  const size_t at = found.FirstDifference(expected);
  if (at != found.count()) check::Report(__FILE__, __LINE__, what + ": element " + std::to_string(at) + " differs");
  if (!found.GuardsIntact()) check::Report(__FILE__, __LINE__, what + ": wrote outside");
}

// All variants, into fresh memory and into the place of each source.
void CheckAgainstOracle(DType dtype, Reduction reduction, const std::vector<Tensor>& tensors, const Scaling& scaling) {
  static const std::vector<const char*> variants = AvailableVariants();
  const size_t count = tensors[0].count();
  std::vector<const void*> sources;
  for (const Tensor& tensor : tensors) sources.push_back(tensor.data());
  const int source_count = static_cast<int>(sources.size());
  Tensor expected(dtype, count);
  OracleReduce(dtype, reduction, expected.data(), sources, count, scaling);
  for (const char* variant : variants) {
    const std::string what = Case(variant, dtype, reduction, sources.size(), count, scaling);
    RT_REQUIRE(SelectKernelVariant(variant));
    Tensor found(dtype, count);
    Reduce(dtype, reduction, found.data(), sources.data(), source_count, count, scaling);
    CheckSame(what, found, expected);
    for (int place : {0, source_count - 1}) {
      Tensor in_place = tensors[place];
      std::vector<const void*> moved = sources;
      moved[place] = in_place.data();
      Reduce(dtype, reduction, in_place.data(), moved.data(), source_count, count, scaling);
      CheckSame(what + ", in place of source " + std::to_string(place), in_place, expected);
    }
  }
  SelectKernelVariant("");
}

// One value per dtype, as a float of that dtype.
void PutValue(Tensor* tensor, DType dtype, size_t i, double value) {
  auto* bytes = static_cast<uint8_t*>(tensor->data()) + i * Bytes(dtype);
  const auto put = [bytes](auto typed) { std::memcpy(bytes, &typed, sizeof typed); };
  if (dtype == DType::kFloat16) put(kHalf.Encode(value));
  if (dtype == DType::kBFloat16) put(kBrain.Encode(value));
  if (dtype == DType::kFloat32) put(static_cast<float>(value));
  if (dtype == DType::kFloat64) put(value);
}

}  // namespace

RT_TEST(reduce_adds_the_parts_of_complex_numbers) {
  std::mt19937_64 random(7);
  const Scaling scaling = {0.5, 3.0, 3};
  for (const auto& [whole, part] :
       {std::pair{DType::kComplex64, DType::kFloat32}, {DType::kComplex128, DType::kFloat64}})
    for (Reduction reduction : {Reduction::kSum, Reduction::kAverage}) {
      constexpr size_t kCount = 1001;
      Tensor a(part, 2 * kCount), b(part, 2 * kCount), found(part, 2 * kCount), expected(part, 2 * kCount);
      a.FillRandom(random), b.FillRandom(random);
      const void* sources[] = {a.data(), b.data()};
      Reduce(whole, reduction, found.data(), sources, 2, kCount, scaling);
      Reduce(part, reduction, expected.data(), sources, 2, 2 * kCount, scaling);
      CheckSame(Text(whole), found, expected);
      FillNeutral(whole, reduction, found.data(), kCount);
      FillNeutral(part, reduction, expected.data(), 2 * kCount);
      CheckSame(std::string("neutral ") + Text(whole), found, expected);
    }
}

RT_TEST(reduce_gives_the_oracles_bits) {
  const double weights[] = {1.0, 0.3, 0.0, 2.0, 1.0, 0.7, 1.0};
  const Scaling scalings[] = {{},
                              {1.0, 1.0, 2},
                              {1.0, 1.0, 7},
                              {0.5, 3.0, 1},
                              {1.25, 0.1, 3},
                              {0.5, 1.0, 2.5, weights},
                              {1.0, 1.0, 1, nullptr, Map::kSquare},
                              {1.0, 1.0, 1, nullptr, Map::kItself, Finish::kRoot},
                              {0.5, 3.0, 1, nullptr, Map::kSquare, Finish::kRoot}};
  std::mt19937_64 random(20240229);
  for (DType dtype : kDTypes)
    for (size_t source_count : {1, 2, 3, 7})
      for (size_t count : {0, 1, 7, 63, 64, 65, 1000, 4099}) {
        std::vector<Tensor> tensors(source_count, Tensor(dtype, count));
        for (Tensor& tensor : tensors) tensor.FillRandom(random);
        for (Reduction reduction : kReductions)
          for (const Scaling& scaling : scalings)
            if ((scaling.weights == nullptr && scaling.map == Map::kItself && scaling.only_divides()) ||
                Find(dtype)->arithmetic == Arithmetic::kFloat)
              CheckAgainstOracle(dtype, reduction, tensors, scaling);
      }
}

// Between float32 or float64 and 16 bits: every 16-bit value comes back, and random wide ones are rounded as one by
// one.
RT_TEST(conversion_rounds_once_in_every_variant) {
  constexpr size_t kCount = 65536 + 37;
  std::vector<uint16_t> all(kCount), narrow(kCount);
  std::vector<float> wide(kCount);
  std::vector<double> wider(kCount);
  std::mt19937 random(7);
  for (const char* variant : AvailableVariants())
    for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      RT_REQUIRE(SelectKernelVariant(variant));
      const auto one = dtype == DType::kFloat16 ? Float32ToFloat16 : Float32ToBFloat16;
      const uint16_t infinity = dtype == DType::kFloat16 ? 0x7c00 : 0x7f80;
      for (size_t i = 0; i < kCount; ++i) {
        all[i] = static_cast<uint16_t>(i);
        if ((all[i] & 0x7fff) > infinity)
          all[i] = infinity | 0x40 << (dtype == DType::kFloat16 ? 3 : 0);  // a quiet NaN
      }
      Convert(dtype, DType::kFloat32, wide.data(), all.data(), kCount);
      Convert(DType::kFloat32, dtype, narrow.data(), wide.data(), kCount);
      RT_CHECK(narrow == all);
      Convert(dtype, DType::kFloat64, wider.data(), all.data(), kCount);
      Convert(DType::kFloat64, dtype, narrow.data(), wider.data(), kCount);
      RT_CHECK(narrow == all);
      Convert(dtype, DType::kFloat32, wide.data(), all.data(), 1000, 0.25);
      for (size_t i = 0; i < 1000; ++i) RT_CHECK_EQ(wide[i], static_cast<float>(wider[i]) * 0.25f);

      for (float& value : wide) value = FloatFromBits(static_cast<uint32_t>(random()));
      for (float& value : wide) value = value != value ? 1e30f : value;
      Convert(DType::kFloat32, dtype, narrow.data(), wide.data(), kCount);
      for (size_t i = 0; i < kCount; ++i)
        if (narrow[i] != one(wide[i])) RT_CHECK_EQ(narrow[i], one(wide[i]));
    }
  SelectKernelVariant("");
}

RT_TEST(every_float16_and_bfloat16_survives_a_reduction_of_one) {
  std::vector<uint16_t> all(65536), found(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  const void* source = all.data();
  for (const char* variant : AvailableVariants())
    for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      RT_REQUIRE(SelectKernelVariant(variant));
      Reduce(dtype, Reduction::kSum, found.data(), &source, 1, all.size(), Scaling());
      const SmallFloat& format = dtype == DType::kFloat16 ? kHalf : kBrain;
      for (size_t i = 0; i < all.size(); ++i) {
        const uint16_t quiet = static_cast<uint16_t>(1 << (format.mantissa_bits - 1));
        const bool nan = (all[i] & 0x7fff) > format.infinity();
        const bool same = nan ? found[i] == all[i] || found[i] == (all[i] | quiet) : found[i] == all[i];
        if (!same)
          check::Report(__FILE__, __LINE__,
                        std::string(variant) + " " + Text(dtype) + " " + check::Show(all[i]) + " became " +
                            check::Show(found[i]));
      }
    }
  SelectKernelVariant("");
}

RT_TEST(bit_conversions_are_those_of_the_number_line) {
  for (uint32_t i = 0; i < 65536; ++i) {
    const auto bits = static_cast<uint16_t>(i);
    const double half = kHalf.Decode(bits), brain = kBrain.Decode(bits);
    if (!std::isnan(half))
      RT_CHECK_EQ(static_cast<double>(Float16ToFloat32(bits)), half);
    else
      RT_CHECK(std::isnan(Float16ToFloat32(bits)));
    if (!std::isnan(brain))
      RT_CHECK_EQ(static_cast<double>(BFloat16ToFloat32(bits)), brain);
    else
      RT_CHECK(std::isnan(BFloat16ToFloat32(bits)));
  }
  std::mt19937 random(7);
  for (int i = 0; i < 2000000; ++i) {
    const float value = FloatFromBits(static_cast<uint32_t>(random()));
    if (std::isnan(value)) continue;
    RT_CHECK_EQ(Float32ToFloat16(value), kHalf.Encode(value));
    RT_CHECK_EQ(Float32ToBFloat16(value), kBrain.Encode(value));
  }
}

RT_TEST(ties_are_rounded_to_even_once) {
  // 1 + 2^-11 lies midway between two float16, 1 + 2^-8 between two bfloat16; a third source decides, if it is added in
  // float32.
  const struct {
    DType dtype;
    std::vector<double> values;
    double expected;
  } cases[] = {
      {DType::kFloat16, {1.0, std::ldexp(1, -11)}, 1.0},
      {DType::kFloat16, {1.0 + std::ldexp(1, -10), std::ldexp(1, -11)}, 1.0 + std::ldexp(1, -9)},
      {DType::kFloat16, {1.0, std::ldexp(1, -11), std::ldexp(1, -20)}, 1.0 + std::ldexp(1, -10)},
      {DType::kFloat16, {65504.0, 15.0}, 65504.0},
      {DType::kFloat16, {65504.0, 16.0}, std::numeric_limits<double>::infinity()},
      {DType::kFloat16, {65504.0, 16.0, -32.0}, 65472.0},
      {DType::kBFloat16, {1.0, std::ldexp(1, -8)}, 1.0},
      {DType::kBFloat16, {1.0 + std::ldexp(1, -7), std::ldexp(1, -8)}, 1.0 + std::ldexp(1, -6)},
      {DType::kBFloat16, {1.0, std::ldexp(1, -8), std::ldexp(1, -20)}, 1.0 + std::ldexp(1, -7)},
  };
  for (const auto& c : cases) {
    constexpr size_t kCount = 19;  // beyond one vector and its rest
    std::vector<Tensor> tensors(c.values.size(), Tensor(c.dtype, kCount));
    for (size_t j = 0; j < c.values.size(); ++j)
      for (size_t i = 0; i < kCount; ++i) PutValue(&tensors[j], c.dtype, i, c.values[j]);
    CheckAgainstOracle(c.dtype, Reduction::kSum, tensors, Scaling());
    const SmallFloat& format = c.dtype == DType::kFloat16 ? kHalf : kBrain;
    std::vector<const void*> sources;
    for (Tensor& tensor : tensors) sources.push_back(tensor.data());
    Tensor found(c.dtype, kCount);
    Reduce(c.dtype, Reduction::kSum, found.data(), sources.data(), static_cast<int>(sources.size()), kCount, Scaling());
    RT_CHECK_EQ(format.Decode(found.Get<uint16_t>(0)), format.Decode(format.Encode(c.expected)));
  }
}

RT_TEST(nan_is_propagated_from_every_place) {
  constexpr size_t kCount = 70;
  for (DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64})
    for (Reduction reduction : kReductions)
      for (size_t source_count : {1, 2, 3, 5})
        for (size_t place = 0; place < source_count; ++place) {
          std::vector<Tensor> tensors(source_count, Tensor(dtype, kCount));
          for (size_t j = 0; j < source_count; ++j)
            for (size_t i = 0; i < kCount; ++i)
              PutValue(&tensors[j], dtype, i,
                       j == place && i % 3 != 0 ? std::nan("") : 1.0 + static_cast<double>(i + j));
          CheckAgainstOracle(dtype, reduction, tensors, Scaling());
          std::vector<const void*> sources;
          for (Tensor& tensor : tensors) sources.push_back(tensor.data());
          Tensor found(dtype, kCount);
          Reduce(dtype, reduction, found.data(), sources.data(), static_cast<int>(source_count), kCount, Scaling());
          for (size_t i = 0; i < kCount; ++i) RT_CHECK_EQ(found.IsNan(i), i % 3 != 0);
        }
}

RT_TEST(infinities_and_subnormals_are_added_as_they_are) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const double specials[] = {0.0,    -0.0,    1e-7,     -6e-8, 1e-40,     -1e-45,
                             1e-310, 65504.0, -65504.0, 3e38,  kInfinity, -kInfinity};
  constexpr size_t kSpecials = sizeof specials / sizeof *specials;
  for (DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    std::vector<Tensor> tensors(2, Tensor(dtype, kSpecials * kSpecials));
    for (size_t i = 0; i < kSpecials * kSpecials; ++i) {
      PutValue(&tensors[0], dtype, i, specials[i / kSpecials]);
      PutValue(&tensors[1], dtype, i, specials[i % kSpecials]);
    }
    for (Reduction reduction : kReductions)
      for (const Scaling& scaling : {Scaling{}, Scaling{1.0, 1.0, 2}})
        CheckAgainstOracle(dtype, reduction, tensors, scaling);
  }
}

RT_TEST(integer_average_truncates_towards_zero) {
  const int64_t sums[] = {
      -7, -1, 0, 1, 7, std::numeric_limits<int64_t>::min() + 1, std::numeric_limits<int64_t>::max()};
  for (int64_t divisor : {2, 3, 7}) {
    const Scaling scaling = {1.0, 1.0, static_cast<double>(divisor)};
    for (int64_t sum : sums) {
      const void* source = &sum;
      int64_t found = 0;
      Reduce(DType::kInt64, Reduction::kAverage, &found, &source, 1, 1, scaling);
      RT_CHECK_EQ(found, sum / divisor);
      const auto narrow = static_cast<int32_t>(sum);
      source = &narrow;
      int32_t found_narrow = 0;
      Reduce(DType::kInt32, Reduction::kAverage, &found_narrow, &source, 1, 1, scaling);
      RT_CHECK_EQ(found_narrow, narrow / static_cast<int32_t>(divisor));
    }
  }
}

RT_TEST(neutral_element_changes_nothing) {
  std::mt19937_64 random(3);
  constexpr size_t kCount = 130;
  for (DType dtype : kDTypes)
    for (Reduction reduction : kReductions) {
      Tensor value(dtype, kCount), neutral(dtype, kCount), alone(dtype, kCount), found(dtype, kCount);
      value.FillRandom(random);
      FillNeutral(dtype, reduction, neutral.data(), kCount);
      const void* sources[] = {value.data(), neutral.data()};
      Reduce(dtype, reduction, alone.data(), sources, 1, kCount, Scaling());  // makes a bool 0 or 1
      Reduce(dtype, reduction, found.data(), sources, 2, kCount, Scaling());
      CheckSame(Case("neutral", dtype, reduction, 2, kCount, Scaling()), found, alone);
      RT_CHECK(neutral.GuardsIntact());
    }
}

// ---- Adasum ----

template <typename T>
std::vector<T> RandomVector(size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  std::vector<T> values(count);
  for (T& value : values) value = static_cast<T>(normal(random));
  return values;
}

template <typename T>
void CheckAdasum(DType dtype, size_t count) {
  const std::vector<T> a = RandomVector<T>(count, count), b = RandomVector<T>(count, count + 1);
  long double aa = 0, ab = 0, bb = 0;
  for (size_t i = 0; i < count; ++i) {
    const long double x = a[i], y = b[i];
    aa += x * x, ab += x * y, bb += y * y;
  }
  Dots first;
  for (const char* variant : {"baseline", "avx2", "avx512"}) {
    if (!SelectKernelVariant(variant)) continue;
    const Dots dots = AdasumDots(dtype, a.data(), b.data(), count);
    const long double most = 1e-13L * static_cast<long double>(count + 1);
    RT_CHECK(std::abs(dots.aa - aa) <= most && std::abs(dots.ab - ab) <= most && std::abs(dots.bb - bb) <= most);
    if (std::string(variant) == "baseline") first = dots;
    RT_CHECK(std::memcmp(&first, &dots, sizeof dots) == 0);
    std::vector<T> found(a);
    AdasumCombine(dtype, found.data(), found.data(), b.data(), count, 0.75, -1.0 / 3);
    for (size_t i = 0; i < count; ++i)
      RT_CHECK_EQ(found[i], static_cast<T>(0.75 * static_cast<double>(a[i]) + -1.0 / 3 * static_cast<double>(b[i])));
  }
  SelectKernelVariant("");
}

RT_TEST(adasum_has_the_same_bits_on_every_processor) {
  for (size_t count : {0, 1, 7, 8, 9, 100, 16384}) {
    CheckAdasum<float>(DType::kFloat32, count);
    CheckAdasum<double>(DType::kFloat64, count);
  }
}

RT_TEST(unknown_variant_is_refused_and_the_choice_stays) {
  const std::string best = KernelVariant();
  RT_CHECK(!SelectKernelVariant("sse5"));
  RT_CHECK_EQ(std::string(KernelVariant()), best);
  RT_CHECK(SelectKernelVariant("baseline"));
  RT_CHECK_EQ(std::string(KernelVariant()), std::string("baseline"));
  RT_CHECK(SelectKernelVariant(""));
  RT_CHECK_EQ(std::string(KernelVariant()), best);
}

#if defined(__x86_64__)
RT_TEST(a_thread_that_flushes_subnormals_gets_the_same_bits) {
  const unsigned own_mode = _mm_getcsr();
  const float tiny[2] = {1e-40f, 3e-39f};
  const void* sources[] = {&tiny[0], &tiny[1]};
  float expected = 0, found = 0;
  Reduce(DType::kFloat32, Reduction::kSum, &expected, sources, 2, 1, Scaling());
  _mm_setcsr(own_mode | 0x8040);  // flush to zero, subnormals are zero
  Reduce(DType::kFloat32, Reduction::kSum, &found, sources, 2, 1, Scaling());
  const unsigned mode_after = _mm_getcsr();
  _mm_setcsr(own_mode);
  RT_CHECK_EQ(BitsFromFloat(found), BitsFromFloat(expected));
  RT_CHECK(BitsFromFloat(expected) != 0);
  RT_CHECK_EQ(mode_after & 0x8040u, 0x8040u);
}
#endif
