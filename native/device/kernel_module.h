// KernelModule: the kernels of a Ptx, on one device: loaded through the driver for as long as it lives.
// All calls are made with the device's context current, by one thread at a time.
#ifndef RINGTRAIN_DEVICE_KERNEL_MODULE_H_
#define RINGTRAIN_DEVICE_KERNEL_MODULE_H_

#include <memory>
#include <string>

#include "base/status.h"
#include "device/driver.h"
#include "device/ptx.h"

namespace ringtrain {

class KernelModule {
 public:
  // what: "the pack kernels", for the text of an error.
  static Status Load(const Driver& driver, CUdevice device, const Ptx& ptx, const std::string& what,
                     std::unique_ptr<KernelModule>* module);
  ~KernelModule() { driver_.ModuleUnload(module_); }
  KernelModule(const KernelModule&) = delete;
  KernelModule& operator=(const KernelModule&) = delete;

  // Launched once on the stream, on a parameter that leaves it nothing to do: the driver loads a kernel at its first
  // launch, and waits until the context's other kernels are done to do so. One of those may be NCCL's, and wait for a
  // peer that waits for this process.
  Status Find(const std::string& name, void* idle_parameter, CUstream stream, CUfunction* kernel) const;
  // kPackThreads threads a block; the driver copies the one parameter. what: "a pack kernel", for the text of an error.
  Status Launch(CUfunction kernel, unsigned blocks, void* parameter, CUstream stream, const std::string& what) const;

 private:
  KernelModule(const Driver& driver, CUmodule module) : driver_(driver), module_(module) {}

  const Driver& driver_;
  const CUmodule module_;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_DEVICE_KERNEL_MODULE_H_
