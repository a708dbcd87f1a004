// The C ABI: translation only. Exceptions (out of memory, mostly) end here as statuses.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <new>

#include "base/alarm.h"
#include "core/context.h"
#include "core/version.h"
#include "device/nccl.h"
#include "include/ringtrain.h"
#include "kernels/reduce.h"
#include "transport/in_process.h"

using ringtrain::Context;
using ringtrain::Handle;
using ringtrain::Hub;
using ringtrain::Status;
using ringtrain::StatusCode;
using ringtrain::Submission;

struct rt_context {
  std::shared_ptr<Context> context;
};
struct rt_hub {
  std::shared_ptr<Hub> hub;
};
struct rt_alarm : ringtrain::Alarm {
  using Alarm::Alarm;
};
struct rt_handle {
  std::shared_ptr<Context> context;  // a waiter may drive it
  std::shared_ptr<Handle> handle;
};

#if defined(__clang__)
#define RT_COMPILER __VERSION__
#else
#define RT_COMPILER "GCC " __VERSION__
#endif

namespace {

char* CopyText(const std::string& text) { return strdup(text.c_str()); }

int32_t Report(const Status& status, char** error) {
  if (!status.ok() && error != nullptr) *error = CopyText(status.message());
  return static_cast<int32_t>(status.code());
}

template <typename Body>
Status Guard(Body body) {
  try {
    return body();
  } catch (const std::exception& exception) {
    return Status::Internal(exception.what());
  }
}

// Hands a context out once `open(&it)` has succeeded.
template <typename Opener>
Status Open(Opener open, rt_context** context) {
  return Guard([&]() -> Status {
    std::unique_ptr<rt_context> opened(new rt_context);
    RT_TRY(open(&opened->context));
    *context = opened.release();
    return {};
  });
}

std::string TextOf(const char* text) { return text == nullptr ? "" : text; }

std::string DeviceText(int device) { return device < 0 ? "the host" : "cuda:" + std::to_string(device); }

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
  request.reduction = static_cast<ringtrain::Reduction>(from.reduction);
  request.prescale = from.prescale;
  request.postscale = from.postscale;
  if (from.weight != nullptr) request.weight = *from.weight;
  request.compression = static_cast<ringtrain::Compression>(from.compression);
  request.root = from.root;
  request.cacheable = from.cacheable != 0;
  request.splits.assign(from.splits, from.splits + from.split_count);
  for (int32_t index = 0; index < from.tensor_count; ++index) {
    const rt_tensor& tensor = from.tensors[index];
    const auto dtype = static_cast<ringtrain::DType>(tensor.dtype);
    if (ringtrain::Find(dtype) == nullptr)
      return Status::InvalidArgument(request.Subject() + ": dtype " + std::to_string(tensor.dtype) + " does not exist.");
    request.tensors.push_back({dtype, {tensor.shape, tensor.shape + tensor.ndim}});
    if (index > 0 && tensor.device != request.device)
      return Status::InvalidArgument(request.Subject() + ": all tensors of a group must be on one device, but they are on " +
                                     DeviceText(request.device) + " and " + DeviceText(tensor.device) + ". Submit a group for each.");
    request.device = tensor.device;
    const auto stream = static_cast<ringtrain::CUstream>(tensor.stream);
    std::vector<ringtrain::CUstream>& streams = submission->streams;
    if (tensor.device >= 0 && std::find(streams.begin(), streams.end(), stream) == streams.end()) streams.push_back(stream);
    submission->inputs.push_back(tensor.data);
    submission->outputs.push_back(tensor.output);
  }
  return {};
}

}  // namespace

extern "C" {

int32_t rt_abi_version(void) { return 1; }

const char* rt_build_info(void) {
  static const std::string text = std::string("ringtrain ") + ringtrain::kVersion + ", built with " RT_COMPILER ", kernels " +
                                  ringtrain::KernelVariant();
  return text.c_str();
}

const char* rt_table(const char* name) { return ringtrain::TableText(name); }

void rt_free(void* memory) { std::free(memory); }

void rt_suggest_nccl(const char* path, const char* interfaces) { ringtrain::Nccl::Suggest(TextOf(path), TextOf(interfaces)); }

char* rt_gpu_libraries(const char* cuda_lib, const char* nccl_lib) {
  const ringtrain::Driver* driver = nullptr;
  const ringtrain::Nccl* nccl = nullptr;
  const Status has_driver = Guard([&] { return ringtrain::Driver::Open(TextOf(cuda_lib), &driver); });
  const Status has_nccl = Guard([&] { return ringtrain::Nccl::Open(TextOf(nccl_lib), &nccl); });
  const std::string cuda = driver != nullptr ? driver->VersionText() + "|" + driver->path : "|" + has_driver.message();
  return CopyText("cuda|" + cuda + "\nnccl|" + (nccl != nullptr ? nccl->VersionText() + "|" + nccl->path : "|" + has_nccl.message()));
}

int32_t rt_hub_open(int32_t size, const char* layout, rt_hub** hub, char** error) {
  Status status = Guard([&]() -> Status {
    if (size < 1) return Status::InvalidArgument("a world must have one rank at least, got " + std::to_string(size) + ".");
    std::vector<int> hosts;
    RT_TRY(ringtrain::ParseLayout(TextOf(layout), size, &hosts));
    *hub = new rt_hub{std::make_shared<Hub>(hosts)};
    return {};
  });
  return Report(status, error);
}

void rt_hub_close(rt_hub* hub) { delete hub; }

int32_t rt_open_in_process(rt_hub* hub, int32_t rank, const char* options, rt_context** context, char** error) {
  return Report(Open([&](auto* opened) { return Context::OpenInProcess(hub->hub, rank, TextOf(options), opened); }, context), error);
}

int32_t rt_open_mpi(const char* library, uintptr_t communicator, const char* options, rt_context** context, char** error) {
  return Report(Open([&](auto* opened) { return Context::OpenMpi(TextOf(library), communicator, TextOf(options), opened); }, context),
                error);
}

int32_t rt_close(rt_context* context, double seconds, char** error) {
  return Report(Guard([&] { return seconds < 0 ? context->context->Close() : context->context->Close(seconds); }), error);
}

void rt_context_free(rt_context* context) {
  if (context == nullptr) return;
  rt_close(context, -1, nullptr);
  delete context;
}

rt_alarm* rt_alarm_set(double seconds, const char* text) {
  rt_alarm* alarm = nullptr;
  Guard([&] {
    alarm = new rt_alarm{seconds, TextOf(text)};
    return Status();
  });
  return alarm;
}

void rt_alarm_cancel(rt_alarm* alarm) { delete alarm; }

void rt_abort(rt_context* context, const char* cause) { context->context->Abort(TextOf(cause)); }

void rt_ask_through(rt_context* context, int32_t pipe) { context->context->AskThrough(pipe); }

void rt_long_phase(rt_context* context, double seconds) { context->context->LongPhase(seconds); }

void rt_world_of(rt_context* context, rt_world* world) {
  const ringtrain::World& from = context->context->world();
  *world = {from.rank,        from.size,         from.local_rank(),       from.local_size(),
            from.cross_rank(), from.cross_size(), from.homogeneous() ? 1 : 0, from.epoch};
}

int32_t rt_process_set_ranks(rt_context* context, int32_t process_set, int32_t* ranks, int32_t capacity) {
  const std::vector<int> members = context->context->ProcessSetRanks(process_set);
  if (members.empty()) return -1;
  std::copy_n(members.begin(), std::min<size_t>(members.size(), static_cast<size_t>(std::max(capacity, 0))), ranks);
  return static_cast<int32_t>(members.size());
}

int32_t rt_counters(rt_context* context, int64_t* values, int32_t capacity) {
  for (int counter = 0; counter < std::min(capacity, ringtrain::kCounterCount); ++counter)
    values[counter] = context->context->counters().Get(counter);
  return ringtrain::kCounterCount;
}

char* rt_lateness(rt_context* context) {
  std::string text;
  for (const ringtrain::Late& late : context->context->lateness().All())
    text += std::to_string(late.rank) + "|" + std::to_string(late.times) + "|" + std::to_string(late.total) + "|" +
            std::to_string(late.longest) + "|" + late.longest_name + "\n";
  return CopyText(text);
}

char* rt_log_next(rt_context* context) {
  std::string line;
  return context->context->log().Next(&line) ? CopyText(line) : nullptr;
}

int32_t rt_timeline_start(rt_context* context, const char* path, char** error) {
  return Report(Guard([&] { return context->context->StartTimeline(TextOf(path)); }), error);
}

int32_t rt_timeline_stop(rt_context* context, char** error) {
  return Report(Guard([&] { return context->context->StopTimeline(); }), error);
}

int32_t rt_submit(rt_context* context, const rt_request* request, rt_handle** handle, char** error) {
  Status status = Guard([&]() -> Status {
    auto submission = std::make_shared<Submission>();
    RT_TRY(MakeSubmission(*request, submission.get()));
    std::unique_ptr<rt_handle> made(new rt_handle{context->context, submission->handle});
    RT_TRY(context->context->Submit(std::move(submission), TextOf(request->refusal), request->caller_waits != 0));
    *handle = made.release();
    return {};
  });
  return Report(status, error);
}

int32_t rt_wait(rt_handle* handle, double timeout_seconds, char** error) {
  handle->context->Wait(*handle->handle, ringtrain::DeadlineAfter(timeout_seconds));
  if (!handle->handle->done()) return static_cast<int32_t>(StatusCode::kPending);
  return Report(handle->handle->status(), error);
}

int32_t rt_stream_wait(rt_handle* handle, void* stream, char** error) {
  return Report(Guard([&] { return ringtrain::HoldBack(*handle->handle, static_cast<ringtrain::CUstream>(stream)); }), error);
}

int32_t rt_poll(rt_handle* handle) {
  return static_cast<int32_t>(handle->handle->finished() ? handle->handle->status().code() : StatusCode::kPending);
}

int32_t rt_output(rt_handle* handle, int32_t tensor, void** data, int32_t* ndim, int64_t* shape, char** error) {
  Handle& from = *handle->handle;
  if (!from.done() || tensor < 0 || static_cast<size_t>(tensor) >= from.outputs.size())
    return Report(Status::InvalidArgument("output " + std::to_string(tensor) + " does not exist, or is not ready."), error);
  const Handle::Output& output = from.outputs[tensor];
  *data = output.data;
  *ndim = static_cast<int32_t>(output.shape.size());
  std::copy_n(output.shape.begin(), *ndim, shape);
  return 0;
}

void* rt_take_output(rt_handle* handle, int32_t tensor) {
  Handle& from = *handle->handle;
  if (!from.done() || tensor < 0 || static_cast<size_t>(tensor) >= from.outputs.size() || !from.outputs[tensor].owned) return nullptr;
  from.outputs[tensor].owned = false;
  return from.outputs[tensor].data;
}

void rt_device_free(int32_t device, void* memory) { ringtrain::Device::Free(device, memory); }

int32_t rt_device_allocate(rt_context* context, int32_t device, size_t bytes, void** memory, char** error) {
  return Report(Guard([&] { return context->context->AllocateOn(device, bytes, memory); }), error);
}

int32_t rt_device_read(rt_context* context, int32_t device, void* stream, const void* from, size_t bytes, void* to, char** error) {
  return Report(Guard([&] { return context->context->ReadFrom(device, stream, from, bytes, to); }), error);
}

int32_t rt_device_of(const char* cuda_lib, const void* memory) { return ringtrain::Device::Of(TextOf(cuda_lib), memory); }

int32_t rt_received_splits(rt_handle* handle, int64_t* splits, int32_t capacity) {
  const std::vector<int64_t>& from = handle->handle->received_splits;
  std::copy_n(from.begin(), std::min<size_t>(from.size(), static_cast<size_t>(std::max(capacity, 0))), splits);
  return static_cast<int32_t>(from.size());
}

int32_t rt_result(rt_handle* handle) { return handle->handle->result; }

void rt_handle_free(rt_handle* handle) { delete handle; }

}  // extern "C"
