#include "transport/tcp/sha256.h"

#include <string.h>

#include <algorithm>

namespace ringtrain {
namespace {

void PutBigEndian(uint64_t value, size_t bytes, uint8_t* to) {
  for (size_t i = bytes; i-- > 0; value >>= 8) to[i] = static_cast<uint8_t>(value);
}

}  // namespace

void Sha256::Update(const void* data, size_t bytes) {
  const auto* next = static_cast<const uint8_t*>(data);
  const Sha256Blocks compress = FastestSha256Blocks();
  const size_t waiting = static_cast<size_t>(bytes_ % kSha256Block);
  bytes_ += bytes;
  if (waiting > 0) {
    const size_t taken = std::min(bytes, kSha256Block - waiting);
    std::copy_n(next, taken, block_.begin() + static_cast<std::ptrdiff_t>(waiting));
    next += taken, bytes -= taken;
    if (waiting + taken < kSha256Block) return;
    compress(state_.data(), block_.data(), 1);
  }
  const size_t whole = bytes / kSha256Block;
  compress(state_.data(), next, whole);
  std::copy_n(next + whole * kSha256Block, bytes % kSha256Block, block_.begin());
}

Digest Sha256::Finish() {
  constexpr size_t kLength = 8;  // bytes of the number of bits, which ends the last block
  std::array<uint8_t, kSha256Block + kLength> padding = {0x80};
  const size_t waiting = static_cast<size_t>(bytes_ % kSha256Block);
  const size_t zeros = (2 * kSha256Block - kLength - 1 - waiting) % kSha256Block;
  PutBigEndian(bytes_ * 8, kLength, padding.data() + 1 + zeros);
  Update(padding.data(), 1 + zeros + kLength);
  Digest digest;
  for (size_t i = 0; i < state_.size(); ++i) PutBigEndian(state_[i], 4, digest.data() + 4 * i);
  return digest;
}

HmacKey::HmacKey(const void* key, size_t bytes) {
  std::array<uint8_t, kSha256Block> block{};
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
