// Digest: 64 bits that tell memory apart, at the speed of reading it: for comparing what ranks hold. Not for secrets.
#ifndef RINGTRAIN_BASE_DIGEST_H_
#define RINGTRAIN_BASE_DIGEST_H_

#include <cstddef>
#include <cstdint>

namespace ringtrain {

// Of every byte and its place, and of `seed`; the same on every machine whose integers are laid out alike.
uint64_t DigestOf(const void* memory, size_t bytes, uint64_t seed);

}  // namespace ringtrain
#endif  // RINGTRAIN_BASE_DIGEST_H_
