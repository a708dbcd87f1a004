// The codecs whose form on the wire is a dtype, and which compression has which codec.
#include "kernels/codec.h"

#include <cstring>

#include "kernels/convert.h"
#include "kernels/scaled_blocks.h"

namespace ringtrain {
namespace {

class Identity : public Codec {
 public:
  Identity() : Codec(Form()) {}

  bool identity() const override { return true; }
  bool PartialSums(DType dtype) const override { return dtype != DType::kFloat16 && dtype != DType::kBFloat16; }
  size_t WireBytes(DType dtype, size_t count) const override { return count * Bytes(dtype); }
  void Encode(DType dtype, char* wire, const void* elements, size_t count, Feedback) const override {
    std::memcpy(wire, elements, WireBytes(dtype, count));
  }
  void Decode(DType dtype, void* elements, const char* wire, size_t count, double) const override {
    std::memcpy(elements, wire, WireBytes(dtype, count));
  }
  void Reduce(DType dtype, Reduction reduction, char* wire, const void* const* sources, int source_count, size_t count,
              const Scaling& scaling, Feedback) const override {
    ringtrain::Reduce(dtype, reduction, wire, sources, source_count, count, scaling);
  }
};

// float16 or bfloat16, to which each element is rounded.
class Cast : public Codec {
 public:
  explicit Cast(DType wire) : Codec(Form()), wire_(wire) {}

  DType Wire(DType) const override { return wire_; }
  size_t WireBytes(DType, size_t count) const override { return count * Bytes(wire_); }
  void Encode(DType dtype, char* wire, const void* elements, size_t count, Feedback) const override {
    Convert(dtype, wire_, wire, elements, count);
  }
  void Decode(DType dtype, void* elements, const char* wire, size_t count, double factor) const override {
    Convert(wire_, dtype, elements, wire, count, factor);
  }
  void Reduce(DType, Reduction reduction, char* wire, const void* const* sources, int source_count, size_t count,
              const Scaling& scaling, Feedback) const override {
    ringtrain::Reduce(wire_, reduction, wire, sources, source_count, count, scaling);
  }

 private:
  const DType wire_;
};

const Codec& CodecOf(Compression compression, bool comes_again) {
  static const Cast float16(DType::kFloat16), bfloat16(DType::kBFloat16);
  static const ScaledBlocks<Int8Form> int8(true), plain_int8(false);
  static const ScaledBlocks<Int4Form> int4(true), plain_int4(false);
  switch (compression) {
    case Compression::kNone:
      break;
    case Compression::kFloat16:
      return float16;
    case Compression::kBFloat16:
      return bfloat16;
    case Compression::kInt8:
      return comes_again ? int8 : plain_int8;
    case Compression::kPlainInt8:
      return plain_int8;
    case Compression::kInt4:
      return comes_again ? int4 : plain_int4;
    case Compression::kPlainInt4:
      return plain_int4;
  }
  return IdentityCodec();
}

}  // namespace

const Codec& IdentityCodec() {
  static const Identity identity;
  return identity;
}

const Codec& CodecFor(Compression compression, DType dtype, size_t elements, bool comes_again) {
  if (dtype != DType::kFloat32 && dtype != DType::kFloat64) return IdentityCodec();
  const Codec& codec = CodecOf(compression, comes_again);
  return elements < codec.form().least ? IdentityCodec() : codec;
}

}  // namespace ringtrain
