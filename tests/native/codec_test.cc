// The codecs of the table. Blocks with a scale against loops that follow kernels/scaled_blocks.h word by word, one
// element at a time; every variant that this processor has must give the oracle's bytes.
#include "kernels/codec.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "check.h"
#include "kernels/level.h"
#include "kernels/scaled_blocks.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

using namespace ringtrain;

namespace {

using Floats = std::vector<float>;
using Wire = std::vector<char>;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
const ScaledBlocks<Int8Form> kInt8(false), kInt8Feedback(true);
const ScaledBlocks<Int4Form> kInt4(false), kInt4Feedback(true);

template <typename Body>
void ForEachVariant(Body body) {
  for (const char* name : {"baseline", "avx2", "avx512"})
    if (SelectKernelVariant(name)) body();
  SelectKernelVariant("");
}

// ---- the oracle ----

// A form, as the head of scaled_blocks.h describes it.
struct Oracle {
  const Codec& codec;
  const Codec& with_feedback;
  size_t block;
  int most_code;
  bool is_int4;

  size_t ScaleBytes() const { return is_int4 ? 2 : 4; }
  size_t CodeBytes(size_t n) const { return is_int4 ? (n + 1) / 2 : n; }

  // bfloat16 is the upper half of float32; rounded away from zero.
  float Scale(float most) const {
    float scale = most / static_cast<float>(most_code);
    if (!is_int4) return scale;
    uint32_t bits;
    std::memcpy(&bits, &scale, sizeof bits);
    if ((bits & 0xffff) != 0) bits = (bits | 0xffff) + 1;
    std::memcpy(&scale, &bits, sizeof bits);
    return scale;
  }

  // lost, if any: of each element, in and out.
  Wire Encoded(Floats values, Floats* lost = nullptr) const {
    Wire wire;
    for (size_t i = 0; lost != nullptr && i < values.size(); ++i) values[i] = values[i] + (*lost)[i];
    for (size_t begin = 0; begin < values.size(); begin += block) {
      const size_t n = std::min(values.size() - begin, block);
      float most = 0;
      bool finite = true;
      for (size_t i = begin; i < begin + n; ++i) {
        finite = finite && std::isfinite(values[i]);
        most = std::max(most, std::fabs(values[i]));
      }
      const bool zero = most < std::ldexp(1.0f, -119);
      const float scale = !finite ? std::nanf("") : zero ? 0.0f : Scale(most);
      const float inverse = is_int4 ? 1.0f / scale : static_cast<float>(most_code) / most;
      std::vector<int> codes(n);
      for (size_t i = 0; i < n; ++i) {
        codes[i] = !finite || zero ? 0 : static_cast<int>(std::nearbyint(values[begin + i] * inverse));
        RT_REQUIRE(std::abs(codes[i]) <= most_code);
        if (lost != nullptr && finite) (*lost)[begin + i] = values[begin + i] - static_cast<float>(codes[i]) * scale;
      }
      const size_t at = wire.size();
      wire.resize(at + ScaleBytes() + CodeBytes(n));
      std::memcpy(wire.data() + at, reinterpret_cast<const char*>(&scale) + sizeof scale - ScaleBytes(), ScaleBytes());
      for (size_t i = 0; i < n; ++i) {
        char& byte = wire[at + ScaleBytes() + i % CodeBytes(n)];
        const unsigned code = static_cast<unsigned>(codes[i]);
        byte = static_cast<char>(!is_int4           ? code
                                 : i < CodeBytes(n) ? code & 15
                                                    : static_cast<unsigned>(byte) | code << 4);
      }
    }
    return wire;
  }

  Floats Decoded(const Wire& wire, size_t count) const {
    Floats values;
    for (size_t at = 0; values.size() < count;) {
      const size_t n = std::min(block, count - values.size());
      float scale = 0;
      std::memcpy(reinterpret_cast<char*>(&scale) + sizeof scale - ScaleBytes(), wire.data() + at, ScaleBytes());
      at += ScaleBytes();
      for (size_t i = 0; i < n; ++i) {
        int code = static_cast<signed char>(wire[at + i % CodeBytes(n)]);
        if (is_int4) code = i < CodeBytes(n) ? (code & 15) - ((code & 8) != 0 ? 16 : 0) : code >> 4;
        values.push_back(static_cast<float>(code) * scale);
      }
      at += CodeBytes(n);
    }
    return values;
  }
};

const Oracle kOracles[] = {{kInt8, kInt8Feedback, 256, 127, false}, {kInt4, kInt4Feedback, 128, 7, true}};

// Normal numbers of a magnitude that differs from block to block, with what is special in some.
Floats Random(std::mt19937* random, size_t count) {
  std::normal_distribution<float> normal;
  const float special[] = {0.0f, -0.0f, kInfinity, -kInfinity, std::nanf(""), 1e-40f, -1e-45f, 3e38f, 1e-36f};
  Floats values(count);
  float magnitude = 1;
  for (size_t i = 0; i < count; ++i) {
    if (i % 256 == 0) magnitude = std::ldexp(1.0f, static_cast<int>((*random)() % 250) - 125);
    values[i] = normal(*random) * magnitude;
    if ((*random)() % 1000 == 0) values[i] = special[(*random)() % 9];
  }
  return values;
}

constexpr size_t kCounts[] = {0, 1, 2, 127, 128, 129, 255, 256, 257, 511, 4096, 4099, 70001};

Wire EncodedBy(const Codec& codec, const Floats& values) {
  Wire wire(codec.WireBytes(DType::kFloat32, values.size()));
  codec.Encode(DType::kFloat32, wire.data(), values.data(), values.size(), {});
  return wire;
}

bool SameBits(const Floats& one, const Floats& other) {
  if (one.size() != other.size()) return false;
  for (size_t i = 0; i < one.size(); ++i)
    if (std::memcmp(&one[i], &other[i], sizeof(float)) != 0 && !(std::isnan(one[i]) && std::isnan(other[i])))
      return false;
  return true;
}

RT_TEST(blocks_have_the_oracles_bytes) {
  ForEachVariant([] {
    std::mt19937 random(1);
    for (const Oracle& oracle : kOracles)
      for (size_t count : kCounts) {
        const Floats values = Random(&random, count);
        const Wire wire = oracle.Encoded(values);
        RT_CHECK(EncodedBy(oracle.codec, values) == wire);
        Floats decoded(count);
        oracle.codec.Decode(DType::kFloat32, decoded.data(), wire.data(), count, 1.0);
        RT_CHECK(SameBits(decoded, oracle.Decoded(wire, count)));
      }
  });
}

RT_TEST(blocks_are_summed_in_the_order_of_the_sources) {
  ForEachVariant([] {
    std::mt19937 random(2);
    for (const Oracle& oracle : kOracles)
      for (size_t count : kCounts)
        for (double divisor : {1.0, 3.0, 4.0}) {
          std::vector<Wire> wires;
          std::vector<const void*> sources;
          Floats total(count);
          for (int source = 0; source < 5; ++source) {
            wires.push_back(oracle.Encoded(Random(&random, count)));
            const Floats values = oracle.Decoded(wires.back(), count);
            for (size_t i = 0; i < count; ++i) total[i] = source == 0 ? values[i] : total[i] + values[i];
          }
          for (float& value : total) value = value / static_cast<float>(divisor);
          for (const Wire& wire : wires) sources.push_back(wire.data());
          Scaling scaling;
          scaling.divisor = divisor;
          oracle.codec.Reduce(DType::kFloat32, Reduction::kSum, wires[2].data(), sources.data(), 5, count, scaling, {});
          RT_CHECK(wires[2] == oracle.Encoded(total));
        }
  });
}

// Ten times over, in and out of two places in turn; a block that is NaN keeps what it had.
RT_TEST(what_is_lost_is_kept_and_made_up_for) {
  ForEachVariant([] {
    std::mt19937 random(5);
    for (const Oracle& oracle : kOracles)
      for (size_t count : kCounts) {
        Floats lost(count), kept[2] = {Floats(count), Floats(count)};
        for (int step = 0; step < 10; ++step) {
          const Floats values = Random(&random, count);
          const Feedback feedback = {kept[step % 2].data(), kept[1 - step % 2].data()};
          const Wire expected = oracle.Encoded(values, &lost);
          Wire wire(expected.size());
          const std::vector<double> wide(values.begin(), values.end());
          if (step % 3 > 0)
            oracle.with_feedback.Encode(DType::kFloat32, wire.data(), values.data(), count, feedback);
          else
            oracle.with_feedback.Encode(DType::kFloat64, wire.data(), wide.data(), count, feedback);
          RT_REQUIRE(wire == expected);
          RT_REQUIRE(SameBits(kept[1 - step % 2], lost));
        }
      }
  });
}

RT_TEST(what_a_sum_has_lost_is_kept_too) {
  ForEachVariant([] {
    std::mt19937 random(6);
    for (const Oracle& oracle : kOracles)
      for (size_t count : kCounts) {
        Floats lost(count), kept[2] = {Floats(count), Floats(count)};
        for (int step = 0; step < 6; ++step) {
          const Wire one = oracle.Encoded(Random(&random, count)), two = oracle.Encoded(Random(&random, count));
          Floats total = oracle.Decoded(one, count);
          const Floats second = oracle.Decoded(two, count);
          for (size_t i = 0; i < count; ++i) total[i] = (total[i] + second[i]) / 3.0f;
          const void* const sources[] = {one.data(), two.data()};
          Scaling scaling;
          scaling.divisor = 3;
          Wire wire(one.size());
          oracle.with_feedback.Reduce(DType::kFloat32, Reduction::kAverage, wire.data(), sources, 2, count, scaling,
                                      {kept[step % 2].data(), kept[1 - step % 2].data()});
          RT_REQUIRE(wire == oracle.Encoded(total, &lost));
          RT_REQUIRE(SameBits(kept[1 - step % 2], lost));
        }
      }
  });
}

RT_TEST(an_element_is_off_by_half_a_scale_at_most_and_by_nothing_the_second_time) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  Floats values(256 * 400);
  for (float& value : values) value = normal(random);
  for (const Oracle& oracle : kOracles) {
    const Floats once = oracle.Decoded(EncodedBy(oracle.codec, values), values.size());
    for (size_t begin = 0; begin < values.size(); begin += oracle.block) {
      float most = 0;
      for (size_t i = begin; i < begin + oracle.block; ++i) most = std::max(most, std::fabs(values[i]));
      const float half = oracle.Scale(most) / 2 * 1.00001f;
      for (size_t i = begin; i < begin + oracle.block; ++i) RT_REQUIRE(std::fabs(once[i] - values[i]) <= half);
    }
    RT_CHECK(SameBits(oracle.Decoded(EncodedBy(oracle.codec, once), once.size()), once));
  }
}

RT_TEST(float64_travels_by_way_of_float32) {
  std::mt19937 random(4);
  for (const Oracle& oracle : kOracles)
    for (size_t count : kCounts) {
      const Floats values = Random(&random, count);
      std::vector<double> wide(values.begin(), values.end());
      if (count > 300) wide[300] = 1e300;  // infinite as float32
      Floats narrow(wide.size());
      for (size_t i = 0; i < count; ++i) narrow[i] = static_cast<float>(wide[i]);
      Wire wire(oracle.codec.WireBytes(DType::kFloat64, count));
      oracle.codec.Encode(DType::kFloat64, wire.data(), wide.data(), count, {});
      RT_CHECK(wire == oracle.Encoded(narrow));
      std::vector<double> decoded(count);
      oracle.codec.Decode(DType::kFloat64, decoded.data(), wire.data(), count, 0.3);
      const Floats expected = oracle.Decoded(wire, count);
      for (size_t i = 0; i < count; ++i)
        RT_CHECK(std::isnan(expected[i]) ? std::isnan(decoded[i])
                                         : decoded[i] == static_cast<double>(expected[i]) * 0.3);
    }
}

RT_TEST(bytes_of_a_run_are_those_of_its_blocks) {
  for (size_t count : kCounts) {
    RT_CHECK_EQ(kInt8.WireBytes(DType::kFloat32, count), count + (count + 255) / 256 * 4);
    RT_CHECK_EQ(kInt4.WireBytes(DType::kFloat32, count), (count + 1) / 2 + (count + 127) / 128 * 2);
  }
}

#if defined(__x86_64__)
RT_TEST(a_thread_that_flushes_subnormals_encodes_the_same_bytes) {
  Floats values(256, 1e-38f);  // nearly a scale, and subnormal
  values[0] = std::ldexp(1.0f, -119);
  const Wire expected = kOracles[0].Encoded(values);
  RT_CHECK(expected[4 + 1] != 0);
  const unsigned mode = _mm_getcsr();
  _mm_setcsr(mode | 0x8040);
  const Wire found = EncodedBy(kInt8, values);
  _mm_setcsr(mode);
  RT_CHECK(found == expected);
}
#endif

RT_TEST(a_compression_concerns_wide_floats_and_blocks_large_tensors) {
  const auto identity = [](Compression compression, DType dtype, size_t elements) {
    return CodecFor(compression, dtype, elements).identity();
  };
  constexpr Compression kInBlocks[] = {Compression::kInt8, Compression::kPlainInt8, Compression::kInt4,
                                       Compression::kPlainInt4};
  std::vector<Compression> all = {Compression::kFloat16, Compression::kBFloat16};
  all.insert(all.end(), std::begin(kInBlocks), std::end(kInBlocks));
  for (Compression compression : all) {
    RT_CHECK(identity(compression, DType::kInt32, 5000) && identity(compression, DType::kFloat16, 5000));
    RT_CHECK(!identity(compression, DType::kFloat32, 5000) && !identity(compression, DType::kFloat64, 5000));
  }
  for (Compression compression : kInBlocks) {
    RT_CHECK(identity(compression, DType::kFloat32, 4095) && !identity(compression, DType::kFloat32, 4096));
    const bool plain = compression == Compression::kPlainInt8 || compression == Compression::kPlainInt4;
    RT_CHECK_EQ(CodecFor(compression, DType::kFloat32, 4096).form().feedback, !plain);
    RT_CHECK(!CodecFor(compression, DType::kFloat32, 4096, false).form().feedback);
  }
  RT_CHECK(!identity(Compression::kFloat16, DType::kFloat32, 1));
  RT_CHECK(identity(Compression::kNone, DType::kFloat32, 5000));
}

}  // namespace
