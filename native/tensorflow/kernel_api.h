// TensorFlow's C API for kernels, found in the framework library that `import tensorflow` has loaded: no header of
// TensorFlow, nothing linked. Everything else in this folder calls it as `tf().TF_Name(...)`.
#ifndef RINGTRAIN_TENSORFLOW_KERNEL_API_H_
#define RINGTRAIN_TENSORFLOW_KERNEL_API_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace ringtrain::tensorflow {

struct TF_Status;
struct TF_Tensor;
struct TF_OpDefinitionBuilder;
struct TF_ShapeInferenceContext;
struct TF_ShapeHandle;
struct TF_KernelBuilder;
struct TF_OpKernelConstruction;
struct TF_OpKernelContext;
struct TF_AsyncOpKernelDoneCallback;

enum TF_DataType : int32_t {
  TF_FLOAT = 1,
  TF_DOUBLE = 2,
  TF_INT32 = 3,
  TF_UINT8 = 4,
  TF_INT16 = 5,
  TF_INT8 = 6,
  TF_COMPLEX64 = 8,
  TF_INT64 = 9,
  TF_BOOL = 10,
  TF_BFLOAT16 = 14,
  TF_UINT16 = 17,
  TF_COMPLEX128 = 18,
  TF_HALF = 19,
  TF_UINT32 = 22,
  TF_UINT64 = 23,
  TF_FLOAT8_E5M2 = 24,
  TF_FLOAT8_E4M3FN = 25,
};

enum TF_Code : int32_t {
  TF_OK = 0,
  TF_UNKNOWN = 2,
  TF_INVALID_ARGUMENT = 3,
  TF_DEADLINE_EXCEEDED = 4,
  TF_RESOURCE_EXHAUSTED = 8,
  TF_FAILED_PRECONDITION = 9,
  TF_UNIMPLEMENTED = 12,
  TF_INTERNAL = 13,
};

struct KernelApi {
#define RT_TF(result, name, parameters) result(*name) parameters;
#include "tensorflow/kernel_api.def"
#undef RT_TF
  std::string missing;  // a function that the library lacks, or why there is no library; empty if all is there
};

// Resolved at the first call.
const KernelApi& tf();

struct DeleteStatus {
  void operator()(TF_Status* status) const { tf().TF_DeleteStatus(status); }
};
struct DeleteTensor {
  void operator()(TF_Tensor* tensor) const { tf().TF_DeleteTensor(tensor); }
};
struct DeleteShape {
  void operator()(TF_ShapeHandle* shape) const { tf().TF_DeleteShapeHandle(shape); }
};
using StatusPointer = std::unique_ptr<TF_Status, DeleteStatus>;
using TensorPointer = std::unique_ptr<TF_Tensor, DeleteTensor>;
using ShapePointer = std::unique_ptr<TF_ShapeHandle, DeleteShape>;

inline StatusPointer NewStatus() { return StatusPointer(tf().TF_NewStatus()); }
inline bool Ok(const StatusPointer& status) { return tf().TF_GetCode(status.get()) == TF_OK; }

}  // namespace ringtrain::tensorflow
#endif  // RINGTRAIN_TENSORFLOW_KERNEL_API_H_
