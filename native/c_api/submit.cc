// The C ABI of operations: what is submitted, how it is waited for, its results, and memory on GPUs.
#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "base/digest.h"
#include "c_api/context.h"
#include "c_api/translate.h"
#include "include/ringtrain.h"

using ringtrain::Context;
using ringtrain::Guard;
using ringtrain::Handle;
using ringtrain::Report;
using ringtrain::Status;
using ringtrain::StatusCode;
using ringtrain::Submission;
using ringtrain::TextOf;

struct rt_handle {
  std::shared_ptr<Context> context;  // a waiter may drive it
  std::shared_ptr<Handle> handle;
};

namespace {

std::string DeviceText(int device) { return device < 0 ? "the host" : "cuda:" + std::to_string(device); }

template <typename From, typename To>
void Take(From from, To* to) {
  *to = static_cast<To>(from);
}
void Take(const int64_t* own, int64_t* to) {
  if (own != nullptr) *to = *own;
}

Status MakeSubmission(const rt_request& from, Submission* submission) {
  ringtrain::Request& request = submission->request;
  submission->process_set = from.process_set;
  submission->allocate = from.allocate;
  submission->done = from.done;
  submission->callback_context = from.callback_context;
  request.name = TextOf(from.name);
  request.operation = static_cast<ringtrain::Operation>(from.operation);
  if (ringtrain::Find(request.operation) == nullptr)
    return Status::InvalidArgument("operation " + std::to_string(from.operation) + " does not exist.");
#define RT_ATTRIBUTE(name, kind, initial, scope, label, advice) Take(from.name, &request.name);
#include "tables/attributes.def"
#undef RT_ATTRIBUTE
  request.cacheable = from.cacheable != 0;
  request.splits.assign(from.splits, from.splits + from.split_count);
  request.tensors.reserve(from.tensor_count);
  submission->inputs.reserve(from.tensor_count);
  submission->outputs.reserve(from.tensor_count);
  submission->room.reserve(from.tensor_count);
  for (int32_t index = 0; index < from.tensor_count; ++index) {
    const rt_tensor& tensor = from.tensors[index];
    const auto dtype = static_cast<ringtrain::DType>(tensor.dtype);
    if (ringtrain::Find(dtype) == nullptr)
      return Status::InvalidArgument(request.Subject() + ": dtype " + std::to_string(tensor.dtype) +
                                     " does not exist.");
    request.tensors.push_back({dtype, {tensor.shape, tensor.shape + tensor.ndim}});
    if (index > 0 && tensor.device != request.device)
      return Status::InvalidArgument(
          request.Subject() + ": all tensors of a group must be on one device, but they are on " +
          DeviceText(request.device) + " and " + DeviceText(tensor.device) + ". Submit a group for each.");
    request.device = tensor.device;
    const auto stream = static_cast<ringtrain::CUstream>(tensor.stream);
    std::vector<ringtrain::CUstream>& streams = submission->streams;
    if (tensor.device >= 0 && std::find(streams.begin(), streams.end(), stream) == streams.end())
      streams.push_back(stream);
    submission->inputs.push_back(tensor.data);
    submission->outputs.push_back(tensor.output);
    submission->room.push_back(static_cast<size_t>(tensor.output_bytes));
  }
  return {};
}

template <typename Field>
Field FieldOf(uintptr_t object, int32_t offset) {
  return *reinterpret_cast<const Field*>(object + static_cast<uintptr_t>(offset));
}

bool DescribeBy(const rt_layout& layout, uintptr_t object, rt_tensor* tensor) {
  if ((FieldOf<int32_t>(object, layout.flags) & layout.needs) != layout.needs) return false;
  const auto dtype = FieldOf<uintptr_t>(object, layout.dtype);
  const uintptr_t* const row = std::find(layout.dtypes, layout.dtypes + RT_MAX_DTYPES, dtype);
  if (dtype == 0 || row == layout.dtypes + RT_MAX_DTYPES) return false;
  *tensor = {};
  tensor->data = FieldOf<const void*>(object, layout.data);
  tensor->dtype = static_cast<int32_t>(row - layout.dtypes);
  tensor->device = -1;
  tensor->ndim = FieldOf<int32_t>(object, layout.ndim);
  tensor->shape = FieldOf<const int64_t*>(object, layout.shape);
  return true;
}

// Why the caller refuses what it submits; ok if it does not.
Status RefusalIn(const rt_request& request) {
  if (request.refusal == nullptr || *request.refusal == 0) return {};
  const auto code = static_cast<StatusCode>(request.refusal_status);
  const bool is_one = code == StatusCode::kMismatch || code == StatusCode::kUnsupported;
  return {is_one ? code : StatusCode::kInvalidArgument, request.refusal};
}

}  // namespace

int32_t rt_describe(const rt_layout* layout, const uintptr_t* inputs, const uintptr_t* outputs, int32_t count,
                    rt_tensor* tensors) {
  for (int32_t index = 0; index < count; ++index) {
    if (!DescribeBy(*layout, inputs[index], &tensors[index])) return index;
    tensors[index].output = FieldOf<void*>(outputs[index], layout->data);
  }
  return count;
}

void rt_place(rt_tensor* tensors, int32_t count, const void* const* data, void* const* outputs) {
  for (int32_t index = 0; index < count; ++index) {
    tensors[index].data = data[index];
    tensors[index].output = outputs[index];
  }
}

int32_t rt_submit(rt_context* context, const rt_request* request, rt_handle** handle, char** error) {
  Status status = Guard([&]() -> Status {
    auto submission = std::make_shared<Submission>();
    RT_TRY(MakeSubmission(*request, submission.get()));
    std::unique_ptr<rt_handle> made(new rt_handle{context->context, submission->handle});
    RT_TRY(context->context->Submit(std::move(submission), RefusalIn(*request), request->caller_waits != 0));
    *handle = made.release();
    return {};
  });
  return Report(status, error);
}

int32_t rt_wait(rt_handle* handle, double timeout_seconds, char** error) {
  const Status waited = Guard([&] {
    handle->context->Wait(*handle->handle, ringtrain::DeadlineAfter(timeout_seconds));
    return Status();
  });
  if (!waited.ok()) return Report(waited, error);
  if (!handle->handle->done()) return static_cast<int32_t>(StatusCode::kPending);
  return Report(handle->handle->status(), error);
}

int32_t rt_stream_wait(rt_handle* handle, void* stream, char** error) {
  return Report(Guard([&] { return ringtrain::HoldBack(*handle->handle, static_cast<ringtrain::CUstream>(stream)); }),
                error);
}

int32_t rt_poll(rt_handle* handle) {
  return static_cast<int32_t>(handle->handle->finished() ? handle->handle->status().code() : StatusCode::kPending);
}

int32_t rt_output(rt_handle* handle, int32_t tensor, void** data, int32_t* ndim, int64_t* shape, char** error) {
  return Report(
      Guard([&]() -> Status {
        Handle& from = *handle->handle;
        if (!from.done() || tensor < 0 || static_cast<size_t>(tensor) >= from.outputs.size())
          return Status::InvalidArgument("output " + std::to_string(tensor) + " does not exist, or is not ready.");
        const Handle::Output& output = from.outputs[tensor];
        *data = output.data;
        *ndim = static_cast<int32_t>(output.shape.size());
        std::copy_n(output.shape.begin(), *ndim, shape);
        return {};
      }),
      error);
}

void* rt_take_output(rt_handle* handle, int32_t tensor) {
  Handle& from = *handle->handle;
  if (!from.done() || tensor < 0 || static_cast<size_t>(tensor) >= from.outputs.size() || !from.outputs[tensor].owned)
    return nullptr;
  from.outputs[tensor].owned = false;
  return from.outputs[tensor].data;
}

uint64_t rt_digest(const void* memory, size_t bytes, uint64_t seed) { return ringtrain::DigestOf(memory, bytes, seed); }

void rt_device_free(int32_t device, void* memory) { ringtrain::Device::Free(device, memory); }

int32_t rt_device_allocate(rt_context* context, int32_t device, size_t bytes, void** memory, char** error) {
  return Report(Guard([&] { return context->context->AllocateOn(device, bytes, memory); }), error);
}

int32_t rt_device_read(rt_context* context, int32_t device, void* stream, const void* from, size_t bytes, void* to,
                       char** error) {
  return Report(Guard([&] { return context->context->ReadFrom(device, stream, from, bytes, to); }), error);
}

int32_t rt_device_of(const char* cuda_lib, const void* memory) {
  return Or<int32_t>(-1, [&] { return ringtrain::Device::Of(TextOf(cuda_lib), memory); });
}

int32_t rt_received_splits(rt_handle* handle, int64_t* splits, int32_t capacity) {
  const std::vector<int64_t>& from = handle->handle->received_splits;
  std::copy_n(from.begin(), std::min<size_t>(from.size(), static_cast<size_t>(std::max(capacity, 0))), splits);
  return static_cast<int32_t>(from.size());
}

int32_t rt_result(rt_handle* handle) { return handle->handle->result; }

void rt_handle_free(rt_handle* handle) { delete handle; }

const rt_functions* rt_functions_for(int32_t abi_version) {
  static constexpr rt_functions kFunctions = {
      rt_submit,   rt_handle_free,       rt_free,     rt_received_splits, rt_result,
      rt_world_of, rt_process_set_ranks, rt_device_of};
  return abi_version == RT_ABI_VERSION ? &kFunctions : nullptr;
}
