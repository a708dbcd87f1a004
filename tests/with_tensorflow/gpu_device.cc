// TensorFlow's GPU devices without a GPU: devices of type GPU whose memory and streams are those of the fake libcuda.
//
// test_tensorflow_gpu.py compiles this against the headers of the TensorFlow that will load it, so what an operation
// finds on these devices lies where that TensorFlow puts it. As on a real one all work is enqueued on one stream of the
// device, and the host goes on; copies from the host come late. Memory is kept and handed out again at once when it is
// freed, in the stream's order. TensorFlow counts the devices from the last one of CUDA's backwards: who takes its
// number for CUDA's is on the wrong one.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "tensorflow/core/common_runtime/device_factory.h"
#include "tensorflow/core/common_runtime/local_device.h"
#include "tensorflow/core/framework/allocator.h"
#include "tensorflow/core/framework/device_base.h"
#include "xla/stream_executor/stream_common.h"

namespace {

using namespace tensorflow;  // as TensorFlow's own sources are within it

void* const libcuda = dlopen(std::getenv("RINGTRAIN_CUDA_LIB"), RTLD_NOW | RTLD_LOCAL);
const double kLateMilliseconds = std::atof(std::getenv("GPU_DEVICE_LATE"));

// Calls a function of the driver; the process ends unless it succeeds.
template <typename... Arguments>
void Cuda(const char* name, Arguments... arguments) {
  using Find = int (*)(const char*, void**, int, uint64_t, int*);
  static const auto find = reinterpret_cast<Find>(dlsym(libcuda, "cuGetProcAddress_v2"));
  void* function = nullptr;
  find(name, &function, 12000, 0, nullptr);
  const int result = reinterpret_cast<int (*)(Arguments...)>(function)(arguments...);
  if (result == 0) return;
  std::fprintf(stderr, "%s returned %d\n", name, result);
  std::abort();
}

// What a device of CUDA's is used through.
class Gpu {
 public:
  explicit Gpu(int index) {
    Cuda("cuInit", 0u);
    Cuda("cuDevicePrimaryCtxRetain", &context_, index);
    Enter();
    Cuda("cuStreamCreateWithPriority", &stream_, 1u, 0);
  }
  void* stream() const { return stream_; }
  void Enter() const { Cuda("cuCtxSetCurrent", context_); }

  uint64_t Allocate(size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<uint64_t>& free = free_[bytes];
    uint64_t address = 0;
    if (free.empty()) {
      Enter();
      Cuda("cuMemAlloc", &address, std::max<size_t>(bytes, 1));
    } else {
      address = free.back();
      free.pop_back();
    }
    bytes_[address] = bytes;
    return address;
  }
  void Free(uint64_t address) {
    std::lock_guard<std::mutex> lock(mutex_);
    free_[bytes_.at(address)].push_back(address);
  }
  void BeLate() const {
    using Spin = void (*)(void*, double);
    static const auto spin = reinterpret_cast<Spin>(dlsym(libcuda, "fake_cuda_spin"));
    spin(stream_, kLateMilliseconds);
  }

 private:
  void* context_ = nullptr;
  void* stream_ = nullptr;
  std::mutex mutex_;
  std::map<size_t, std::vector<uint64_t>> free_;
  std::map<uint64_t, size_t> bytes_;
};

class GpuAllocator : public Allocator {
 public:
  explicit GpuAllocator(Gpu* gpu) : gpu_(gpu) {}
  std::string Name() override { return "fake_gpu"; }
  void* AllocateRaw(size_t, size_t bytes) override { return reinterpret_cast<void*>(gpu_->Allocate(bytes)); }
  void DeallocateRaw(void* memory) override { gpu_->Free(reinterpret_cast<uint64_t>(memory)); }
  AllocatorMemoryType GetMemoryType() const override { return AllocatorMemoryType::kDevice; }

 private:
  Gpu* const gpu_;
};

absl::Status Unused() { return absl::UnimplementedError("no test of ringtrain's comes here"); }

// The class of device memory, which the releases call by different names.
template <typename Memory>
Memory MemoryIn(absl::Status (stream_executor::Stream::*)(void*, const Memory&, uint64_t));
using DeviceMemory = decltype(MemoryIn(&stream_executor::Stream::Memcpy));

class GpuStream : public stream_executor::StreamCommon {
 public:
  // Nobody asks its executor for anything; there must be one.
  explicit GpuStream(void* handle)
      : StreamCommon(reinterpret_cast<stream_executor::StreamExecutor*>(this)), handle_(handle) {}
  PlatformSpecificHandle platform_specific_handle() const override { return {handle_}; }
  absl::Status WaitFor(stream_executor::Stream*) override { return Unused(); }
  absl::Status WaitFor(stream_executor::Event*) override { return Unused(); }
  absl::Status RecordEvent(stream_executor::Event*) override { return Unused(); }
  absl::Status Memcpy(void*, const DeviceMemory&, uint64_t) override { return Unused(); }
  absl::Status Memcpy(DeviceMemory*, const void*, uint64_t) override { return Unused(); }
  absl::Status BlockHostUntilDone() override { return Unused(); }
  absl::Status DoHostCallbackWithStatus(absl::AnyInvocable<absl::Status() &&>) override { return Unused(); }

 private:
  void* const handle_;
};

uint64_t AddressOf(const Tensor* tensor) { return reinterpret_cast<uint64_t>(tensor->data()); }

class GpuContext : public DeviceContext {
 public:
  GpuContext(Gpu* gpu, GpuStream* stream) : gpu_(gpu), stream_(stream) {}
  stream_executor::Stream* stream() const override { return stream_; }

  void CopyCPUTensorToDevice(const Tensor* from, Device*, Tensor* to, StatusCallback done, bool) const override {
    const size_t bytes = from->TotalBytes();
    if (bytes > 0) {
      void* const kept = std::malloc(bytes);  // until the stream has come to it, which nobody tells: to the end
      std::memcpy(kept, from->data(), bytes);
      gpu_->Enter();
      gpu_->BeLate();
      Cuda("cuMemcpyHtoDAsync", AddressOf(to), static_cast<const void*>(kept), bytes, gpu_->stream());
    }
    done(absl::OkStatus());
  }
  void CopyDeviceTensorToCPU(const Tensor* from, absl::string_view, Device*, Tensor* to, StatusCallback done) override {
    gpu_->Enter();
    if (to->TotalBytes() > 0)
      Cuda("cuMemcpyDtoHAsync", to->data(), AddressOf(from), static_cast<size_t>(to->TotalBytes()), gpu_->stream());
    Cuda("cuStreamSynchronize", gpu_->stream());
    done(absl::OkStatus());
  }
  void CopyTensorInSameDevice(const Tensor* from, Device*, Tensor* to, StatusCallback done) const override {
    gpu_->Enter();
    if (to->TotalBytes() > 0)
      Cuda("cuMemcpyDtoDAsync", AddressOf(to), AddressOf(from), static_cast<size_t>(to->TotalBytes()), gpu_->stream());
    done(absl::OkStatus());
  }

 private:
  Gpu* const gpu_;
  GpuStream* const stream_;
};

// Stays to the end of the process, with all that it has.
class GpuDevice : public LocalDevice {
 public:
  GpuDevice(const SessionOptions& options, const DeviceAttributes& attributes, int cuda_index)
      : LocalDevice(options, attributes),
        gpu_(*new Gpu(cuda_index)),
        allocator_(*new GpuAllocator(&gpu_)),
        stream_(*new GpuStream(gpu_.stream())),
        context_(*new GpuContext(&gpu_, &stream_)) {
    info_.stream = &stream_;
    info_.default_context = &context_;
    info_.gpu_id = attributes.name().back() - '0';
    set_tensorflow_accelerator_device_info(&info_);
  }
  Allocator* GetAllocator(AllocatorAttributes attributes) override {
    return attributes.on_host() ? cpu_allocator() : &allocator_;
  }
  absl::Status MakeTensorFromProto(const TensorProto& proto, const AllocatorAttributes attributes,
                                   Tensor* tensor) override {
    Tensor on_host(proto.dtype());
    if (!on_host.FromProto(cpu_allocator(), proto)) return absl::InvalidArgumentError("no tensor");
    *tensor = on_host;
    if (attributes.on_host()) return absl::OkStatus();
    *tensor = Tensor(&allocator_, on_host.dtype(), on_host.shape());
    return context_.CopyCPUTensorToDeviceSync(&on_host, this, tensor);
  }
  // Where kernels are handed a context of their own, as in a graph, and where they are not.
  absl::Status TryGetDeviceContext(DeviceContext** context) override {
    context_.Ref();
    *context = &context_;
    return absl::OkStatus();
  }
  absl::Status Sync() override {
    gpu_.Enter();
    Cuda("cuStreamSynchronize", gpu_.stream());
    return absl::OkStatus();
  }

 private:
  Gpu& gpu_;
  GpuAllocator& allocator_;
  GpuStream& stream_;
  GpuContext& context_;
  AcceleratorDeviceInfo info_;
};

class GpuFactory : public DeviceFactory {
 public:
  absl::Status ListPhysicalDevices(std::vector<std::string>* devices) override {
    for (int index = 0; index < Count(); ++index) devices->push_back("/physical_device:GPU:" + std::to_string(index));
    return absl::OkStatus();
  }
  absl::Status CreateDevices(const SessionOptions& options, const std::string& prefix,
                             std::vector<std::unique_ptr<Device>>* devices) override {
    for (int index = 0; index < Count(); ++index) {
      const std::string name = prefix + "/device:GPU:" + std::to_string(index);
      const DeviceAttributes attributes =
          Device::BuildDeviceAttributes(name, DEVICE_GPU, Bytes(1 << 30), DeviceLocality());
      devices->push_back(std::make_unique<GpuDevice>(options, attributes, Count() - 1 - index));
    }
    return absl::OkStatus();
  }

 private:
  static int Count() { return std::atoi(std::getenv("FAKE_DEVICES")); }
};

REGISTER_LOCAL_DEVICE_FACTORY("GPU", GpuFactory, 210);

}  // namespace
