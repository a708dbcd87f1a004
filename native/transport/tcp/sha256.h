// SHA-256 (FIPS 180-4) and HMAC-SHA-256 (RFC 2104): what the TCP wire proves and seals with. Our own, since the library
// links nothing.
#ifndef RINGTRAIN_TRANSPORT_TCP_SHA256_H_
#define RINGTRAIN_TRANSPORT_TCP_SHA256_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "transport/tcp/sha256_blocks.h"

namespace ringtrain {

using Digest = std::array<uint8_t, 32>;

class Sha256 {
 public:
  void Update(const void* data, size_t bytes);
  // The digest of everything so far; nothing may follow.
  Digest Finish();

 private:
  std::array<uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<uint8_t, kSha256Block> block_{};  // its first bytes_ % kSha256Block bytes are waiting
  uint64_t bytes_ = 0;
};

// A key, ready for many texts: the two blocks that depend on it alone are hashed once.
class HmacKey {
 public:
  HmacKey() : HmacKey(nullptr, 0) {}
  HmacKey(const void* key, size_t bytes);
  explicit HmacKey(const Digest& key) : HmacKey(key.data(), key.size()) {}
  // The key does not stay in memory that is given back.
  ~HmacKey();
  HmacKey(const HmacKey&) = default;
  HmacKey& operator=(const HmacKey&) = default;

  // What a text begins with. Update it, then give it to Finish.
  Sha256 Begin() const { return inner_; }
  Digest Finish(Sha256* text) const;
  Digest Of(const std::string& text) const;

 private:
  Sha256 inner_, outer_;
};

// Takes the same time wherever the first difference is.
bool EqualInConstantTime(const void* one, const void* other, size_t bytes);
// Overwrites memory with zeros; no compiler leaves it out.
void Wipe(void* memory, size_t bytes);

}  // namespace ringtrain
#endif  // RINGTRAIN_TRANSPORT_TCP_SHA256_H_
