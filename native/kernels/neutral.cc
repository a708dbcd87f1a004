#include "kernels/neutral.h"

#include <cstdint>
#include <limits>

namespace ringtrain {
namespace {

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

}  // namespace ringtrain
