// The summing kernels on one device: loaded through the driver from the PTX that fits the GPU, and launched on a
// stream. All calls are made with the device's context current, by one thread at a time.
#ifndef RINGTRAIN_DEVICE_SUM_KERNELS_H_
#define RINGTRAIN_DEVICE_SUM_KERNELS_H_

#include <memory>
#include <vector>

#include "base/status.h"
#include "device/driver.h"
#include "device/kernel_module.h"
#include "device/sum.h"
#include "tables/tables.h"

namespace ringtrain {

// One run of elements of all members, which are added in the order of the members; see sum.h.
struct SumJob {
  DType dtype;
  const void* own;
  const void* received;
  size_t stride;  // elements from one of the others' runs to the next
  void* to;
  size_t elements;
  int me;
  std::vector<float> factors;  // by member
  float divisor = 1;
  float postscale = 1;
};

// What the kernel is given for it.
SumLaunch LaunchOf(const SumJob& job);

class SumKernels {
 public:
  // All are launched once on the stream, on no element.
  static Status Load(const Driver& driver, CUdevice device, CUstream stream, std::unique_ptr<SumKernels>* kernels);

  // Whether there is a kernel for so many members.
  static bool Can(DType dtype, int members);

  // Enqueued when it returns; the memory must stay until the stream has come to it. job: one that Can.
  Status Sum(const SumJob& job, CUstream stream) const;

 private:
  SumKernels() = default;

  std::unique_ptr<KernelModule> module_;
  std::vector<CUfunction> kernels_;  // in the order of sum.def
};

}  // namespace ringtrain
#endif  // RINGTRAIN_DEVICE_SUM_KERNELS_H_
