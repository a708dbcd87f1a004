// Numbers of fixed size in what travels over a TCP connection: little-endian, wherever they lie.
#ifndef RINGTRAIN_TRANSPORT_TCP_LITTLE_ENDIAN_H_
#define RINGTRAIN_TRANSPORT_TCP_LITTLE_ENDIAN_H_

#include <cstddef>
#include <cstdint>

namespace ringtrain {

template <typename Number>
void PutNumber(Number value, void* to) {
  auto* bytes = static_cast<uint8_t*>(to);
  for (size_t i = 0; i < sizeof value; ++i) bytes[i] = static_cast<uint8_t>(value >> (8 * i));
}

template <typename Number>
Number GetNumber(const void* from) {
  const auto* bytes = static_cast<const uint8_t*>(from);
  Number value = 0;
  for (size_t i = sizeof value; i-- > 0;) value = static_cast<Number>(uint64_t{value} << 8 | bytes[i]);
  return value;
}

}  // namespace ringtrain
#endif  // RINGTRAIN_TRANSPORT_TCP_LITTLE_ENDIAN_H_
