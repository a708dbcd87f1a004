#include "transport/tcp/sha256.h"

#include <string.h>

#include <algorithm>

namespace ringtrain {
namespace {

// The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
constexpr uint32_t kRound[64] = {
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

void PutBigEndian(uint64_t value, size_t bytes, uint8_t* to) {
  for (size_t i = bytes; i-- > 0; value >>= 8) to[i] = static_cast<uint8_t>(value);
}

}  // namespace

void Sha256::Compress(const uint8_t* block) {
  uint32_t words[64];
  for (size_t i = 0; i < 16; ++i) words[i] = BigEndian(block + 4 * i);
  for (size_t i = 16; i < 64; ++i) {
    const uint32_t early = words[i - 15], late = words[i - 2];
    words[i] = words[i - 16] + (Rotate(early, 7) ^ Rotate(early, 18) ^ early >> 3) + words[i - 7] +
               (Rotate(late, 17) ^ Rotate(late, 19) ^ late >> 10);
  }
  auto [a, b, c, d, e, f, g, h] = state_;
  for (size_t i = 0; i < 64; ++i) {
    const uint32_t one =
        h + (Rotate(e, 6) ^ Rotate(e, 11) ^ Rotate(e, 25)) + ((e & f) ^ (~e & g)) + kRound[i] + words[i];
    const uint32_t two = (Rotate(a, 2) ^ Rotate(a, 13) ^ Rotate(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + one;
    d = c, c = b, b = a, a = one + two;
  }
  const uint32_t after[] = {a, b, c, d, e, f, g, h};
  for (size_t i = 0; i < state_.size(); ++i) state_[i] += after[i];
}

void Sha256::Update(const void* data, size_t bytes) {
  const auto* next = static_cast<const uint8_t*>(data);
  while (bytes > 0) {
    const size_t waiting = static_cast<size_t>(bytes_ % kBlock);
    if (waiting == 0 && bytes >= kBlock) {
      Compress(next);
      next += kBlock, bytes -= kBlock, bytes_ += kBlock;
      continue;
    }
    const size_t taken = std::min(bytes, kBlock - waiting);
    std::copy_n(next, taken, block_.begin() + static_cast<std::ptrdiff_t>(waiting));
    next += taken, bytes -= taken, bytes_ += taken;
    if (bytes_ % kBlock == 0) Compress(block_.data());
  }
}

Digest Sha256::Finish() {
  const uint64_t bits = bytes_ * 8;
  const uint8_t one = 0x80, zero = 0;
  Update(&one, 1);
  while (bytes_ % kBlock != kBlock - 8) Update(&zero, 1);
  uint8_t length[8];
  PutBigEndian(bits, sizeof length, length);
  Update(length, sizeof length);
  Digest digest;
  for (size_t i = 0; i < state_.size(); ++i) PutBigEndian(state_[i], 4, digest.data() + 4 * i);
  return digest;
}

HmacKey::HmacKey(const void* key, size_t bytes) {
  std::array<uint8_t, 64> block{};
  if (bytes > block.size()) {
    Sha256 hash;
    hash.Update(key, bytes);
    const Digest digest = hash.Finish();
    std::copy(digest.begin(), digest.end(), block.begin());
  } else if (bytes > 0) {
    std::copy_n(static_cast<const uint8_t*>(key), bytes, block.begin());
  }
  for (uint8_t& byte : block) byte ^= 0x36;
  inner_.Update(block.data(), block.size());
  for (uint8_t& byte : block) byte ^= 0x36 ^ 0x5c;
  outer_.Update(block.data(), block.size());
  Wipe(block.data(), block.size());
}

HmacKey::~HmacKey() {
  Wipe(&inner_, sizeof inner_);
  Wipe(&outer_, sizeof outer_);
}

Digest HmacKey::Finish(Sha256* text) const {
  const Digest inside = text->Finish();
  Sha256 outside = outer_;
  outside.Update(inside.data(), inside.size());
  return outside.Finish();
}

Digest HmacKey::Of(const std::string& text) const {
  Sha256 hash = Begin();
  hash.Update(text.data(), text.size());
  return Finish(&hash);
}

bool EqualInConstantTime(const void* one, const void* other, size_t bytes) {
  const auto *left = static_cast<const uint8_t*>(one), *right = static_cast<const uint8_t*>(other);
  volatile uint8_t difference = 0;
  for (size_t i = 0; i < bytes; ++i) difference = static_cast<uint8_t>(difference | (left[i] ^ right[i]));
  return difference == 0;
}

void Wipe(void* memory, size_t bytes) { explicit_bzero(memory, bytes); }

}  // namespace ringtrain
