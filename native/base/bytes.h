// Encoder and decoder of frames: little-endian, variable-length integers, every read checked.
// A decoder never reads past its end and never allocates more than the frame could hold; what it cannot read makes it
// not ok().
#ifndef RINGTRAIN_BASE_BYTES_H_
#define RINGTRAIN_BASE_BYTES_H_

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace ringtrain {

class Encoder {
 public:
  void Byte(uint8_t value) { bytes_.push_back(static_cast<char>(value)); }
  void Unsigned(uint64_t value) {
    for (; value >= 0x80; value >>= 7) Byte(static_cast<uint8_t>(value) | 0x80);
    Byte(static_cast<uint8_t>(value));
  }
  void Signed(int64_t value) { Unsigned((static_cast<uint64_t>(value) << 1) ^ static_cast<uint64_t>(value >> 63)); }
  void Number(double value) { bytes_.append(reinterpret_cast<const char*>(&value), sizeof value); }
  void Text(const std::string& value) {
    Unsigned(value.size());
    bytes_ += value;
  }
  template <typename List = std::vector<int64_t>>
  void SignedList(const List& values) {
    Unsigned(values.size());
    for (int64_t value : values) Signed(value);
  }

  std::string Take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

class Decoder {
 public:
  Decoder(const char* data, size_t size) : next_(data), end_(data + size) {}
  explicit Decoder(const std::string& frame) : Decoder(frame.data(), frame.size()) {}

  bool ok() const { return ok_; }
  bool AtEnd() const { return next_ == end_; }
  void Refuse() {
    ok_ = false;
    next_ = end_;
  }

  uint8_t Byte() {
    if (next_ == end_) return Refuse(), 0;
    return static_cast<uint8_t>(*next_++);
  }
  // Refused above the maximum.
  uint64_t AtMost(uint64_t maximum) {
    const uint64_t value = Unsigned();
    if (value > maximum) return Refuse(), 0;
    return value;
  }
  bool Flag() { return AtMost(1) != 0; }
  uint64_t Unsigned() {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      uint8_t byte = Byte();
      value |= static_cast<uint64_t>(byte & 0x7f) << shift;
      if ((byte & 0x80) == 0) return value;
    }
    return Refuse(), 0;
  }
  int64_t Signed() {
    uint64_t value = Unsigned();
    return static_cast<int64_t>((value >> 1) ^ (~(value & 1) + 1));
  }
  int Int() {
    const int64_t value = Signed();
    if (value != static_cast<int>(value)) return Refuse(), 0;
    return static_cast<int>(value);
  }
  double Number() {
    double value = 0;
    if (static_cast<size_t>(end_ - next_) < sizeof value) return Refuse(), 0;
    std::memcpy(&value, next_, sizeof value);
    next_ += sizeof value;
    return value;
  }
  // The number of items to come; each takes a byte at least, so a larger number is a lie.
  size_t Count() {
    uint64_t count = Unsigned();
    if (count > static_cast<size_t>(end_ - next_)) return Refuse(), 0;
    return count;
  }
  std::string Text() {
    size_t size = Count();
    std::string value(next_, size);
    next_ += size;
    return value;
  }
  std::vector<int64_t> SignedList() {
    std::vector<int64_t> values(Count());
    for (int64_t& value : values) value = Signed();
    return values;
  }

 private:
  const char* next_;
  const char* end_;
  bool ok_ = true;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_BASE_BYTES_H_
