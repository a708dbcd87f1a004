// The CUDA driver of this machine: found when it is first wanted, by dlopen, so that nothing here needs a CUDA header
// or library to build, to import, or to work on tensors in host memory. driver.def lists what is called.
#ifndef RINGTRAIN_DEVICE_DRIVER_H_
#define RINGTRAIN_DEVICE_DRIVER_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/status.h"

namespace ringtrain {

// The driver's types and values, as cuda.h has them.
using CUresult = int;
using CUdevice = int;
using CUdeviceptr = uint64_t;
using CUcontext = struct CudaContext*;
using CUstream = struct CudaStream*;
using CUevent = struct CudaEvent*;
using CUmodule = struct CudaModule*;
using CUfunction = struct CudaFunction*;

constexpr CUresult kCudaSuccess = 0;
constexpr CUresult kCudaNotReady = 600;
constexpr unsigned kCudaStreamNonBlocking = 1;
constexpr unsigned kCudaEventDisableTiming = 2;
constexpr unsigned kCudaHostPortable = 1;
constexpr int kCudaCaptureModeRelaxed = 2;
constexpr int kCudaAttributeComputeMajor = 75, kCudaAttributeComputeMinor = 76;
constexpr int kCudaAttributePciBus = 33, kCudaAttributePciDevice = 34, kCudaAttributePciDomain = 50;
constexpr int kCudaPointerMemoryType = 2, kCudaPointerIsManaged = 8, kCudaPointerDeviceOrdinal = 9;

inline CUdeviceptr AddressOf(const void* memory) { return reinterpret_cast<CUdeviceptr>(memory); }

struct Driver {
#define RT_CUDA(name, version, parameters) CUresult(*name) parameters = nullptr;
#include "device/driver.def"
#undef RT_CUDA
  int version = 0;   // of the API that the driver has: 1000 * major + 10 * minor
  std::string path;  // of the library

  // The process's driver, initialised; the first successful call decides, later ones get the same. library: a path, or
  // "" for libcuda.so.1. Unsupported, with what is missing and what to do, where there is none, it is too old or it
  // finds no device. Any thread.
  static Status Open(const std::string& library, const Driver** driver);
  // What Open found, or nullptr.
  static const Driver* Opened();

  std::string VersionText() const;
  // Not ok if a call failed. what: what was being done, for the text: "cuMemAlloc of 64 bytes on cuda:0".
  Status Check(CUresult result, const std::string& what) const;
};

// CUDA 12.1: the oldest whose driver loads our kernels and has cuGetProcAddress_v2.
constexpr int kOldestDriver = 12010;

}  // namespace ringtrain
#endif  // RINGTRAIN_DEVICE_DRIVER_H_
