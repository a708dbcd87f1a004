// The loops are compiled for each level of vector instructions, as those of reduce.cc are, and give the same bits: each
// operation is rounded as IEEE 754 says, and none is contracted (level.h).
#include "kernels/scaled_blocks.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "kernels/float16.h"
#include "kernels/float_mode.h"
#include "kernels/level.h"

namespace ringtrain {
namespace {

constexpr uint32_t kInfinity = 0x7f800000;      // as bits, like the next: magnitudes compare as whole numbers do
constexpr uint32_t kLeast = (127 - 119) << 23;  // 2^-119
// Added to a number of a small magnitude, it leaves that number, rounded to nearest even, in the lowest bits.
constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23

// ---- a block's scale ----

struct Scale {
  float value = 0, inverse = 0;  // inverse 0: no codes
};

template <typename BlockForm>
RT_ALWAYS_INLINE Scale ScaleOf(const float* values, size_t n) {
  uint32_t most = 0;
  for (size_t i = 0; i < n; ++i) {
    const uint32_t magnitude = BitsFromFloat(values[i]) & 0x7fffffffu;
    most = magnitude > most ? magnitude : most;
  }
  if (most >= kInfinity) return {std::numeric_limits<float>::quiet_NaN(), 0};
  if (most < kLeast) return {};
  const float largest = FloatFromBits(most);
  if (BlockForm::kScaleBytes == sizeof(float)) return {largest / BlockForm::kMostCode, BlockForm::kMostCode / largest};
  const float scale = FloatFromBits((BitsFromFloat(largest / BlockForm::kMostCode) + 0xffffu) & 0xffff0000u);
  return {scale, 1.0f / scale};
}

template <typename BlockForm>
RT_ALWAYS_INLINE void StoreScale(char* wire, float scale) {
  const uint32_t bits = BitsFromFloat(scale) >> (32 - 8 * BlockForm::kScaleBytes);  // the upper half is bfloat16
  std::memcpy(wire, &bits, BlockForm::kScaleBytes);
}

template <typename BlockForm>
RT_ALWAYS_INLINE float LoadScale(const char* wire) {
  uint32_t bits = 0;
  std::memcpy(&bits, wire, BlockForm::kScaleBytes);
  return FloatFromBits(bits << (32 - 8 * BlockForm::kScaleBytes));
}

// ---- a block's codes ----

// In the lowest bits of the result.
RT_ALWAYS_INLINE uint32_t CodeOf(float value, float inverse) { return BitsFromFloat(value * inverse + kRounder); }

RT_ALWAYS_INLINE void StoreCodes(Int8Form, uint8_t* codes, const float* values, size_t n, float inverse) {
  for (size_t i = 0; i < n; ++i) codes[i] = static_cast<uint8_t>(CodeOf(values[i], inverse));
}

RT_ALWAYS_INLINE void StoreCodes(Int4Form, uint8_t* codes, const float* values, size_t n, float inverse) {
  const size_t low = Int4Form::CodeBytes(n), high = n - low;
  for (size_t i = 0; i < high; ++i)
    codes[i] = static_cast<uint8_t>((CodeOf(values[i], inverse) & 15) | CodeOf(values[low + i], inverse) << 4);
  if (high < low) codes[high] = static_cast<uint8_t>(CodeOf(values[high], inverse) & 15);
}

RT_ALWAYS_INLINE float LowHalf(uint8_t codes) { return static_cast<float>(static_cast<int8_t>(codes << 4) >> 4); }
RT_ALWAYS_INLINE float HighHalf(uint8_t codes) { return static_cast<float>(static_cast<int8_t>(codes) >> 4); }

template <bool kFirst>
RT_ALWAYS_INLINE float Added(float total, float value) {
  return kFirst ? value : total + value;
}

// total = the block's values, or total + those.
template <bool kFirst>
RT_ALWAYS_INLINE void AddCodes(Int8Form, float* total, const uint8_t* codes, size_t n, float scale) {
  for (size_t i = 0; i < n; ++i)
    total[i] = Added<kFirst>(total[i], static_cast<float>(static_cast<int8_t>(codes[i])) * scale);
}

template <bool kFirst>
RT_ALWAYS_INLINE void AddCodes(Int4Form, float* total, const uint8_t* codes, size_t n, float scale) {
  const size_t low = Int4Form::CodeBytes(n), high = n - low;
  for (size_t i = 0; i < low; ++i) total[i] = Added<kFirst>(total[i], LowHalf(codes[i]) * scale);
  for (size_t i = 0; i < high; ++i) total[low + i] = Added<kFirst>(total[low + i], HighHalf(codes[i]) * scale);
}

// ---- blocks ----

// values: with what was lost before in them already.
template <typename BlockForm>
RT_ALWAYS_INLINE void EncodeBlock(char* wire, const float* values, size_t n, Feedback feedback) {
  const Scale scale = ScaleOf<BlockForm>(values, n);
  StoreScale<BlockForm>(wire, scale.value);
  auto* codes = reinterpret_cast<uint8_t*>(wire + BlockForm::kScaleBytes);
  if (scale.inverse == 0) {
    std::memset(codes, 0, BlockForm::CodeBytes(n));
    if (feedback.after != nullptr)
      std::memcpy(feedback.after, scale.value == 0 ? values : feedback.before, n * sizeof(float));
    return;
  }
  StoreCodes(BlockForm(), codes, values, n, scale.inverse);
  if (feedback.after == nullptr) return;
  for (size_t i = 0; i < n; ++i) {
    const float code = values[i] * scale.inverse + kRounder - kRounder;
    feedback.after[i] = values[i] - code * scale.value;
  }
}

template <typename BlockForm, bool kFirst>
RT_ALWAYS_INLINE void AddBlock(float* total, const char* wire, size_t n) {
  const auto* codes = reinterpret_cast<const uint8_t*>(wire + BlockForm::kScaleBytes);
  AddCodes<kFirst>(BlockForm(), total, codes, n, LoadScale<BlockForm>(wire));
}

RT_ALWAYS_INLINE Feedback From(Feedback feedback, size_t begin) {
  return feedback.after == nullptr ? feedback : Feedback{feedback.before + begin, feedback.after + begin};
}

RT_ALWAYS_INLINE void AddLost(float* values, Feedback feedback, size_t n) {
  if (feedback.after == nullptr) return;
  for (size_t i = 0; i < n; ++i) values[i] = values[i] + feedback.before[i];
}

template <typename BlockForm>
constexpr size_t kBlockBytes = BlockForm::kScaleBytes + BlockForm::CodeBytes(BlockForm::kBlock);

template <typename BlockForm, typename Element>
RT_ALWAYS_INLINE void EncodeElements(char* wire, const Element* elements, size_t count, Feedback feedback) {
  alignas(64) float room[BlockForm::kBlock];
  for (size_t begin = 0; begin < count; begin += BlockForm::kBlock, wire += kBlockBytes<BlockForm>) {
    const size_t n = std::min(BlockForm::kBlock, count - begin);
    const Feedback here = From(feedback, begin);
    for (size_t i = 0; i < n; ++i) room[i] = static_cast<float>(elements[begin + i]);
    AddLost(room, here, n);
    EncodeBlock<BlockForm>(wire, room, n, here);
  }
}

template <typename BlockForm, typename Element>
RT_ALWAYS_INLINE void DecodeElements(Element* elements, const char* wire, size_t count, double factor) {
  alignas(64) float room[BlockForm::kBlock];
  for (size_t begin = 0; begin < count; begin += BlockForm::kBlock, wire += kBlockBytes<BlockForm>) {
    const size_t n = std::min(BlockForm::kBlock, count - begin);
    AddBlock<BlockForm, true>(room, wire, n);
    for (size_t i = 0; i < n; ++i) elements[begin + i] = static_cast<Element>(room[i]) * static_cast<Element>(factor);
  }
}

template <typename BlockForm>
RT_ALWAYS_INLINE void ReduceBlocks(char* wire, const void* const* sources, int source_count, size_t count,
                                   double divisor, Feedback feedback) {
  alignas(64) float total[BlockForm::kBlock];
  size_t at = 0;  // of the block, in every source
  for (size_t begin = 0; begin < count; begin += BlockForm::kBlock, at += kBlockBytes<BlockForm>) {
    const size_t n = std::min(BlockForm::kBlock, count - begin);
    const Feedback here = From(feedback, begin);
    AddBlock<BlockForm, true>(total, static_cast<const char*>(sources[0]) + at, n);
    for (int source = 1; source < source_count; ++source)
      AddBlock<BlockForm, false>(total, static_cast<const char*>(sources[source]) + at, n);
    if (divisor != 1.0)
      for (size_t i = 0; i < n; ++i) total[i] = total[i] / static_cast<float>(divisor);
    AddLost(total, here, n);
    EncodeBlock<BlockForm>(wire + at, total, n, here);
  }
}

// ---- one set of functions per processor level ----

struct Loops {
  void (*encode_float32)(char*, const float*, size_t, Feedback);
  void (*encode_float64)(char*, const double*, size_t, Feedback);
  void (*decode_float32)(float*, const char*, size_t, double);
  void (*decode_float64)(double*, const char*, size_t, double);
  void (*reduce)(char*, const void* const*, int, size_t, double, Feedback);
};

#define RT_LOOPS(Level, target)                                                                                     \
  template <typename BlockForm>                                                                                     \
  target void EncodeFloat32##Level(char* wire, const float* elements, size_t count, Feedback feedback) {            \
    EncodeElements<BlockForm>(wire, elements, count, feedback);                                                     \
  }                                                                                                                 \
  template <typename BlockForm>                                                                                     \
  target void EncodeFloat64##Level(char* wire, const double* elements, size_t count, Feedback feedback) {           \
    EncodeElements<BlockForm>(wire, elements, count, feedback);                                                     \
  }                                                                                                                 \
  template <typename BlockForm>                                                                                     \
  target void DecodeFloat32##Level(float* elements, const char* wire, size_t count, double factor) {                \
    DecodeElements<BlockForm>(elements, wire, count, factor);                                                       \
  }                                                                                                                 \
  template <typename BlockForm>                                                                                     \
  target void DecodeFloat64##Level(double* elements, const char* wire, size_t count, double factor) {               \
    DecodeElements<BlockForm>(elements, wire, count, factor);                                                       \
  }                                                                                                                 \
  template <typename BlockForm>                                                                                     \
  target void Reduce##Level(char* wire, const void* const* sources, int source_count, size_t count, double divisor, \
                            Feedback feedback) {                                                                    \
    ReduceBlocks<BlockForm>(wire, sources, source_count, count, divisor, feedback);                                 \
  }
#define RT_LOOPS_ROW(Level)                                                                           \
  {EncodeFloat32##Level<BlockForm>, EncodeFloat64##Level<BlockForm>, DecodeFloat32##Level<BlockForm>, \
   DecodeFloat64##Level<BlockForm>, Reduce##Level<BlockForm>}

RT_LOOPS(Baseline, )
#if defined(__x86_64__)
RT_LOOPS(Avx2, __attribute__((target("avx2"))))
RT_LOOPS(Avx512, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))))
template <typename BlockForm>
constexpr ByLevel<Loops> kLoops = {RT_LOOPS_ROW(Baseline), RT_LOOPS_ROW(Avx2), RT_LOOPS_ROW(Avx512)};
#else
template <typename BlockForm>
constexpr ByLevel<Loops> kLoops = {RT_LOOPS_ROW(Baseline)};
#endif
#undef RT_LOOPS
#undef RT_LOOPS_ROW

}  // namespace

template <typename BlockForm>
size_t ScaledBlocks<BlockForm>::WireBytes(DType, size_t count) const {
  const size_t rest = count % BlockForm::kBlock;
  return count / BlockForm::kBlock * kBlockBytes<BlockForm> +
         (rest > 0 ? BlockForm::kScaleBytes + BlockForm::CodeBytes(rest) : 0);
}

template <typename BlockForm>
void ScaledBlocks<BlockForm>::Encode(DType dtype, char* wire, const void* elements, size_t count,
                                     Feedback feedback) const {
  const DefaultFloatMode mode;
  if (dtype == DType::kFloat32)
    kLoops<BlockForm>.chosen().encode_float32(wire, static_cast<const float*>(elements), count, feedback);
  else
    kLoops<BlockForm>.chosen().encode_float64(wire, static_cast<const double*>(elements), count, feedback);
}

template <typename BlockForm>
void ScaledBlocks<BlockForm>::Decode(DType dtype, void* elements, const char* wire, size_t count, double factor) const {
  const DefaultFloatMode mode;
  if (dtype == DType::kFloat32)
    kLoops<BlockForm>.chosen().decode_float32(static_cast<float*>(elements), wire, count, factor);
  else
    kLoops<BlockForm>.chosen().decode_float64(static_cast<double*>(elements), wire, count, factor);
}

template <typename BlockForm>
void ScaledBlocks<BlockForm>::Reduce(DType, Reduction, char* wire, const void* const* sources, int source_count,
                                     size_t count, const Scaling& scaling, Feedback feedback) const {
  const DefaultFloatMode mode;
  kLoops<BlockForm>.chosen().reduce(wire, sources, source_count, count, scaling.divisor, feedback);
}

template class ScaledBlocks<Int8Form>;
template class ScaledBlocks<Int4Form>;

}  // namespace ringtrain
