// A codec whose form on the wire is no dtype: four elements share a scale and take three bytes. Each run has a header,
// so its bytes are not in proportion to its elements, and a run that is read from another place is noticed.
#ifndef RINGTRAIN_TESTS_NATIVE_SIX_BITS_H_
#define RINGTRAIN_TESTS_NATIVE_SIX_BITS_H_

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "check.h"
#include "kernels/codec.h"

namespace ringtrain {

class SixBits : public Codec {
 public:
  static constexpr size_t kBlock = 4;

  explicit SixBits(bool feedback, size_t block = kBlock) : Codec({block, 0, feedback}) {}

  size_t WireBytes(DType, size_t count) const override {
    const size_t whole = count / kBlock, rest = count % kBlock;
    return sizeof kHeader + whole * BlockBytes(kBlock) + (rest > 0 ? BlockBytes(rest) : 0);
  }
  void Encode(DType, char* wire, const void* elements, size_t count, Feedback feedback) const override {
    std::vector<float> values(count);
    if (count > 0) std::memcpy(values.data(), elements, count * sizeof(float));
    Write(values, wire, feedback);
  }
  void Decode(DType, void* elements, const char* wire, size_t count, double factor) const override {
    const std::vector<float> values = Read(wire, count);
    for (size_t i = 0; i < count; ++i) {
      const float value = values[i] * static_cast<float>(factor);
      std::memcpy(static_cast<char*>(elements) + i * sizeof value, &value, sizeof value);
    }
  }
  void Reduce(DType dtype, Reduction reduction, char* wire, const void* const* sources, int source_count, size_t count,
              const Scaling& scaling, Feedback feedback) const override {
    std::vector<std::vector<float>> decoded;
    std::vector<const void*> addresses;
    for (int source = 0; source < source_count; ++source)
      decoded.push_back(Read(static_cast<const char*>(sources[source]), count));
    for (const std::vector<float>& values : decoded) addresses.push_back(values.data());
    std::vector<float> total(count);
    ringtrain::Reduce(dtype, reduction, total.data(), addresses.data(), source_count, count, scaling);
    Write(total, wire, feedback);
  }

 private:
  static constexpr uint16_t kHeader = 0xc0de;
  static constexpr size_t BlockBytes(size_t count) { return sizeof(float) + (count * 6 + 7) / 8; }

  static void Write(std::vector<float> values, char* wire, Feedback feedback) {
    for (size_t i = 0; i < values.size() && feedback.after != nullptr; ++i) values[i] += feedback.before[i];
    std::memcpy(wire, &kHeader, sizeof kHeader);
    wire += sizeof kHeader;
    for (size_t begin = 0; begin < values.size(); begin += kBlock) {
      const size_t n = std::min(kBlock, values.size() - begin);
      float most = 0;
      for (size_t i = 0; i < n; ++i) most = std::max(most, std::fabs(values[begin + i]));
      const float scale = most / 31;
      uint32_t codes = 0;
      for (size_t i = 0; i < n; ++i) {
        const auto code = static_cast<int32_t>(most > 0 ? std::nearbyint(values[begin + i] / scale) : 0);
        codes |= static_cast<uint32_t>(code + 32) << (6 * i);
        if (feedback.after != nullptr) feedback.after[begin + i] = values[begin + i] - static_cast<float>(code) * scale;
      }
      std::memcpy(wire, &scale, sizeof scale);
      std::memcpy(wire + sizeof scale, &codes, BlockBytes(n) - sizeof scale);
      wire += BlockBytes(n);
    }
  }

  static std::vector<float> Read(const char* wire, size_t count) {
    uint16_t header;
    std::memcpy(&header, wire, sizeof header);
    RT_CHECK_EQ(header, kHeader);
    wire += sizeof header;
    std::vector<float> values(count);
    for (size_t begin = 0; begin < count; begin += kBlock) {
      const size_t n = std::min(kBlock, count - begin);
      float scale;
      uint32_t codes = 0;
      std::memcpy(&scale, wire, sizeof scale);
      std::memcpy(&codes, wire + sizeof scale, BlockBytes(n) - sizeof scale);
      wire += BlockBytes(n);
      for (size_t i = 0; i < n; ++i)
        values[begin + i] = static_cast<float>(static_cast<int32_t>((codes >> (6 * i)) & 63) - 32) * scale;
    }
    return values;
  }
};

}  // namespace ringtrain
#endif  // RINGTRAIN_TESTS_NATIVE_SIX_BITS_H_
