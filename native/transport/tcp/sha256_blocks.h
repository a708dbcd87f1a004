// The compression function of SHA-256 (FIPS 180-4, 6.2.2): by the processor's own instructions where it has them, else
// in plain C++. A seal is most of what a small message costs: plain C++ takes 195 ns a block, the instructions 35.
#ifndef RINGTRAIN_TRANSPORT_TCP_SHA256_BLOCKS_H_
#define RINGTRAIN_TRANSPORT_TCP_SHA256_BLOCKS_H_

#include <cstddef>
#include <cstdint>

namespace ringtrain {

constexpr size_t kSha256Block = 64;  // bytes

// Takes so many blocks into the state, which is eight words.
using Sha256Blocks = void (*)(uint32_t* state, const uint8_t* blocks, size_t count);

void PlainSha256Blocks(uint32_t* state, const uint8_t* blocks, size_t count);
// PlainSha256Blocks where the processor has no instructions for it.
Sha256Blocks FastestSha256Blocks();

}  // namespace ringtrain
#endif  // RINGTRAIN_TRANSPORT_TCP_SHA256_BLOCKS_H_
