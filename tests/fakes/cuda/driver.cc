// The fake libcuda.so.1: the functions, and cuGetProcAddress_v2 that hands them out. tests/fakes/README.md has the
// settings.
#include <array>
#include <cstdint>
#include <mutex>
#include <set>
#include <sstream>
#include <vector>

#include "cuda/memory.h"
#include "cuda/module.h"
#include "cuda/results.h"
#include "cuda/stream.h"
#include "seam.h"
#include "strict.h"

namespace fakes {
namespace {

using Address = unsigned long long;  // CUdeviceptr

struct Event {
  unsigned flags;
  int device;
  std::atomic<Moment*> latest{nullptr};
};

struct Context {
  int device;
  int retained = 0;
};

// What the environment says about the machine. The devices are those that CUDA_VISIBLE_DEVICES leaves.
struct Machine {
  std::vector<int> devices;
  int driver_version = static_cast<int>(Number("FAKE_DRIVER_VERSION", 13000));
  int capability = static_cast<int>(Number("FAKE_CAPABILITY", 90));
  std::string forgotten = Setting("FAKE_CUDA_FORGET", "");

  Machine() {
    const int present = static_cast<int>(Number("FAKE_DEVICES", 1));
    std::string visible = Setting("CUDA_VISIBLE_DEVICES", "all");
    if (visible == "all")
      for (int device = 0; device < present; ++device) devices.push_back(device);
    std::istringstream list(visible == "all" ? "" : visible);
    for (std::string one; std::getline(list, one, ',');) {
      const int device = std::atoi(one.c_str());
      if (device < 0 || device >= present) break;  // as the driver does: the list ends there
      devices.push_back(device);
    }
    if (devices.size() > kMaxDevices) Violation("at most %d devices", kMaxDevices);
  }
};

const Machine& TheMachine() {
  static auto* machine = new Machine;
  return *machine;
}

// The plan of the calls that fail.
std::atomic<const std::string*>& Failures() {
  static auto* plan = new std::atomic<const std::string*>(new std::string(Setting("FAKE_CUDA_FAIL", "")));
  return *plan;
}

std::atomic<bool> initialized{false};
std::mutex guard;  // contexts and events; never held while anything waits
Context contexts[kMaxDevices];
thread_local Context* current = nullptr;

constexpr int kCaptureModeGlobal = 0, kCaptureModeRelaxed = 2;
thread_local int capture_mode = kCaptureModeGlobal;
std::atomic<int> captures{0};  // of the process, all of them in the global mode, as torch.cuda.graph makes them

std::set<const Event*>& Events() {  // alive
  static auto* events = new std::set<const Event*>;
  return *events;
}

Event* LiveEvent(void* handle, const char* user) {
  auto* event = static_cast<Event*>(handle);
  std::lock_guard<std::mutex> lock(guard);
  if (Events().count(event) == 0) Violation("%s uses %p, which is no event or was destroyed", user, handle);
  return event;
}

// The stream behind a handle of the current context.
Stream* LiveStream(void* handle, const char* user) {
  const auto number = reinterpret_cast<uintptr_t>(handle);
  if (number <= 1) return LegacyStream(current->device);
  if (number == 2) return ThreadStream(current->device);
  if (!IsStream(handle)) Violation("%s uses %p, which is no stream or was destroyed", user, handle);
  return static_cast<Stream*>(handle);
}

bool ValidDevice(int device) { return device >= 0 && device < static_cast<int>(TheMachine().devices.size()); }

// ---- the functions, by the names of the driver API ----

int Init(unsigned flags) {
  if (flags != 0) return kInvalidValue;
  if (TheMachine().devices.empty()) return kNoDevice;
  initialized = true;
  return kSuccess;
}

int DriverGetVersion(int* version) {
  *version = TheMachine().driver_version;
  return kSuccess;
}

int DeviceGetCount(int* count) {
  *count = static_cast<int>(TheMachine().devices.size());
  return kSuccess;
}

int DeviceGet(int* device, int ordinal) {
  if (!ValidDevice(ordinal)) return kInvalidDevice;
  *device = ordinal;
  return kSuccess;
}

int DeviceGetAttribute(int* value, int attribute, int device) {
  if (!ValidDevice(device)) return kInvalidDevice;
  switch (attribute) {
    case 1:
      *value = 1024;
      break;  // threads in a block
    case 16:
      *value = 8;
      break;  // multiprocessors
    case 33:
      *value = TheMachine().devices[device] + 1;
      break;  // PCI bus
    case 34:
    case 50:
      *value = 0;
      break;  // PCI device and domain
    case 75:
      *value = TheMachine().capability / 10;
      break;
    case 76:
      *value = TheMachine().capability % 10;
      break;
    default:
      return kInvalidValue;
  }
  return kSuccess;
}

int DeviceGetName(char* name, int length, int device) {
  if (!ValidDevice(device)) return kInvalidDevice;
  std::snprintf(name, static_cast<size_t>(length), "Fake GPU %d", TheMachine().devices[device]);
  return kSuccess;
}

void Identity(int device, char uuid[16], int64_t* bus) {
  const int physical = TheMachine().devices[device];
  std::memset(uuid, 0, 16);
  std::snprintf(uuid, 16, "fake GPU %d", physical);
  *bus = physical + 1;
}

int DeviceGetUuid(char* uuid, int device) {
  if (!ValidDevice(device)) return kInvalidDevice;
  int64_t bus;
  Identity(device, uuid, &bus);
  return kSuccess;
}

int DeviceGetPciBusId(char* text, int length, int device) {
  if (!ValidDevice(device)) return kInvalidDevice;
  std::snprintf(text, static_cast<size_t>(length), "0000:%02X:00.0", TheMachine().devices[device] + 1);
  return kSuccess;
}

int DevicePrimaryCtxRetain(Context** context, int device) {
  if (!ValidDevice(device)) return kInvalidDevice;
  std::lock_guard<std::mutex> lock(guard);
  contexts[device].device = device;
  ++contexts[device].retained;
  *context = &contexts[device];
  return kSuccess;
}

int DevicePrimaryCtxRelease(int device) {
  if (!ValidDevice(device)) return kInvalidDevice;
  std::lock_guard<std::mutex> lock(guard);
  if (contexts[device].retained == 0) return kInvalidContext;
  --contexts[device].retained;
  return kSuccess;
}

int CtxSetCurrent(Context* context) {
  std::lock_guard<std::mutex> lock(guard);
  if (context != nullptr && (context < contexts || context >= contexts + kMaxDevices || context->retained == 0))
    return kInvalidContext;
  current = context;
  return kSuccess;
}

int CtxGetCurrent(Context** context) {
  *context = current;
  return kSuccess;
}

int CtxGetDevice(int* device) {
  *device = current->device;
  return kSuccess;
}

int CtxSynchronize() {
  Synchronize(current->device);
  return kSuccess;
}

int CtxGetStreamPriorityRange(int* least, int* greatest) {
  if (least != nullptr) *least = 0;
  if (greatest != nullptr) *greatest = -5;
  return kSuccess;
}

int StreamCreateWithPriority(Stream** stream, unsigned flags, int) {
  if (flags > 1) return kInvalidValue;
  *stream = NewStream(current->device, flags == 0);
  return kSuccess;
}

int StreamCreate(Stream** stream, unsigned flags) { return StreamCreateWithPriority(stream, flags, 0); }

int StreamDestroy(void* handle) {
  if (reinterpret_cast<uintptr_t>(handle) <= 2) return kInvalidHandle;
  DestroyStream(LiveStream(handle, "cuStreamDestroy"));
  return kSuccess;
}

int StreamWaitEvent(void* handle, void* of_event, unsigned flags) {
  if (flags != 0) return kInvalidValue;
  Stream* stream = LiveStream(handle, "cuStreamWaitEvent");
  Event* event = LiveEvent(of_event, "cuStreamWaitEvent");
  Moment* moment = event->latest;
  if (moment == nullptr) Violation("cuStreamWaitEvent waits for event %p, which was never recorded", of_event);
  if (IsCapturing(stream)) return kCaptureUnsupported;
  WaitFor(stream, moment);
  return kSuccess;
}

int StreamSynchronize(void* handle) {
  Stream* stream = LiveStream(handle, "cuStreamSynchronize");
  if (IsCapturing(stream)) return kCaptureUnsupported;
  Record(stream)->Wait();
  return kSuccess;
}

int StreamQuery(void* handle) {
  Stream* stream = LiveStream(handle, "cuStreamQuery");
  if (IsCapturing(stream)) return kCaptureUnsupported;
  return Record(stream)->passed() ? kSuccess : kNotReady;
}

int StreamIsCapturing(void* handle, int* status) {
  *status = IsCapturing(LiveStream(handle, "cuStreamIsCapturing")) ? 1 : 0;
  return kSuccess;
}

int StreamGetCtx(void* handle, Context** context) {
  *context = &contexts[DeviceOf(LiveStream(handle, "cuStreamGetCtx"))];
  return kSuccess;
}

constexpr unsigned kDisableTiming = 2;

int EventCreate(Event** event, unsigned flags) {
  if (flags > 7 || ((flags & 4) != 0 && (flags & kDisableTiming) == 0)) return kInvalidValue;
  auto* made = new Event{flags, current->device};
  std::lock_guard<std::mutex> lock(guard);
  Events().insert(made);
  *event = made;
  return kSuccess;
}

int EventDestroy(void* handle) {
  const Event* event = LiveEvent(handle, "cuEventDestroy");
  std::lock_guard<std::mutex> lock(guard);
  Events().erase(event);  // and never freed, so that no other gets its address
  return kSuccess;
}

int EventRecord(void* handle, void* on_stream) {
  Event* event = LiveEvent(handle, "cuEventRecord");
  Stream* stream = LiveStream(on_stream, "cuEventRecord");
  if (event->device != DeviceOf(stream)) return kInvalidHandle;
  if (IsCapturing(stream)) return kCaptureUnsupported;
  event->latest = Record(stream);
  return kSuccess;
}

int EventQuery(void* handle) {
  Moment* moment = LiveEvent(handle, "cuEventQuery")->latest;
  if (moment == nullptr) Violation("cuEventQuery asks for event %p, which was never recorded", handle);
  return moment->passed() ? kSuccess : kNotReady;
}

int EventSynchronize(void* handle) {
  Moment* moment = LiveEvent(handle, "cuEventSynchronize")->latest;
  if (moment == nullptr) Violation("cuEventSynchronize waits for event %p, which was never recorded", handle);
  moment->Wait();
  return kSuccess;
}

int EventElapsedTime(float* milliseconds, void* from, void* to) {
  Event* start = LiveEvent(from, "cuEventElapsedTime");
  Event* end = LiveEvent(to, "cuEventElapsedTime");
  Moment *first = start->latest, *second = end->latest;
  if (((start->flags | end->flags) & kDisableTiming) != 0 || first == nullptr || second == nullptr)
    return kInvalidHandle;
  if (!first->passed() || !second->passed()) return kNotReady;
  *milliseconds = static_cast<float>(second->milliseconds() - first->milliseconds());
  return kSuccess;
}

int MemAlloc(Address* address, size_t bytes) {
  if (bytes == 0) return kInvalidValue;
  *address = AllocateMemory(current->device, bytes);
  return *address != 0 ? kSuccess : kOutOfMemory;
}

int MemFree(Address address) {
  if (address == 0) return kSuccess;
  return FreeMemory(address, false) ? kSuccess : kInvalidValue;
}

int MemGetInfo(size_t* free, size_t* total) {
  *total = static_cast<size_t>(Number("FAKE_MEMORY", 1L << 34));
  *free = *total - LiveBytes(current->device);
  return kSuccess;
}

int MemHostAlloc(void** memory, size_t bytes, unsigned flags) {
  if (bytes == 0 || flags > 7) return kInvalidValue;
  *memory = reinterpret_cast<void*>(AllocateMemory(kHostMemory, bytes));
  return kSuccess;
}

int MemFreeHost(void* memory) {
  return FreeMemory(reinterpret_cast<uint64_t>(memory), true) ? kSuccess : kInvalidValue;
}

int MemHostRegister(void* memory, size_t bytes, unsigned) {
  if (memory == nullptr || bytes == 0) return kInvalidValue;
  return RegisterMemory(memory, bytes) ? kSuccess : kHostMemoryAlreadyRegistered;
}

int MemHostUnregister(void* memory) { return UnregisterMemory(memory) ? kSuccess : kHostMemoryNotRegistered; }

// A copy on the stream's thread between memory that the driver knows.
void LaunchCopy(Stream* stream, uint64_t to, uint64_t from, size_t bytes, const char* user) {
  Launch(stream, [=] {
    void* target = UseMemory(to, bytes, user);
    std::memcpy(target, UseMemory(from, bytes, user), bytes);
    ReleaseMemory(to);
    ReleaseMemory(from);
  });
}

bool OnDevice(uint64_t address) {
  const Place place = FindMemory(address);
  return place.known && place.device != kHostMemory;
}

int MemcpyDtoDAsync(Address to, Address from, size_t bytes, void* handle) {
  Stream* stream = LiveStream(handle, "cuMemcpyDtoDAsync");
  if (IsCapturing(stream)) return kCaptureUnsupported;
  if (bytes == 0) return kSuccess;
  LaunchCopy(stream, to, from, bytes, "cuMemcpyDtoDAsync");
  return kSuccess;
}

// Pageable memory is read before the call returns, as the driver does for the copies that it can stage.
int MemcpyHtoDAsync(Address to, const void* from, size_t bytes, void* handle) {
  Stream* stream = LiveStream(handle, "cuMemcpyHtoDAsync");
  if (IsCapturing(stream)) return kCaptureUnsupported;
  if (bytes == 0) return kSuccess;
  const auto source = reinterpret_cast<uint64_t>(from);
  if (OnDevice(source)) return kInvalidValue;
  if (FindMemory(source).known) {
    LaunchCopy(stream, to, source, bytes, "cuMemcpyHtoDAsync");
    return kSuccess;
  }
  std::vector<char> staged(static_cast<const char*>(from), static_cast<const char*>(from) + bytes);
  Launch(stream, [to, staged = std::move(staged)] {
    std::memcpy(UseMemory(to, staged.size(), "cuMemcpyHtoDAsync"), staged.data(), staged.size());
    ReleaseMemory(to);
  });
  return kSuccess;
}

// Into pageable memory, the call waits for the copy.
int MemcpyDtoHAsync(void* to, Address from, size_t bytes, void* handle) {
  Stream* stream = LiveStream(handle, "cuMemcpyDtoHAsync");
  if (IsCapturing(stream)) return kCaptureUnsupported;
  if (bytes == 0) return kSuccess;
  const auto target = reinterpret_cast<uint64_t>(to);
  if (OnDevice(target)) return kInvalidValue;
  if (FindMemory(target).known) {
    LaunchCopy(stream, target, from, bytes, "cuMemcpyDtoHAsync");
    return kSuccess;
  }
  Launch(stream, [=] {
    std::memcpy(to, UseMemory(from, bytes, "cuMemcpyDtoHAsync"), bytes);
    ReleaseMemory(from);
  });
  Record(stream)->Wait();
  return kSuccess;
}

int MemcpyHtoD(Address to, const void* from, size_t bytes) {
  const int result = MemcpyHtoDAsync(to, from, bytes, nullptr);
  return result != kSuccess ? result : StreamSynchronize(nullptr);
}

int MemcpyDtoH(void* to, Address from, size_t bytes) {
  const int result = MemcpyDtoHAsync(to, from, bytes, nullptr);
  return result != kSuccess ? result : StreamSynchronize(nullptr);
}

int MemsetD8Async(Address to, unsigned char value, size_t bytes, void* handle) {
  Stream* stream = LiveStream(handle, "cuMemsetD8Async");
  if (IsCapturing(stream)) return kCaptureUnsupported;
  if (bytes == 0) return kSuccess;
  Launch(stream, [=] {
    std::memset(UseMemory(to, bytes, "cuMemsetD8Async"), value, bytes);
    ReleaseMemory(to);
  });
  return kSuccess;
}

int PointerGetAttribute(void* value, int attribute, Address address) {
  const Place place = FindMemory(address);
  if (!place.known) return kInvalidValue;
  const bool on_device = place.device != kHostMemory;
  switch (attribute) {
    case 1:
      *static_cast<Context**>(value) = &contexts[on_device ? place.device : 0];
      break;
    case 2:
      *static_cast<unsigned*>(value) = on_device ? 2 : 1;
      break;  // memory type
    case 3:
      *static_cast<Address*>(value) = address;
      break;  // device's address
    case 8:
      *static_cast<unsigned*>(value) = 0;
      break;  // managed
    case 9:
      *static_cast<int*>(value) = on_device ? place.device : 0;
      break;
    case 11:
      *static_cast<Address*>(value) = place.start;
      break;
    case 12:
      *static_cast<size_t*>(value) = place.bytes;
      break;
    default:
      return kInvalidValue;
  }
  return kSuccess;
}

int ModuleLoadData(Module** module, const void* image) {
  auto* loaded = new Module{current->device, {}};
  const int result =
      LoadModule(static_cast<const char*>(image), TheMachine().driver_version, TheMachine().capability, loaded);
  if (result != kSuccess) return delete loaded, result;
  *module = loaded;
  return kSuccess;
}

int ModuleUnload(Module* module) {
  delete module;
  return kSuccess;
}

int ModuleGetFunction(Function** function, Module* module, const char* name) {
  auto found = module->functions.find(name);
  if (found == module->functions.end()) return kNotFound;
  if (found->second.body == nullptr) Violation("kernel %s has no host code in tests/fakes/cuda/kernels.cc", name);
  *function = &found->second;
  return kSuccess;
}

int LaunchKernel(Function* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                 unsigned block_y, unsigned block_z, unsigned shared_bytes, void* handle, void** parameters,
                 void** extra) {
  Stream* stream = LiveStream(handle, "cuLaunchKernel");
  if (IsCapturing(stream)) return kCaptureUnsupported;
  if (DeviceOf(stream) != current->device) return kInvalidHandle;
  if (extra != nullptr || shared_bytes > 48 * 1024 || grid_x * grid_y * grid_z == 0) return kInvalidValue;
  if (block_x * block_y * block_z == 0 || block_x * block_y * block_z > 1024) return kInvalidValue;
  if (!function->loaded) Synchronize(current->device);  // as a driver does that loads kernels at their first launch
  function->loaded = true;
  const auto* first = static_cast<const char*>(parameters[0]);
  std::vector<char> copy(first, first + function->parameter_bytes);
  auto* body = function->body;
  const Launch3 grid{grid_x, grid_y, grid_z}, block{block_x, block_y, block_z};
  Launch(stream, [body, grid, block, copy = std::move(copy)] { body(copy.data(), grid, block); });
  return kSuccess;
}

int GetErrorString(int code, const char** text) {
  static thread_local char buffer[64];
  std::snprintf(buffer, sizeof buffer, "fake CUDA error %d", code);
  *text = buffer;
  return kSuccess;
}

int ThreadExchangeStreamCaptureMode(int* mode) {
  if (*mode < kCaptureModeGlobal || *mode > kCaptureModeRelaxed) return kInvalidValue;
  std::swap(*mode, capture_mode);
  return kSuccess;
}

// ---- handing them out ----

enum Needs { kNothing, kInit, kContext, kNoCapture };  // the last one: a context, and no thread's capture

struct Row {
  CountedFunction counted;
  int since;  // CUDA version from which on the function has this signature
  Needs needs;
  void* address;
};

std::vector<Row*>& Rows() {
  static auto* rows = new std::vector<Row*>;
  return *rows;
}

int Refusal(Row* row, long call) {
  const int planned = row->counted.Planned(*Failures().load(), call);
  if (planned != 0) return planned;
  if (row->needs >= kInit && !initialized) return kNotInitialized;
  if (row->needs >= kContext && current == nullptr) return kInvalidContext;
  if (row->needs == kNoCapture && captures > 0 && capture_mode != kCaptureModeRelaxed) return kCaptureUnsupported;
  return kSuccess;
}

// The function as a caller gets it: counted, and refused where the plan or the driver's state says so.
template <auto kFunction>
struct Checked;
template <typename... A, int (*kFunction)(A...)>
struct Checked<kFunction> {
  static inline Row* row = nullptr;
  static int Call(A... arguments) {
    const long call = row->counted.Enter();
    const int refusal = Refusal(row, call);
    if (refusal != kSuccess || row->counted.Planned(TheMachine().forgotten, call) != 0) return refusal;
    return kFunction(arguments...);
  }
};

template <auto kFunction>
void Add(const char* name, int since, Needs needs) {
  auto* row = new Row;
  row->counted.name = name;
  row->since = since;
  row->needs = needs;
  row->address = reinterpret_cast<void*>(&Checked<kFunction>::Call);
  Checked<kFunction>::row = row;
  Rows().push_back(row);
}

void AddAll() {
  Add<Init>("cuInit", 2000, kNothing);
  Add<DriverGetVersion>("cuDriverGetVersion", 2020, kNothing);
  Add<DeviceGetCount>("cuDeviceGetCount", 2000, kInit);
  Add<DeviceGet>("cuDeviceGet", 2000, kInit);
  Add<DeviceGetAttribute>("cuDeviceGetAttribute", 2000, kInit);
  Add<DeviceGetName>("cuDeviceGetName", 2000, kInit);
  Add<DeviceGetUuid>("cuDeviceGetUuid", 9020, kInit);
  Add<DeviceGetPciBusId>("cuDeviceGetPCIBusId", 4010, kInit);
  Add<DevicePrimaryCtxRetain>("cuDevicePrimaryCtxRetain", 7000, kInit);
  Add<DevicePrimaryCtxRelease>("cuDevicePrimaryCtxRelease", 11000, kInit);
  Add<CtxSetCurrent>("cuCtxSetCurrent", 4000, kInit);
  Add<CtxGetCurrent>("cuCtxGetCurrent", 4000, kInit);
  Add<CtxGetDevice>("cuCtxGetDevice", 2000, kContext);
  Add<CtxSynchronize>("cuCtxSynchronize", 2000, kNoCapture);
  Add<CtxGetStreamPriorityRange>("cuCtxGetStreamPriorityRange", 5050, kContext);
  Add<StreamCreate>("cuStreamCreate", 2000, kContext);
  Add<StreamCreateWithPriority>("cuStreamCreateWithPriority", 5050, kContext);
  Add<StreamDestroy>("cuStreamDestroy", 4000, kContext);
  Add<StreamWaitEvent>("cuStreamWaitEvent", 3020, kContext);
  Add<StreamSynchronize>("cuStreamSynchronize", 2000, kNoCapture);
  Add<StreamQuery>("cuStreamQuery", 2000, kNoCapture);
  Add<StreamIsCapturing>("cuStreamIsCapturing", 10000, kContext);
  Add<ThreadExchangeStreamCaptureMode>("cuThreadExchangeStreamCaptureMode", 10010, kNothing);
  Add<StreamGetCtx>("cuStreamGetCtx", 9020, kContext);
  Add<EventCreate>("cuEventCreate", 2000, kContext);
  Add<EventDestroy>("cuEventDestroy", 4000, kInit);
  Add<EventRecord>("cuEventRecord", 2000, kContext);
  Add<EventQuery>("cuEventQuery", 2000, kNoCapture);
  Add<EventSynchronize>("cuEventSynchronize", 2000, kNoCapture);
  Add<EventElapsedTime>("cuEventElapsedTime", 2000, kInit);
  Add<MemAlloc>("cuMemAlloc", 3020, kNoCapture);
  Add<MemFree>("cuMemFree", 3020, kNoCapture);
  Add<MemGetInfo>("cuMemGetInfo", 3020, kContext);
  Add<MemHostAlloc>("cuMemHostAlloc", 2020, kNoCapture);
  Add<MemFreeHost>("cuMemFreeHost", 2000, kNoCapture);
  Add<MemHostRegister>("cuMemHostRegister", 6050, kContext);
  Add<MemHostUnregister>("cuMemHostUnregister", 4000, kContext);
  Add<MemcpyHtoD>("cuMemcpyHtoD", 3020, kNoCapture);
  Add<MemcpyDtoH>("cuMemcpyDtoH", 3020, kNoCapture);
  Add<MemcpyHtoDAsync>("cuMemcpyHtoDAsync", 3020, kContext);
  Add<MemcpyDtoHAsync>("cuMemcpyDtoHAsync", 3020, kContext);
  Add<MemcpyDtoDAsync>("cuMemcpyDtoDAsync", 3020, kContext);
  Add<MemsetD8Async>("cuMemsetD8Async", 3020, kContext);
  Add<PointerGetAttribute>("cuPointerGetAttribute", 4000, kInit);
  Add<ModuleLoadData>("cuModuleLoadData", 2000, kNoCapture);
  Add<ModuleUnload>("cuModuleUnload", 2000, kNoCapture);
  Add<ModuleGetFunction>("cuModuleGetFunction", 2000, kContext);
  Add<LaunchKernel>("cuLaunchKernel", 4000, kContext);
  Add<GetErrorString>("cuGetErrorString", 6000, kNothing);
}

Row* FindRow(const char* name) {
  static std::once_flag once;
  std::call_once(once, AddAll);
  for (Row* row : Rows())
    if (row->counted.name == name) return row;
  return nullptr;
}

}  // namespace
}  // namespace fakes

using namespace fakes;

extern "C" {

#define FAKE_EXPORT __attribute__((visibility("default")))

FAKE_EXPORT int cuGetProcAddress_v2(const char* name, void** function, int version, uint64_t flags, int* status) {
  *function = nullptr;
  if (flags > 2 || version > TheMachine().driver_version) return kInvalidValue;
  const Row* row = FindRow(name);
  const int found = row == nullptr ? 1 : row->since > version ? 2 : 0;
  if (status != nullptr) *status = found;
  if (found == 0) *function = row->address;
  return kSuccess;
}

// For tests: marks a stream as one under capture, in the global mode.
FAKE_EXPORT void fake_cuda_capture(void* stream, int capturing) {
  captures += capturing != 0 ? 1 : -1;
  SetCapturing(LiveStream(stream, "fake_cuda_capture"), capturing != 0);
}

// For tests: work for a stream that takes a while.
FAKE_EXPORT void fake_cuda_spin(void* handle, double milliseconds) {
  Launch(LiveStream(handle, "fake_cuda_spin"), [=] { usleep(static_cast<useconds_t>(1000 * milliseconds)); });
}

// For tests: whether a stream uses the memory at the moment.
FAKE_EXPORT int fake_cuda_in_use(uint64_t address) { return InUse(address) ? 1 : 0; }

// For tests: another plan than FAKE_CUDA_FAIL's.
FAKE_EXPORT void fake_cuda_fail(const char* plan) { Failures() = new std::string(plan); }

// For tests: how often a function was called, -1 if there is none of that name.
FAKE_EXPORT long fake_cuda_calls(const char* name) {
  const Row* row = FindRow(name);
  return row != nullptr ? row->counted.calls.load() : -1;
}

// For tests: what was made and is still there.
FAKE_EXPORT void fake_cuda_live(long* streams, long* events, long* allocations) {
  std::lock_guard<std::mutex> lock(guard);
  *streams = LiveStreams();
  *events = static_cast<long>(Events().size());
  *allocations = LiveAllocations();
}

FAKE_EXPORT const CudaSeam* fake_cuda_seam() {
  static const CudaSeam seam = {
      [] { return current != nullptr ? current->device : -1; },
      Identity,
      [](void* handle) {
        Stream* stream = LiveStream(handle, "an NCCL function");
        return IsCapturing(stream) ? nullptr : stream;
      },
      [](Stream* stream) { return DeviceOf(stream); },
      [](Stream* stream, void (*work)(void*), void* argument) { Launch(stream, [=] { work(argument); }); },
      [](uint64_t address, size_t bytes) {
        const Place place = FindMemory(address);
        return place.known && address + bytes <= place.start + place.bytes ? place.device : -1;
      },
      UseMemory,
      ReleaseMemory,
      [](size_t bytes) { return AllocateMemory(current->device, bytes); },
      [](uint64_t address) { FreeMemory(address, false); },
  };
  return &seam;
}

}  // extern "C"
