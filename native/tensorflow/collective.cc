#include "tensorflow/collective.h"

#include <algorithm>
#include <new>
#include <utility>

#include "tensorflow/core_link.h"
#include "tensorflow/gpu_stream.h"

namespace ringtrain::tensorflow {
namespace {

// More than run side by side (parallel_iterations is 10 at first); names come again, so that the response cache knows
// them.
constexpr int64_t kIterations = 64;

struct DTypePair {
  TF_DataType tensorflow;
  DType core;
};
constexpr DTypePair kDTypes[] = {
    {TF_FLOAT, DType::kFloat32},
    {TF_DOUBLE, DType::kFloat64},
    {TF_HALF, DType::kFloat16},
    {TF_INT32, DType::kInt32},
    {TF_BFLOAT16, DType::kBFloat16},
    {TF_INT64, DType::kInt64},
    {TF_UINT8, DType::kUInt8},
    {TF_INT8, DType::kInt8},
    {TF_INT16, DType::kInt16},
    {TF_BOOL, DType::kBool},
    {TF_UINT16, DType::kUInt16},
    {TF_UINT32, DType::kUInt32},
    {TF_UINT64, DType::kUInt64},
    {TF_COMPLEX64, DType::kComplex64},
    {TF_COMPLEX128, DType::kComplex128},
    {TF_FLOAT8_E4M3FN, DType::kFloat8E4M3FN},
    {TF_FLOAT8_E5M2, DType::kFloat8E5M2},
};

// nullptr where the core has no such type, as of texts.
const DTypePair* FindDType(TF_DataType dtype) {
  for (const DTypePair& pair : kDTypes)
    if (pair.tensorflow == dtype) return &pair;
  return nullptr;
}

struct CodePair {
  StatusCode core;
  TF_Code tensorflow;
};
// Horovod's codes, which its programs catch. A lost peer must be none of ABORTED and UNAVAILABLE: a MonitoredSession
// takes these for a failure that a new session repairs, and would make one after the other in a world that has ended.
constexpr CodePair kCodes[] = {
    {StatusCode::kInvalidArgument, TF_INVALID_ARGUMENT},
    {StatusCode::kMismatch, TF_FAILED_PRECONDITION},
    {StatusCode::kUnsupported, TF_UNIMPLEMENTED},
    {StatusCode::kTimeout, TF_DEADLINE_EXCEEDED},
    {StatusCode::kPeerLost, TF_UNKNOWN},
    {StatusCode::kClosed, TF_UNKNOWN},
};

TF_Code CodeFor(int32_t status) {
  for (const CodePair& pair : kCodes)
    if (static_cast<int32_t>(pair.core) == status) return pair.tensorflow;
  return TF_INTERNAL;
}

void EndWithoutMemory(TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done) {
  StatusPointer status = NewStatus();
  tf().TF_SetStatus(status.get(), TF_RESOURCE_EXHAUSTED, "no memory left.");
  tf().TF_OpKernelContext_Failure(context, status.get());
  tf().TF_RunAsyncOpKernelDoneCallback(done);
}

bool IsEmpty(const rt_tensor& tensor) { return std::count(tensor.shape, tensor.shape + tensor.ndim, 0) > 0; }

}  // namespace

void Execution::Start(const Collective& collective, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done) {
  Execution* execution = nullptr;
  bool submitted = false;
  try {
    execution = new Execution(collective, context, done);
    submitted = execution->TakeInputs() && execution->Submit() == 0;
  } catch (const std::bad_alloc&) {
    if (execution == nullptr) return EndWithoutMemory(context, done);
    execution->FailForMemory();
  }
  if (!submitted) execution->parts_left_.store(1);  // nobody will call back
  execution->EndPart();
}

// TensorFlow hands out the address of a std::function on its caller's stack, which is gone once the kernel has
// returned; a copy keeps. The header does not say so: it is the one fact here that each release of TensorFlow must be
// tested for.
Execution::Execution(const Collective& collective, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done)
    : collective_(collective), context_(context), done_(*reinterpret_cast<DoneCallback*>(done)) {}

// ---- inputs and outputs ----

bool Execution::TakeInputs() {
  int count = 0;
  switch (collective_.operation) {
    case Operation::kBarrier:
    case Operation::kJoin:
      break;
    case Operation::kAlltoall:
      if (!TakeSplits(1)) return false;
      count = 1;
      break;
    default:
      count = tf().TF_NumOutputs(context_);  // one for each tensor; gates come after the tensors and give nothing
  }
  for (int index = 0; index < count; ++index)
    if (!TakeInput(index)) return false;
  for (int index = 0; index < count; ++index) {
    tensors_[index].shape = shapes_[index].data();
    if (same_shape() && !ProvideOutput(index)) return false;
  }
  return true;
}

bool Execution::TakeInput(int index) {
  StatusPointer status = NewStatus();
  TF_Tensor* input = nullptr;
  tf().TF_GetInput(context_, index, &input, status.get());
  if (!Check(status)) return false;
  TensorPointer held(input);
  const TF_DataType dtype = tf().TF_TensorType(input);
  const DTypePair* pair = FindDType(dtype);
  if (pair == nullptr) {
    Fail(static_cast<int32_t>(StatusCode::kUnsupported),
         (Subject(collective_.name) + ": TensorFlow's dtype " + std::to_string(dtype) +
          " has no counterpart. Cast the tensor first.")
             .c_str());
    return false;
  }
  std::vector<int64_t> shape(static_cast<size_t>(tf().TF_NumDims(input)));
  for (size_t dimension = 0; dimension < shape.size(); ++dimension)
    shape[dimension] = tf().TF_Dim(input, static_cast<int>(dimension));
  rt_tensor tensor{};
  tensor.data = tf().TF_TensorData(input);
  tensor.dtype = static_cast<int32_t>(pair->core);
  tensor.device = -1;
  tensor.ndim = static_cast<int32_t>(shape.size());
  tensors_.push_back(tensor);
  shapes_.push_back(std::move(shape));
  dtypes_.push_back(dtype);
  // TensorFlow gives an input's memory away only while nobody else refers to it, so where it may, this reference has to
  // go first.
  if (!same_shape()) held_.push_back(std::move(held));
  return true;
}

bool Execution::ProvideOutput(int index) {
  StatusPointer status = NewStatus();
  rt_tensor& tensor = tensors_[index];
  int forwarded = -1;
  TensorPointer output(tf().TF_ForwardInputOrAllocateOutput(context_, &index, 1, index, tensor.shape, tensor.ndim,
                                                            &forwarded, status.get()));
  if (!Check(status)) return false;
  tensor.output = tf().TF_TensorData(output.get());
  held_.push_back(std::move(output));
  if (forwarded >= 0) return true;
  TF_Tensor* input = nullptr;
  tf().TF_GetInput(context_, index, &input, status.get());
  if (!Check(status)) return false;
  held_.emplace_back(input);
  return true;
}

bool Execution::TakeSplits(int index) {
  StatusPointer status = NewStatus();
  TF_Tensor* input = nullptr;
  tf().TF_GetInput(context_, index, &input, status.get());
  if (!Check(status)) return false;
  TensorPointer held(input);
  const auto* rows = static_cast<const int64_t*>(tf().TF_TensorData(input));
  const size_t count = tf().TF_TensorByteSize(input) / sizeof(int64_t);
  splits_.assign(rows, rows + count);
  return true;
}

void* Execution::Allocate(int32_t index, TF_DataType dtype, int32_t ndim, const int64_t* shape) {
  static char nothing;  // an empty tensor has no memory, and the core takes NULL for a failure
  StatusPointer status = NewStatus();
  size_t bytes = 1;
  for (const DTypePair& pair : kDTypes)
    if (pair.tensorflow == dtype) bytes = Bytes(pair.core);
  for (int32_t dimension = 0; dimension < ndim; ++dimension) bytes *= static_cast<size_t>(shape[dimension]);
  TensorPointer output(tf().TF_AllocateOutput(context_, index, dtype, shape, ndim, bytes, status.get()));
  if (!Check(status)) return nullptr;
  held_.push_back(std::move(output));
  void* data = tf().TF_TensorData(held_.back().get());
  return data == nullptr ? &nothing : data;
}

// ---- submission ----

// Says on which GPU the tensors are, and on which stream TensorFlow uses them. All that it has given to that stream so
// far comes before the operation: what writes the inputs, and what still uses the memory of the outputs, which
// TensorFlow hands on in the stream's order. What it will give to the stream comes after OnDone, when the GPU is done.
void Execution::PlaceOnGpu() {
  void* const stream = GpuStreamOf(context_);
  int32_t device = -1;
  bool empty = true;  // then there is no memory that somebody knows, and nothing to place
  for (const rt_tensor& tensor : tensors_) {
    if (IsEmpty(tensor)) continue;
    if (device < 0) device = CoreLink::Get().DeviceOf(tensor.data);
    empty = false;
  }
  if (!empty && (stream == nullptr || device < 0))
    refusal_ = Subject(collective_.name) +
               ": expected the stream and the memory of TensorFlow's GPU device to be CUDA's, but found others. "
               "Set RINGTRAIN_TENSORFLOW_GPU=host: then TensorFlow copies its tensors to the host and back.";
  for (rt_tensor& tensor : tensors_) {
    tensor.device = device;
    tensor.stream = stream;
  }
}

int32_t Execution::Submit() {
  CoreLink& link = CoreLink::Get();
  if (collective_.on_gpu) PlaceOnGpu();
  const std::string name = collective_.name.empty() ? link.NextName(collective_.slot, Text(collective_.operation),
                                                                    collective_.request.process_set)
                                                    : Name();
  rt_request request = collective_.request;
  request.name = name.c_str();
  request.operation = static_cast<int32_t>(collective_.operation);
  request.tensor_count = static_cast<int32_t>(tensors_.size());
  request.tensors = tensors_.data();
  request.split_count = static_cast<int32_t>(splits_.size());
  request.splits = splits_.data();
  request.refusal = refusal_.empty() ? nullptr : refusal_.c_str();
  request.cacheable = !collective_.name.empty();
  request.allocate = &Execution::OnAllocate;
  request.done = &Execution::OnDone;
  request.callback_context = this;
  return link.With(collective_.slot, [&](rt_context* context) -> int32_t {
    char* error = nullptr;
    if (context == nullptr) {
      code_ = TF_FAILED_PRECONDITION;
      error_ = Subject(name) + ": there is no world. Call init() first.";
      return static_cast<int32_t>(StatusCode::kClosed);
    }
    const int32_t status = link.functions().submit(context, &request, &handle_, &error);
    if (status != 0) {
      Fail(status, error);
      link.functions().free(error);
    }
    return status;
  });
}

void* Execution::OnAllocate(void* execution, int32_t tensor, int32_t ndim, const int64_t* shape) {
  auto* self = static_cast<Execution*>(execution);
  try {
    return self->Allocate(tensor, self->dtypes_[tensor], ndim, shape);
  } catch (const std::bad_alloc&) {
    self->FailForMemory();
    return nullptr;
  }
}

void Execution::OnDone(void* execution, int32_t status, const char* error) {
  auto* self = static_cast<Execution*>(execution);
  if (status != 0) self->Fail(status, error);
  self->EndPart();
}

// ---- the end ----

// The submission returns and the operation ends in either order; the later of the two finishes.
void Execution::EndPart() {
  if (parts_left_.fetch_sub(1, std::memory_order_acq_rel) == 1) Finish();
}

void Execution::Finish() {
  try {
    if (code_ == TF_OK && collective_.operation == Operation::kAlltoall) SetReceivedSplits();
    if (code_ == TF_OK && collective_.operation == Operation::kJoin) SetResult();
  } catch (const std::bad_alloc&) {
    FailForMemory();
  }
  if (handle_ != nullptr) CoreLink::Get().functions().handle_free(handle_);
  if (code_ != TF_OK) {
    StatusPointer status = NewStatus();
    tf().TF_SetStatus(status.get(), code_, error_.c_str());
    tf().TF_OpKernelContext_Failure(context_, status.get());
  }
  DoneCallback done = std::move(done_);
  delete this;  // lets go of the tensors: their next user may want the memory
  tf().TF_RunAsyncOpKernelDoneCallback(reinterpret_cast<TF_AsyncOpKernelDoneCallback*>(&done));
}

bool Execution::SetReceivedSplits() {
  const rt_functions& core = CoreLink::Get().functions();
  const int64_t members = core.received_splits(handle_, nullptr, 0);
  void* data = Allocate(1, TF_INT64, 1, &members);
  if (data == nullptr) return false;
  core.received_splits(handle_, static_cast<int64_t*>(data), static_cast<int32_t>(members));
  return true;
}

bool Execution::SetResult() {
  void* data = Allocate(0, TF_INT32, 0, nullptr);
  if (data == nullptr) return false;
  *static_cast<int32_t*>(data) = CoreLink::Get().functions().result(handle_);
  return true;
}

// TensorFlow starts a later iteration of such a loop before an earlier one has ended, on each rank in an order of its
// own.
std::string Execution::Name() const {
  const int64_t iteration = collective_.by_iteration ? tf().TF_GetIterId(context_) % kIterations : 0;
  return iteration == 0 ? collective_.name : collective_.name + ".iteration." + std::to_string(iteration);
}

std::string Execution::Subject(const std::string& name) const {
  return std::string(Text(collective_.operation)) + " '" + name + "'";
}

// The first failure counts.
void Execution::Fail(int32_t status, const char* error) {
  if (code_ != TF_OK) return;
  code_ = CodeFor(status);
  try {
    error_ = error == nullptr ? "" : error;
  } catch (const std::bad_alloc&) {
    FailForMemory();
  }
}

// Unless it has failed before. The text needs no memory.
void Execution::FailForMemory() {
  if (code_ == TF_OK) code_ = TF_RESOURCE_EXHAUSTED;
  if (error_.empty()) error_ = "no memory left.";
}

bool Execution::Check(const StatusPointer& status) {
  if (Ok(status)) return true;
  if (code_ == TF_OK) {
    code_ = tf().TF_GetCode(status.get());
    error_ = tf().TF_Message(status.get());
  }
  return false;
}

}  // namespace ringtrain::tensorflow
