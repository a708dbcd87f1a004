#include "transport/tcp/sha256_blocks.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace ringtrain {
namespace {

// The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
alignas(16) constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t Rotate(uint32_t value, int bits) { return (value >> bits) | (value << (32 - bits)); }

uint32_t BigEndian(const uint8_t* bytes) {
  return uint32_t{bytes[0]} << 24 | uint32_t{bytes[1]} << 16 | uint32_t{bytes[2]} << 8 | uint32_t{bytes[3]};
}

#if defined(__x86_64__)

// Leaf 7; __builtin_cpu_supports has no name for it in the older compilers that we support.
bool HasInstructions() {
  constexpr unsigned kSha = 1u << 29;
  unsigned a, b, c, d;
  return __builtin_cpu_supports("sse4.1") && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & kSha) != 0;
}

// sha256rnds2 does two rounds, with the state as (a b e f) and (c d g h), the first in the highest word; sha256msg1 and
// sha256msg2 make the next four words of the schedule. Intel's manual, volume 2, describes them.
__attribute__((target("sha,sse4.1,ssse3"))) void BlocksByInstructions(uint32_t* state, const uint8_t* blocks,
                                                                      size_t count) {
  const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
  const auto load = [](const void* from) { return _mm_loadu_si128(static_cast<const __m128i*>(from)); };
  const __m128i cdab = _mm_shuffle_epi32(load(state), 0xb1), efgh = _mm_shuffle_epi32(load(state + 4), 0x1b);
  __m128i abef = _mm_alignr_epi8(cdab, efgh, 8), cdgh = _mm_blend_epi16(efgh, cdab, 0xf0);
  for (; count > 0; --count, blocks += kSha256Block) {
    const __m128i abef_before = abef, cdgh_before = cdgh;
    __m128i words[4];  // the last 16 of the schedule
#pragma GCC unroll 16
    for (size_t four = 0; four < 16; ++four) {
      __m128i& next = words[four % 4];
      if (four < 4) {
        next = _mm_shuffle_epi8(load(blocks + 16 * four), big_endian);
      } else {
        const __m128i last = words[(four + 3) % 4], before = words[(four + 2) % 4];
        const __m128i sum =
            _mm_add_epi32(_mm_sha256msg1_epu32(next, words[(four + 1) % 4]), _mm_alignr_epi8(last, before, 4));
        next = _mm_sha256msg2_epu32(sum, last);
      }
      const __m128i added = _mm_add_epi32(next, _mm_load_si128(reinterpret_cast<const __m128i*>(kRound + 4 * four)));
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, added);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(added, 0x0e));
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }
  const __m128i feba = _mm_shuffle_epi32(abef, 0x1b), dchg = _mm_shuffle_epi32(cdgh, 0xb1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state), _mm_blend_epi16(feba, dchg, 0xf0));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state + 4), _mm_alignr_epi8(dchg, feba, 8));
}

#endif

}  // namespace

void PlainSha256Blocks(uint32_t* state, const uint8_t* blocks, size_t count) {
  for (; count > 0; --count, blocks += kSha256Block) {
    uint32_t words[64];
    for (size_t i = 0; i < 16; ++i) words[i] = BigEndian(blocks + 4 * i);
    for (size_t i = 16; i < 64; ++i) {
      const uint32_t early = words[i - 15], late = words[i - 2];
      words[i] = words[i - 16] + (Rotate(early, 7) ^ Rotate(early, 18) ^ early >> 3) + words[i - 7] +
                 (Rotate(late, 17) ^ Rotate(late, 19) ^ late >> 10);
    }
    uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
    uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
    for (size_t i = 0; i < 64; ++i) {
      const uint32_t one =
          h + (Rotate(e, 6) ^ Rotate(e, 11) ^ Rotate(e, 25)) + ((e & f) ^ (~e & g)) + kRound[i] + words[i];
      const uint32_t two = (Rotate(a, 2) ^ Rotate(a, 13) ^ Rotate(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + one;
      d = c, c = b, b = a, a = one + two;
    }
    const uint32_t after[] = {a, b, c, d, e, f, g, h};
    for (size_t i = 0; i < 8; ++i) state[i] += after[i];
  }
}

Sha256Blocks FastestSha256Blocks() {
#if defined(__x86_64__)
  static const Sha256Blocks fastest = HasInstructions() ? BlocksByInstructions : PlainSha256Blocks;
  return fastest;
#else
  return PlainSha256Blocks;
#endif
}

}  // namespace ringtrain
