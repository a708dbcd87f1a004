#include "kernels/handover.h"

#include <cstdint>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace ringtrain {

void StreamingCopy(char* to, const char* from, size_t bytes) {
#if defined(__x86_64__)
  constexpr size_t kLine = 64;
  const size_t head = (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine;
  if (bytes >= head + kLine) {
    std::memcpy(to, from, head);
    to += head;
    from += head;
    bytes -= head;
    for (; bytes >= kLine; bytes -= kLine, to += kLine, from += kLine) {
      const auto* source = reinterpret_cast<const __m128i*>(from);
      auto* target = reinterpret_cast<__m128i*>(to);
      const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
      const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
      _mm_stream_si128(target, a);
      _mm_stream_si128(target + 1, b);
      _mm_stream_si128(target + 2, c);
      _mm_stream_si128(target + 3, d);
    }
    _mm_sfence();
  }
#endif
  std::memcpy(to, from, bytes);
}

}  // namespace ringtrain
