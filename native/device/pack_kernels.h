// The pack kernels on one device: loaded through the driver from the PTX that fits the GPU, and launched on a stream.
// All calls are made with the device's context current, by one thread at a time.
#ifndef RINGTRAIN_DEVICE_PACK_KERNELS_H_
#define RINGTRAIN_DEVICE_PACK_KERNELS_H_

#include <memory>
#include <vector>

#include "base/status.h"
#include "device/driver.h"
#include "device/kernel_module.h"
#include "device/pack_plan.h"
#include "tables/tables.h"

namespace ringtrain {

// Tensors of one dtype and a fusion buffer of the same or another.
struct PackJob {
  DType tensor_dtype;
  DType buffer_dtype;
  CUdeviceptr buffer;
  const std::vector<PackedTensor>* tensors;
  float scale = 1;  // factor on each value
};

class PackKernels {
 public:
  // All are launched once on the stream, on no tensor.
  static Status Load(const Driver& driver, CUdevice device, CUstream stream, std::unique_ptr<PackKernels>* kernels);

  // Whether there is a kernel: for float32, float16 and bfloat16 with or without a scale, and for equal dtypes without
  // one.
  static bool Can(DType tensor_dtype, DType buffer_dtype, bool scaled);

  // Enqueued when they return; the memory must stay until the stream has come to it. job: one that Can.
  Status Pack(const PackJob& job, CUstream stream) { return Run(packing_, job, stream); }
  Status Unpack(const PackJob& job, CUstream stream) { return Run(unpacking_, job, stream); }

 private:
  PackKernels() : launch_(new PackLaunch()) {}
  Status Run(const std::vector<CUfunction>& kernels, const PackJob& job, CUstream stream);

  std::unique_ptr<KernelModule> module_;
  std::vector<CUfunction> packing_, unpacking_;  // in the order of pack.def
  std::unique_ptr<PackLaunch> launch_;           // filled again for each launch: the driver copies it
};

}  // namespace ringtrain
#endif  // RINGTRAIN_DEVICE_PACK_KERNELS_H_
