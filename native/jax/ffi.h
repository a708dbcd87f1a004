// XLA's interface for foreign functions (xla/ffi/api/c_api.h), as far as we use it, written out by hand: no header of
// JAX is needed to build, and one binary serves all releases. Layouts are those of version 0.1, to which later ones
// only add; each struct says its own size, so that both sides know how much of it the other one knows.
#ifndef RINGTRAIN_JAX_FFI_H_
#define RINGTRAIN_JAX_FFI_H_

#include <cstddef>
#include <cstdint>

namespace ringtrain::jax {

constexpr int kApiMajor = 0;
constexpr int kApiMinor =
    1;  // the oldest; runtimes from 0.8.1 on take it and all up to their own, older ones only this

enum class Code : int32_t {  // XLA_FFI_Error_Code: those of absl::Status
  kOk = 0,
  kInvalidArgument = 3,
  kDeadlineExceeded = 4,
  kFailedPrecondition = 9,
  kAborted = 10,
  kUnimplemented = 12,
  kInternal = 13,
};

enum class Type : int32_t {  // XLA_FFI_DataType
  kPred = 1,
  kS8 = 2,
  kS16 = 3,
  kS32 = 4,
  kS64 = 5,
  kU8 = 6,
  kU16 = 7,
  kU32 = 8,
  kU64 = 9,
  kF16 = 10,
  kF32 = 11,
  kF64 = 12,
  kC64 = 15,
  kBF16 = 16,
  kC128 = 18,
  kF8E5M2 = 19,
  kF8E4M3FN = 20,
  kF8E5M2FNUZ = 24,
  kF8E4M3FNUZ = 25,
  kF8E8M0FNU = 33,
};

enum class AttributeType : int32_t { kArray = 1, kDictionary = 2, kScalar = 3, kString = 4 };
enum class Stage : int32_t { kInstantiate = 0, kPrepare = 1, kInitialize = 2, kExecute = 3 };

struct Error;             // opaque
struct Future;            // opaque
struct ExecutionContext;  // opaque

constexpr int32_t kMetadataExtension = 1;
struct Extension {
  size_t struct_size;
  int32_t type;
  Extension* next;
};

struct ApiVersion {
  size_t struct_size;
  Extension* extensions;
  int major;
  int minor;
};

// With this extension a call asks what the handler is, and executes nothing.
struct Metadata {
  size_t struct_size;
  ApiVersion api_version;
  uint32_t traits;
};
struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

struct Buffer {
  size_t struct_size;
  Extension* extensions;
  Type dtype;
  void* data;
  int64_t rank;
  int64_t* dimensions;
};

struct Span {
  const char* data;
  size_t size;
};
struct Scalar {
  Type dtype;
  void* value;
};

struct Arguments {  // also results
  size_t struct_size;
  Extension* extensions;
  int64_t count;
  int32_t* types;  // buffers, all of them
  void** buffers;
};
struct Attributes {
  size_t struct_size;
  Extension* extensions;
  int64_t count;
  AttributeType* types;
  Span** names;
  void** values;  // Scalar* or Span*, by type
};

struct ErrorCreate {
  size_t struct_size;
  Extension* extensions;
  const char* message;
  Code code;
};
struct FutureCreate {
  size_t struct_size;
  Extension* extensions;
  Future* future;  // out
};
struct FutureSetAvailable {
  size_t struct_size;
  Extension* extensions;
  Future* future;
};
struct FutureSetError {
  size_t struct_size;
  Extension* extensions;
  Future* future;
  Error* error;  // given away
};

struct Api {
  size_t struct_size;
  Extension* extensions;
  ApiVersion version;
  const void* internal;
  Error* (*error_create)(ErrorCreate*);
  void* other[12];  // Error_GetMessage to ThreadPool_NumThreads
  Error* (*future_create)(FutureCreate*);
  Error* (*future_set_available)(FutureSetAvailable*);
  Error* (*future_set_error)(FutureSetError*);
};

struct CallFrame {
  size_t struct_size;
  Extension* extensions;
  const Api* api;
  ExecutionContext* context;
  Stage stage;
  Arguments arguments;
  Arguments results;
  Attributes attributes;
  Future* future;  // out: arguments, results and attributes stay alive until it is completed
};

// Whether a call only asks what the handler is, and has been answered.
inline bool AnsweredMetadata(CallFrame* frame) {
  for (Extension* extension = frame->extensions; extension != nullptr; extension = extension->next) {
    if (extension->type != kMetadataExtension) continue;
    Metadata* metadata = reinterpret_cast<MetadataExtension*>(extension)->metadata;
    metadata->api_version.major = kApiMajor;
    metadata->api_version.minor = kApiMinor;
    return true;
  }
  return false;
}

}  // namespace ringtrain::jax
#endif  // RINGTRAIN_JAX_FFI_H_
