// What a call carries beside its tensors: the attributes that ringtrain/jax/collective.py gave it, by name.
#ifndef RINGTRAIN_JAX_ATTRIBUTES_H_
#define RINGTRAIN_JAX_ATTRIBUTES_H_

#include <cstdint>
#include <string>

#include "jax/ffi.h"

namespace ringtrain::jax {

// Reads one after the other; the first that is missing, or of another type, is kept as `missing()`.
class AttributeReader {
 public:
  explicit AttributeReader(const Attributes& attributes) : attributes_(attributes) {}

  void Read(const char* name, int32_t* value) { ReadScalar(name, Type::kS32, value); }
  void Read(const char* name, int64_t* value) { ReadScalar(name, Type::kS64, value); }
  void Read(const char* name, double* value) { ReadScalar(name, Type::kF64, value); }
  void Read(const char* name, std::string* value) {
    if (const auto* bytes = static_cast<const Span*>(Find(name, AttributeType::kString)))
      value->assign(bytes->data, bytes->size);
    else
      Miss(name);
  }
  // What is a member's own is no attribute of a program that all members compile.
  void Read(const char*, const int64_t**) {}

  const std::string& missing() const { return missing_; }  // "" if all were there

 private:
  template <typename Value>
  void ReadScalar(const char* name, Type dtype, Value* value) {
    const auto* scalar = static_cast<const Scalar*>(Find(name, AttributeType::kScalar));
    if (scalar != nullptr && scalar->dtype == dtype)
      *value = *static_cast<const Value*>(scalar->value);
    else
      Miss(name);
  }
  const void* Find(const std::string& name, AttributeType type) const {
    for (int64_t index = 0; index < attributes_.count; ++index) {
      const Span& found = *attributes_.names[index];
      if (attributes_.types[index] == type && name == std::string(found.data, found.size))
        return attributes_.values[index];
    }
    return nullptr;
  }
  void Miss(const char* name) {
    if (missing_.empty()) missing_ = name;
  }

  const Attributes& attributes_;
  std::string missing_;
};

}  // namespace ringtrain::jax
#endif  // RINGTRAIN_JAX_ATTRIBUTES_H_
