// Device: one GPU as one rank uses it, and what the rank keeps there: events and pinned memory to use again, its
// streams. DeviceTable: a rank's devices, opened at their first tensor. Everything is in the device's primary context,
// the one that frameworks use, so that their streams and memory are ours without translation.
#ifndef RINGTRAIN_DEVICE_DEVICE_H_
#define RINGTRAIN_DEVICE_DEVICE_H_

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "base/status.h"
#include "device/driver.h"
#include "device/pack_kernels.h"
#include "device/sum_kernels.h"

namespace ringtrain {

class Device {
 public:
  static Status Open(const Driver& driver, int index, std::shared_ptr<Device>* device);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const Driver& driver() const { return driver_; }
  int index() const { return index_; }
  CUcontext context() const { return context_; }
  CUdevice handle() const { return device_; }
  int compute_capability() const { return compute_capability_; }  // 10 * major + minor
  // The same text for the same GPU in any process of a host.
  const std::string& bus() const { return bus_; }
  std::string Text() const { return "cuda:" + std::to_string(index_); }
  Status Check(CUresult result, const std::string& what) const { return driver_.Check(result, what + " on " + Text()); }

  // Its work does not end: from now on nothing is given back that would wait for that.
  void Hangs() { hangs_.store(true); }

  // Events without timing, to use again; any thread. The context must be current where a new one is made.
  Status TakeEvent(CUevent* event);
  void GiveEvent(CUevent event);

  // Memory on the device; any thread, any context. What is freed may outlive the object.
  Status Allocate(size_t bytes, void** memory) const;
  static void Free(int index, void* memory);
  // Our kernels, loaded at the first call, and for as long as this lives: to load them while another kernel of this
  // process runs waits for its end, and that may wait for a rank that is gone. The context must be current; always by
  // the same thread.
  Status FindPacks(CUstream stream, PackKernels** kernels);
  Status FindSums(CUstream stream, SumKernels** kernels);
  // Copies to host memory what the stream's work until now leaves there, and waits for that; any thread, any context.
  Status Read(CUstream stream, const void* from, size_t bytes, void* to) const;
  // Enqueued when they return; the context must be current.
  Status CopyToHost(void* to, CUdeviceptr from, size_t bytes, CUstream stream) const {
    return Check(driver_.MemcpyDtoHAsync(to, from, bytes, stream), "cuMemcpyDtoHAsync");
  }
  Status CopyFromHost(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) const {
    return Check(driver_.MemcpyHtoDAsync(to, from, bytes, stream), "cuMemcpyHtoDAsync");
  }
  Status CopyWithin(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) const {
    return Check(driver_.MemcpyDtoDAsync(to, from, bytes, stream), "cuMemcpyDtoDAsync");
  }
  // Whether a CUDA graph is captured from a stream; the context must be current.
  Status IsCapturing(CUstream stream, bool* capturing) const;
  // Index of the device on which memory lies, or -1: also of memory that the host shares with it. library: as
  // Driver::Open takes it.
  static int Of(const std::string& library, const void* memory);

  // Pinned host memory of at least that size, to use again: what is given back is kept for as long as its size is in
  // use. The context must be current.
  Status TakePinned(size_t bytes, void** memory, size_t* granted);
  void GivePinned(void* memory, size_t granted);

 private:
  Device(const Driver& driver, int index) : driver_(driver), index_(index) {}
  struct FreePinned {
    void* memory;
    uint64_t since;  // as many takes
  };
  Status Describe();
  void FreeUnused() RT_REQUIRES(mutex_);

  const Driver& driver_;
  const int index_;
  CUdevice device_ = -1;
  CUcontext context_ = nullptr;
  int compute_capability_ = 0;
  std::string bus_;
  std::atomic<bool> hangs_{false};
  std::unique_ptr<PackKernels> packs_;
  std::unique_ptr<SumKernels> sums_;
  Mutex mutex_;
  std::vector<CUevent> events_ RT_GUARDED_BY(mutex_);               // free ones
  std::multimap<size_t, FreePinned> pinned_ RT_GUARDED_BY(mutex_);  // by size
  uint64_t pinned_takes_ RT_GUARDED_BY(mutex_) = 0;
};

// Makes a device's context that of this thread for as long as it lives, and lets it look at events and take memory
// while another thread captures a CUDA graph. By default such a call fails then, and so does that capture: nothing here
// is given to a stream under capture.
class InContext {
 public:
  explicit InContext(const Device& device) : InContext(device.driver(), device.context()) {}
  InContext(const Driver& driver, CUcontext context);
  ~InContext();
  InContext(const InContext&) = delete;
  InContext& operator=(const InContext&) = delete;

 private:
  const Driver& driver_;
  CUcontext before_ = nullptr;
  int mode_ = kCudaCaptureModeRelaxed;  // the thread's while this does not live, and the other one's then
};

// An event, and the device that takes it back.
class DeviceEvent {
 public:
  // Recorded on the stream: passes when all that is on it now is done. The context must be current.
  static Status Record(const std::shared_ptr<Device>& device, CUstream stream, std::shared_ptr<DeviceEvent>* event);
  ~DeviceEvent() { device_->GiveEvent(event_); }
  DeviceEvent(const DeviceEvent&) = delete;
  DeviceEvent& operator=(const DeviceEvent&) = delete;

  const std::shared_ptr<Device>& device() const { return device_; }
  // Any thread; a context must be current, whichever.
  Status Passed(bool* passed) const;
  // Makes what comes on the stream from now on wait for the event, on the GPU.
  Status HoldBack(CUstream stream) const;

 private:
  DeviceEvent(std::shared_ptr<Device> device, CUevent event) : device_(std::move(device)), event_(event) {}

  const std::shared_ptr<Device> device_;
  const CUevent event_;
};

// A stream of ours: of the highest priority, and apart from the legacy stream. Its context must be current at its end,
// too.
class Stream {
 public:
  static Status Make(const std::shared_ptr<Device>& device, std::unique_ptr<Stream>* stream);
  ~Stream() { device_->driver().StreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  CUstream get() const { return stream_; }

 private:
  Stream(std::shared_ptr<Device> device, CUstream stream) : device_(std::move(device)), stream_(stream) {}

  const std::shared_ptr<Device> device_;
  const CUstream stream_;
};

// Memory of the device for as long as it lives; any context.
class DeviceMemory {
 public:
  static Status Take(const std::shared_ptr<Device>& device, size_t bytes, std::unique_ptr<DeviceMemory>* memory);
  ~DeviceMemory() { Device::Free(device_->index(), memory_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  char* get() const { return static_cast<char*>(memory_); }

 private:
  DeviceMemory(std::shared_ptr<Device> device, void* memory) : device_(std::move(device)), memory_(memory) {}

  const std::shared_ptr<Device> device_;
  void* const memory_;
};

// Pinned host memory for as long as it lives.
class Pinned {
 public:
  static Status Take(const std::shared_ptr<Device>& device, size_t bytes, std::unique_ptr<Pinned>* pinned);
  ~Pinned() { device_->GivePinned(memory_, granted_); }
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;

  char* get() const { return static_cast<char*>(memory_); }

 private:
  Pinned(std::shared_ptr<Device> device, void* memory, size_t granted)
      : device_(std::move(device)), memory_(memory), granted_(granted) {}

  const std::shared_ptr<Device> device_;
  void* const memory_;
  const size_t granted_;
};

class DeviceTable {
 public:
  // library: of the driver, as Driver::Open takes it.
  explicit DeviceTable(std::string library) : library_(std::move(library)) {}

  // The device of that index; any thread. Not ok if the driver cannot be used or knows no such device.
  Status Find(int index, std::shared_ptr<Device>* device);

 private:
  const std::string library_;
  Mutex mutex_;
  std::map<int, std::shared_ptr<Device>> devices_ RT_GUARDED_BY(mutex_);
};

}  // namespace ringtrain
#endif  // RINGTRAIN_DEVICE_DEVICE_H_
