#include "device/device.h"

#include <algorithm>
#include <cstdio>

namespace ringtrain {
namespace {

// Pinned memory is asked for in few sizes, so that what one batch gave back fits the next: eight for each power of two.
constexpr size_t kLeastPinned = 64 << 10;
constexpr size_t kSizesForEach = 8;
// What nobody has taken during so many takes, some ten steps, goes back to the driver; but for a little.
constexpr uint64_t kLongestUnused = 4096, kTakesBetweenLooks = 256;
constexpr size_t kKeptUnused = size_t{64} << 20;

constexpr size_t kLeastAllocated = 256;

constexpr int kMemoryOfDevice = 2;  // of kCudaPointerMemoryType

size_t RoundUp(size_t bytes) {
  size_t power = kLeastPinned;
  while (power < bytes) power *= 2;
  const size_t step = std::max(kLeastPinned, power / 2 / kSizesForEach);
  return std::max(kLeastPinned, (bytes + step - 1) / step * step);
}

}  // namespace

// ---- device ----

Status Device::Open(const Driver& driver, int index, std::shared_ptr<Device>* opened) {
  int count = 0;
  RT_TRY(driver.Check(driver.DeviceGetCount(&count), "cuDeviceGetCount"));
  if (index >= count)
    return Status::InvalidArgument("CUDA device " + std::to_string(index) + ": expected one of the " +
                                   std::to_string(count) + " that this process sees. Look at CUDA_VISIBLE_DEVICES.");
  std::shared_ptr<Device> device(new Device(driver, index));
  RT_TRY(device->Check(driver.DeviceGet(&device->device_, index), "cuDeviceGet"));
  RT_TRY(device->Check(driver.DevicePrimaryCtxRetain(&device->context_, device->device_), "cuDevicePrimaryCtxRetain"));
  RT_TRY(device->Describe());
  *opened = std::move(device);
  return {};
}

Status Device::Describe() {
  int major = 0, minor = 0, domain = 0, bus = 0, place = 0;
  const struct {
    int attribute;
    int* value;
  } attributes[] = {{kCudaAttributeComputeMajor, &major},
                    {kCudaAttributeComputeMinor, &minor},
                    {kCudaAttributePciDomain, &domain},
                    {kCudaAttributePciBus, &bus},
                    {kCudaAttributePciDevice, &place}};
  for (const auto& row : attributes)
    RT_TRY(Check(driver_.DeviceGetAttribute(row.value, row.attribute, device_), "cuDeviceGetAttribute"));
  compute_capability_ = 10 * major + minor;
  char text[32];
  std::snprintf(text, sizeof text, "%08x:%02x:%02x", domain, bus, place);
  bus_ = text;
  return {};
}

Device::~Device() {
  if (context_ == nullptr || hangs_.load()) {
    [[maybe_unused]] const auto* const packs = packs_.release();
    [[maybe_unused]] const auto* const sums = sums_.release();
    return;
  }
  {
    InContext current(*this);
    packs_ = nullptr;
    sums_ = nullptr;
    for (CUevent event : events_) driver_.EventDestroy(event);
    for (const auto& pinned : pinned_) driver_.MemFreeHost(pinned.second.memory);
  }
  driver_.DevicePrimaryCtxRelease(device_);
}

Status Device::TakeEvent(CUevent* event) {
  {
    MutexLock lock(mutex_);
    if (!events_.empty()) {
      *event = events_.back();
      events_.pop_back();
      return {};
    }
  }
  return Check(driver_.EventCreate(event, kCudaEventDisableTiming), "cuEventCreate");
}

void Device::GiveEvent(CUevent event) {
  MutexLock lock(mutex_);
  events_.push_back(event);
}

Status Device::Allocate(size_t bytes, void** memory) const {
  InContext current(*this);
  CUdeviceptr allocated = 0;
  RT_TRY(Check(driver_.MemAlloc(&allocated, std::max(bytes, kLeastAllocated)),
               "cuMemAlloc of " + std::to_string(bytes) + " bytes"));
  *memory = reinterpret_cast<void*>(allocated);
  return {};
}

Status Device::FindPacks(CUstream stream, PackKernels** kernels) {
  if (packs_ == nullptr) RT_TRY(PackKernels::Load(driver_, device_, stream, &packs_));
  *kernels = packs_.get();
  return {};
}

Status Device::FindSums(CUstream stream, SumKernels** kernels) {
  if (sums_ == nullptr) RT_TRY(SumKernels::Load(driver_, device_, stream, &sums_));
  *kernels = sums_.get();
  return {};
}

Status Device::Read(CUstream stream, const void* from, size_t bytes, void* to) const {
  InContext current(*this);
  RT_TRY(CopyToHost(to, AddressOf(from), bytes, stream));
  return Check(driver_.StreamSynchronize(stream), "cuStreamSynchronize");
}

Status Device::IsCapturing(CUstream stream, bool* capturing) const {
  int status = 0;
  RT_TRY(Check(driver_.StreamIsCapturing(stream, &status), "cuStreamIsCapturing"));
  *capturing = status != 0;
  return {};
}

void Device::Free(int index, void* memory) {
  const Driver* driver = Driver::Opened();
  CUdevice device;
  CUcontext context;
  if (memory == nullptr || driver == nullptr || driver->DeviceGet(&device, index) != kCudaSuccess ||
      driver->DevicePrimaryCtxRetain(&context, device) != kCudaSuccess)
    return;
  {
    InContext current(*driver, context);
    driver->MemFree(AddressOf(memory));
  }
  driver->DevicePrimaryCtxRelease(device);
}

int Device::Of(const std::string& library, const void* memory) {
  const Driver* driver;
  int index = -1;
  if (!Driver::Open(library, &driver).ok()) return -1;
  const auto ask = [&](int attribute, int* value) {
    return driver->PointerGetAttribute(value, attribute, AddressOf(memory)) == kCudaSuccess;
  };
  int type = 0, is_managed = 0;
  if (!ask(kCudaPointerMemoryType, &type) || type != kMemoryOfDevice) return -1;  // pinned memory has a device, too
  if (ask(kCudaPointerIsManaged, &is_managed) && is_managed != 0) return -1;
  return ask(kCudaPointerDeviceOrdinal, &index) ? index : -1;
}

Status Device::TakePinned(size_t bytes, void** memory, size_t* granted) {
  const size_t wanted = RoundUp(bytes);
  *granted = wanted;
  {
    MutexLock lock(mutex_);
    if (++pinned_takes_ % kTakesBetweenLooks == 0) FreeUnused();
    auto found = pinned_.find(wanted);
    if (found != pinned_.end()) {
      *memory = found->second.memory;
      pinned_.erase(found);
      return {};
    }
  }
  return Check(driver_.MemHostAlloc(memory, wanted, kCudaHostPortable),
               "cuMemHostAlloc of " + std::to_string(wanted) + " bytes");
}

void Device::GivePinned(void* memory, size_t granted) {
  MutexLock lock(mutex_);
  pinned_.emplace(granted, FreePinned{memory, pinned_takes_});
}

// The largest first.
void Device::FreeUnused() {
  size_t unused = 0;
  for (const auto& [bytes, pinned] : pinned_) unused += pinned_takes_ - pinned.since > kLongestUnused ? bytes : 0;
  for (auto next = pinned_.end(); unused > kKeptUnused && next != pinned_.begin();) {
    --next;
    if (pinned_takes_ - next->second.since <= kLongestUnused) continue;
    unused -= next->first;
    driver_.MemFreeHost(next->second.memory);
    next = pinned_.erase(next);
  }
}

// ---- what lives on it ----

InContext::InContext(const Driver& driver, CUcontext context) : driver_(driver) {
  driver_.CtxGetCurrent(&before_);
  driver_.CtxSetCurrent(context);
  driver_.ThreadExchangeStreamCaptureMode(&mode_);
}

InContext::~InContext() {
  driver_.ThreadExchangeStreamCaptureMode(&mode_);
  driver_.CtxSetCurrent(before_);
}

Status DeviceEvent::Record(const std::shared_ptr<Device>& device, CUstream stream,
                           std::shared_ptr<DeviceEvent>* event) {
  CUevent taken;
  RT_TRY(device->TakeEvent(&taken));
  event->reset(new DeviceEvent(device, taken));
  return device->Check(device->driver().EventRecord(taken, stream), "cuEventRecord");
}

Status DeviceEvent::Passed(bool* passed) const {
  const CUresult result = device_->driver().EventQuery(event_);
  *passed = result == kCudaSuccess;
  return result == kCudaNotReady ? Status() : device_->Check(result, "cuEventQuery");
}

Status DeviceEvent::HoldBack(CUstream stream) const {
  return device_->Check(device_->driver().StreamWaitEvent(stream, event_, 0), "cuStreamWaitEvent");
}

Status Stream::Make(const std::shared_ptr<Device>& device, std::unique_ptr<Stream>* stream) {
  const Driver& driver = device->driver();
  int lowest = 0, highest = 0;
  RT_TRY(device->Check(driver.CtxGetStreamPriorityRange(&lowest, &highest), "cuCtxGetStreamPriorityRange"));
  CUstream made;
  RT_TRY(device->Check(driver.StreamCreateWithPriority(&made, kCudaStreamNonBlocking, highest),
                       "cuStreamCreateWithPriority"));
  stream->reset(new Stream(device, made));
  return {};
}

Status DeviceMemory::Take(const std::shared_ptr<Device>& device, size_t bytes, std::unique_ptr<DeviceMemory>* memory) {
  void* allocated;
  RT_TRY(device->Allocate(bytes, &allocated));
  memory->reset(new DeviceMemory(device, allocated));
  return {};
}

Status Pinned::Take(const std::shared_ptr<Device>& device, size_t bytes, std::unique_ptr<Pinned>* pinned) {
  void* memory;
  size_t granted;
  RT_TRY(device->TakePinned(bytes, &memory, &granted));
  pinned->reset(new Pinned(device, memory, granted));
  return {};
}

Status DeviceTable::Find(int index, std::shared_ptr<Device>* device) {
  MutexLock lock(mutex_);
  auto found = devices_.find(index);
  if (found == devices_.end()) {
    const Driver* driver;
    RT_TRY(Driver::Open(library_, &driver));
    std::shared_ptr<Device> opened;
    RT_TRY(Device::Open(*driver, index, &opened));
    found = devices_.emplace(index, std::move(opened)).first;
  }
  *device = found->second;
  return {};
}

}  // namespace ringtrain
