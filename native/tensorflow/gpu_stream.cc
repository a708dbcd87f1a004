#include "tensorflow/gpu_stream.h"

#include <cstddef>

namespace ringtrain::tensorflow {
namespace {

// The C interface has TF_GetStream, but gives by it the streams of plugins' devices alone. What it looks at on its way
// is what TensorFlow's own kernels use, `context->op_device_context()->stream()->platform_specific_handle()`, inline
// functions of C++ on objects that the C interface hands out under other names. These are the places where they look:
// bytes from an object's beginning, and entries of its table of virtual functions (Itanium C++ ABI). They are the same
// in each release that ringtrain/tensorflow/library.py takes for tested; no other one comes here unless the user
// insists. tests/with_tensorflow/test_tensorflow_gpu.py has TensorFlow's headers make the objects.
constexpr size_t kParams = 0x18;               // OpKernelContext::params_
constexpr size_t kDevice = 0x28;               // OpKernelContext::Params::device
constexpr size_t kDeviceContext = 0xd8;        // OpKernelContext::Params::op_device_context, which may be null
constexpr size_t kDefaultContext = 0x8;        // DeviceBase::AcceleratorDeviceInfo::default_context
constexpr size_t kAcceleratorDeviceInfo = 3;   // of DeviceBase: tensorflow_accelerator_device_info()
constexpr size_t kStream = 3;                  // of DeviceContext: stream()
constexpr size_t kIsPluggableDevice = 9;       // of DeviceContext
constexpr size_t kPlatformSpecificHandle = 2;  // of stream_executor::Stream: a struct of one pointer, in a register

void* Member(void* object, size_t offset) { return *reinterpret_cast<void**>(static_cast<char*>(object) + offset); }

template <typename Result>
Result Call(void* object, size_t entry) {
  void** const functions = *static_cast<void***>(object);
  return reinterpret_cast<Result (*)(void*)>(functions[entry])(object);
}

void* DeviceContextOf(TF_OpKernelContext* context) {
  void* const params = Member(context, kParams);
  if (void* const own = Member(params, kDeviceContext)) return own;
  void* const info = Call<void*>(Member(params, kDevice), kAcceleratorDeviceInfo);
  return info == nullptr ? nullptr : Member(info, kDefaultContext);
}

}  // namespace

void* GpuStreamOf(TF_OpKernelContext* context) {
  void* const device_context = DeviceContextOf(context);
  if (device_context == nullptr || Call<bool>(device_context, kIsPluggableDevice)) return nullptr;
  void* const stream = Call<void*>(device_context, kStream);
  return stream == nullptr ? nullptr : Call<void*>(stream, kPlatformSpecificHandle);
}

}  // namespace ringtrain::tensorflow
