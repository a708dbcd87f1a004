// The C ABI: translation only. Exceptions (out of memory, mostly) end here, as statuses or as what a function returns
// where there is no memory: whatever can allocate is within Guard or Or.
#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "base/alarm.h"
#include "base/digest.h"
#include "base/without_memory.h"
#include "device/nccl.h"
#include "include/ringtrain.h"
#include "kernels/level.h"
#include "run/context.h"
#include "transport/in_process.h"
#include "transport/mpi.h"
#include "transport/tcp.h"
#include "transport/tcp/sha256.h"
#include "world/version.h"

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
struct rt_listener {
  std::unique_ptr<ringtrain::TcpListener> listener;
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
    try {
      return body();
    } catch (const std::runtime_error& error) {
      return Status::Internal(error.what());
    }
  } catch (const std::exception&) {
    return Status::NoMemory();
  }
}

// The text that body() makes; nullptr where there is no memory for it.
template <typename Body>
char* TextBy(Body body) {
  return Or<char*>(nullptr, [&] { return CopyText(body()); });
}

std::string TextOf(const char* text) { return text == nullptr ? "" : text; }

// Hands a context out once its ranks have met by what `find(options, &rendezvous)` finds.
template <typename Find>
Status Open(const char* options_text, Find find, rt_context** context) {
  return Guard([&]() -> Status {
    ringtrain::Options options;
    RT_TRY(ringtrain::Options::Parse(TextOf(options_text), &options));
    std::unique_ptr<ringtrain::Rendezvous> rendezvous;
    RT_TRY(find(options, &rendezvous));
    std::unique_ptr<rt_context> opened(new rt_context);
    RT_TRY(Context::Open(*rendezvous, options, &opened->context));
    *context = opened.release();
    return {};
  });
}

ringtrain::TcpWorld WorldOverTcp(int rank, const std::string& peers, const uint8_t* secret, uint64_t epoch,
                                 const ringtrain::Options& options) {
  ringtrain::TcpWorld world;
  world.rank = rank;
  world.secret = secret;
  world.epoch = epoch;
  world.connect_seconds = options.start_timeout_seconds;
  // Silence is the protocol's to find, so that all ranks are told in the same words; the kernel comes after it.
  world.dead_after_seconds = 2 * options.dead_after_seconds;
  world.streams = static_cast<int>(options.tcp_streams);
  world.congestion = options.tcp_congestion;
  std::istringstream lines(peers);
  for (std::string line; std::getline(lines, line);) world.peers.push_back(line);
  return world;
}

// A name in a line of its own.
std::string OnOneLine(std::string name) {
  std::replace(name.begin(), name.end(), '\n', ' ');
  return name;
}

ringtrain::Residual& ResidualOf(rt_context* context, int32_t process_set, const char* name, int32_t place,
                                int64_t elements) {
  return *context->context->residuals().Of(process_set, TextOf(name), static_cast<size_t>(place),
                                           static_cast<size_t>(elements));
}

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

}  // namespace

extern "C" {

int32_t rt_abi_version(void) { return RT_ABI_VERSION; }

const char* rt_build_info(void) {
  static const std::string text = std::string("ringtrain ") + ringtrain::kVersion +
                                  ", built with " RT_COMPILER ", kernels " + ringtrain::KernelVariant();
  return text.c_str();
}

const char* rt_table(const char* name) { return ringtrain::TableText(name); }

void rt_free(void* memory) { ringtrain::Outputs().Free(memory); }  // a result's memory, or a text

void rt_trim() { ringtrain::Outputs().Trim(); }

void rt_suggest_nccl(const char* path, const char* interfaces) {
  Done([&] { ringtrain::Nccl::Suggest(TextOf(path), TextOf(interfaces)); });
}

char* rt_gpu_libraries(const char* cuda_lib, const char* nccl_lib) {
  const ringtrain::Driver* driver = nullptr;
  const ringtrain::Nccl* nccl = nullptr;
  const Status has_driver = Guard([&] { return ringtrain::Driver::Open(TextOf(cuda_lib), &driver); });
  const Status has_nccl = Guard([&] { return ringtrain::Nccl::Open(TextOf(nccl_lib), &nccl); });
  return TextBy([&] {
    const std::string cuda =
        driver != nullptr ? driver->VersionText() + "|" + driver->path : "|" + has_driver.message();
    return "cuda|" + cuda + "\nnccl|" +
           (nccl != nullptr ? nccl->VersionText() + "|" + nccl->path : "|" + has_nccl.message());
  });
}

int32_t rt_hub_open(int32_t size, const char* layout, rt_hub** hub, char** error) {
  Status status = Guard([&]() -> Status {
    if (size < 1)
      return Status::InvalidArgument("a world must have one rank at least, got " + std::to_string(size) + ".");
    std::vector<int> hosts;
    RT_TRY(ringtrain::ParseLayout(TextOf(layout), size, &hosts));
    *hub = new rt_hub{std::make_shared<Hub>(hosts)};
    return {};
  });
  return Report(status, error);
}

void rt_hub_close(rt_hub* hub) { delete hub; }

int32_t rt_open_in_process(rt_hub* hub, int32_t rank, const char* options, rt_context** context, char** error) {
  auto join = [&](const ringtrain::Options&, auto* rendezvous) { return Hub::Join(hub->hub, rank, rendezvous); };
  return Report(Open(options, join, context), error);
}

int32_t rt_open_mpi(const char* library, uintptr_t communicator, const char* options, rt_context** context,
                    char** error) {
  auto meet = [&](const ringtrain::Options& parsed, auto* rendezvous) {
    return ringtrain::OpenMpiRendezvous(TextOf(library), communicator, parsed.start_timeout_seconds, parsed.host_layout,
                                        rendezvous);
  };
  return Report(Open(options, meet, context), error);
}

int32_t rt_listen(const char* addresses, rt_listener** listener, char** error) {
  return Report(Guard([&]() -> Status {
                  std::unique_ptr<rt_listener> made(new rt_listener);
                  RT_TRY(ringtrain::TcpListener::Open(TextOf(addresses), &made->listener));
                  *listener = made.release();
                  return {};
                }),
                error);
}

char* rt_listener_addresses(rt_listener* listener) {
  return TextBy([&] { return listener->listener->addresses(); });
}

void rt_listener_close(rt_listener* listener) { delete listener; }

int32_t rt_open_tcp(rt_listener* listener, int32_t rank, const char* peers, uint8_t* secret, uint64_t epoch,
                    const char* options, rt_context** context, char** error) {
  auto meet = [&](const ringtrain::Options& parsed, auto* rendezvous) {
    return ringtrain::OpenTcpRendezvous(listener->listener.get(),
                                        WorldOverTcp(rank, TextOf(peers), secret, epoch, parsed), parsed.host_layout,
                                        rendezvous);
  };
  const Status status = Open(options, meet, context);
  ringtrain::Wipe(secret, RT_SECRET_BYTES);
  return Report(status, error);
}

int32_t rt_close(rt_context* context, double seconds, char** error) {
  return Report(Guard([&] { return seconds < 0 ? context->context->Close() : context->context->Close(seconds); }),
                error);
}

void rt_context_free(rt_context* context) {
  if (context == nullptr) return;
  rt_close(context, -1, nullptr);
  delete context;
  rt_trim();
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

void rt_abort(rt_context* context, const char* cause) {
  if (Done([&] { context->context->Abort(TextOf(cause)); }) == 0)
    Done([&] { context->context->Abort(""); });  // which needs none
}

int32_t rt_suspects(rt_context* context, int32_t why, int32_t* ranks, int32_t capacity) {
  return Or<int32_t>(-1, [&] {
    const ringtrain::Suspects suspects = context->context->suspects();
    const std::vector<int>& found = why == RT_SILENT    ? suspects.silent
                                    : why == RT_UNHEARD ? suspects.unheard
                                                        : suspects.missing;
    std::copy_n(found.begin(), std::min<size_t>(found.size(), static_cast<size_t>(std::max(capacity, 0))), ranks);
    return static_cast<int32_t>(found.size());
  });
}

void rt_ask_through(rt_context* context, int32_t pipe) { context->context->AskThrough(pipe); }

void rt_await_state_from(rt_context* context, int32_t first) { context->context->AwaitStateFrom(first); }

void rt_long_phase(rt_context* context, double seconds) { context->context->LongPhase(seconds); }

void rt_world_of(rt_context* context, rt_world* world) {
  const ringtrain::World& from = context->context->world();
  *world = {from.rank,         from.size,         from.local_rank(),          from.local_size(),
            from.cross_rank(), from.cross_size(), from.homogeneous() ? 1 : 0, from.site(),
            from.epoch};
}

int32_t rt_process_set_ranks(rt_context* context, int32_t process_set, int32_t* ranks, int32_t capacity) {
  return Or<int32_t>(-2, [&] {
    const std::vector<int> members = context->context->ProcessSetRanks(process_set);
    if (members.empty()) return -1;
    std::copy_n(members.begin(), std::min<size_t>(members.size(), static_cast<size_t>(std::max(capacity, 0))), ranks);
    return static_cast<int32_t>(members.size());
  });
}

int32_t rt_counters(rt_context* context, int64_t* values, int32_t capacity) {
  for (int counter = 0; counter < std::min(capacity, ringtrain::kCounterCount); ++counter)
    values[counter] = context->context->counters().Get(counter);
  return ringtrain::kCounterCount;
}

char* rt_lateness(rt_context* context) {
  return TextBy([&] {
    std::string text;
    for (const ringtrain::Late& late : context->context->lateness().All())
      text += std::to_string(late.rank) + "|" + std::to_string(late.times) + "|" + std::to_string(late.total) + "|" +
              std::to_string(late.longest) + "|" + OnOneLine(late.longest_name) + "\n";
    return text;
  });
}

char* rt_lines(rt_context* context) {
  return TextBy([&] { return context->context->Lines(); });
}

char* rt_traffic(rt_context* context) {
  return TextBy([&] {
    std::string lines;
    for (const ringtrain::Traffic& each : context->context->traffic().All())
      lines += std::string(ringtrain::Text(each.operation)) + "|" + std::to_string(each.size_class) + "|" +
               std::to_string(each.count) + "|" + std::to_string(each.bytes) + "|" + std::to_string(each.link_bytes) +
               "|" + std::to_string(each.time) + "|" + std::to_string(each.waiting) + "\n";
    return lines;
  });
}

int64_t rt_burst_bytes(rt_context*) { return ringtrain::kBurstBytes; }

char* rt_flight_record(rt_context* context) {
  return TextBy([&] { return context->context->FlightRecord(); });
}

int32_t rt_process_set_hosts(rt_context* context, int32_t process_set) {
  return Or<int32_t>(-1, [&] { return context->context->ProcessSetHosts(process_set); });
}

int32_t rt_residuals_keep(rt_context* context, int32_t process_set, const char* prefix) {
  return Done([&] { context->context->residuals().Keep(process_set, TextOf(prefix)); });
}

int32_t rt_residuals_take_back(rt_context* context, int32_t process_set, const char* prefix, int64_t after) {
  return Done([&] { context->context->residuals().TakeBack(process_set, TextOf(prefix), after); });
}

int64_t rt_residuals_turns(rt_context* context) { return context->context->residuals().turns(); }

int32_t rt_residuals_inherit(rt_context* context, rt_context* former) {
  return Done([&] { context->context->residuals().Inherit(former->context->residuals()); });
}

char* rt_residuals(rt_context* context, int32_t process_set, const char* prefix) {
  return TextBy([&] {
    std::string text;
    context->context->residuals().ForEach(process_set, TextOf(prefix), [&](const auto& key, const auto& residual) {
      const auto& [set, operation, place] = key;
      if (operation.find('\n') == std::string::npos)
        text += std::to_string(residual.elements()) + "|" + std::to_string(place) + "|" + operation + "\n";
    });
    return text;
  });
}

int32_t rt_residual_save(rt_context* context, int32_t process_set, const char* name, int32_t place, int64_t elements,
                         float* sent, float* finished) {
  return Or<int32_t>(
      -1, [&] { return ResidualOf(context, process_set, name, place, elements).Save(sent, finished) ? 1 : 0; });
}

int32_t rt_residual_load(rt_context* context, int32_t process_set, const char* name, int32_t place, int64_t elements,
                         const float* sent, const float* finished) {
  return Done([&] { ResidualOf(context, process_set, name, place, elements).Load(sent, finished); });
}

char* rt_log_next(rt_context* context) {
  std::string line;
  return context->context->log().Next(&line) ? CopyText(line) : nullptr;  // without an allocation of C++'s
}

int32_t rt_timeline_start(rt_context* context, const char* path, int32_t mark_cycles, char** error) {
  return Report(Guard([&] { return context->context->StartTimeline(TextOf(path), mark_cycles != 0); }), error);
}

int32_t rt_timeline_stop(rt_context* context, char** error) {
  return Report(Guard([&] { return context->context->StopTimeline(); }), error);
}

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
    RT_TRY(context->context->Submit(std::move(submission), TextOf(request->refusal), request->caller_waits != 0));
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

}  // extern "C"
