#include "base/digest.h"

#include <cstring>

namespace ringtrain {
namespace {

// Odd numbers without a pattern: multiplying by one loses nothing of a word.
constexpr uint64_t kSpread = 0x9e3779b97f4a7c15u, kMix = 0xd6e8feb86659fd93u;
constexpr size_t kLanes = 8;  // words under way at once, so that no multiplication waits for the one before
constexpr size_t kBlock = kLanes * sizeof(uint64_t);

uint64_t Turned(uint64_t word, int bits) { return (word << bits) | (word >> (64 - bits)); }

// One to one in `state` for any word, and in `word` for any state, so a single change is never lost. The rounds of
// xxHash64 (Collet) do the same: the word's highest bit, a sign, must not reach the next round as a single bit either.
uint64_t Taken(uint64_t state, uint64_t word) { return Turned(state + word * kMix, 29) * kSpread; }

uint64_t Finished(uint64_t state) {
  state = (state ^ (state >> 32)) * kMix;
  return state ^ (state >> 29);
}

}  // namespace

uint64_t DigestOf(const void* memory, size_t bytes, uint64_t seed) {
  const char* at = static_cast<const char*>(memory);
  uint64_t lanes[kLanes];
  for (size_t lane = 0; lane < kLanes; ++lane) lanes[lane] = seed + lane * kMix;
  size_t left = bytes;
  for (; left >= kBlock; left -= kBlock, at += kBlock) {
    uint64_t words[kLanes];
    std::memcpy(words, at, kBlock);
    for (size_t lane = 0; lane < kLanes; ++lane) lanes[lane] = Taken(lanes[lane], words[lane]);
  }
  uint64_t last[kLanes] = {};
  if (left > 0) std::memcpy(last, at, left);
  uint64_t state = bytes;
  for (size_t lane = 0; lane < kLanes; ++lane) state = Taken(Finished(Taken(lanes[lane], last[lane])), state);
  return Finished(state);
}

}  // namespace ringtrain
