#include "nccl/elements.h"

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kernels/float16.h"
#include "strict.h"

namespace fakes {
namespace {

// A type in memory, and the one in which it is calculated.
template <typename T>
struct Plain {
  using Stored = T;
  using Value = T;
  static T Read(T stored) { return stored; }
  static T Write(T value) { return value; }
};
struct Half {
  using Stored = uint16_t;
  using Value = float;
  static float Read(uint16_t stored) { return ringtrain::Float16ToFloat32(stored); }
  static uint16_t Write(float value) { return ringtrain::Float32ToFloat16(value); }
};
struct Brain {
  using Stored = uint16_t;
  using Value = float;
  static float Read(uint16_t stored) { return ringtrain::BFloat16ToFloat32(stored); }
  static uint16_t Write(float value) { return ringtrain::Float32ToBFloat16(value); }
};

// Calls visit(format) with the format of an ncclDataType_t.
template <typename Visit>
void WithFormat(int dtype, Visit visit) {
  switch (dtype) {
    case 0:
      return visit(Plain<int8_t>());
    case 1:
      return visit(Plain<uint8_t>());
    case 2:
      return visit(Plain<int32_t>());
    case 3:
      return visit(Plain<uint32_t>());
    case 4:
      return visit(Plain<int64_t>());
    case 5:
      return visit(Plain<uint64_t>());
    case 6:
      return visit(Half());
    case 7:
      return visit(Plain<float>());
    case 8:
      return visit(Plain<double>());
    case 9:
      return visit(Brain());
    default:
      Violation("the fake NCCL has no dtype %d", dtype);
  }
}

template <typename Value>
Value Combine(int op, Value a, Value b) {
  // Unsigned, so that a sum of integers wraps as on a GPU.
  if constexpr (std::is_integral_v<Value>) {
    using Wide = std::make_unsigned_t<Value>;
    if (op == kProd)
      return static_cast<Value>(static_cast<Wide>(uint64_t{static_cast<Wide>(a)} * static_cast<Wide>(b)));
    if (op != kMax && op != kMin)
      return static_cast<Value>(static_cast<Wide>(static_cast<Wide>(a) + static_cast<Wide>(b)));
  }
  switch (op) {
    case kProd:
      return static_cast<Value>(a * b);
    case kMax:
      return b > a || b != b ? b : a;  // no number wins
    case kMin:
      return b < a || b != b ? b : a;
    default:
      return static_cast<Value>(a + b);
  }
}

}  // namespace

size_t SizeOf(int dtype) {
  constexpr size_t kSizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  return dtype >= 0 && dtype < 10 ? kSizes[dtype] : 0;
}

bool IsFloat(int dtype) { return dtype >= 6; }

double ReadScalar(int dtype, const void* scalar) {
  double number = 0;
  WithFormat(dtype, [&](auto format) {
    using Format = decltype(format);
    number = static_cast<double>(Format::Read(*static_cast<const typename Format::Stored*>(scalar)));
  });
  return number;
}

void Scale(int dtype, double factor, void* values, size_t count) {
  WithFormat(dtype, [&](auto format) {
    using Format = decltype(format);
    auto* all = static_cast<typename Format::Stored*>(values);
    const auto by = Format::Read(Format::Write(static_cast<typename Format::Value>(factor)));
    for (size_t i = 0; i < count; ++i)
      all[i] = Format::Write(static_cast<typename Format::Value>(Format::Read(all[i]) * by));
  });
}

void Accumulate(int dtype, int op, const void* values, void* into, size_t count) {
  WithFormat(dtype, [&](auto format) {
    using Format = decltype(format);
    const auto* from = static_cast<const typename Format::Stored*>(values);
    auto* to = static_cast<typename Format::Stored*>(into);
    for (size_t i = 0; i < count; ++i)
      to[i] = Format::Write(Combine<typename Format::Value>(op, Format::Read(to[i]), Format::Read(from[i])));
  });
}

void Divide(int dtype, int divisor, void* into, size_t count) {
  WithFormat(dtype, [&](auto format) {
    using Format = decltype(format);
    auto* to = static_cast<typename Format::Stored*>(into);
    for (size_t i = 0; i < count; ++i)
      to[i] = Format::Write(
          static_cast<typename Format::Value>(Format::Read(to[i]) / static_cast<typename Format::Value>(divisor)));
  });
}

}  // namespace fakes
