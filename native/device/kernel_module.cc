#include "device/kernel_module.h"

#include "device/pack.h"

namespace ringtrain {

Status KernelModule::Load(const Driver& driver, CUdevice device, const Ptx& ptx, const std::string& what,
                          std::unique_ptr<KernelModule>* module) {
  int major = 0;
  RT_TRY(driver.Check(driver.DeviceGetAttribute(&major, kCudaAttributeComputeMajor, device), "compute capability"));
  CUmodule loaded;
  RT_TRY(driver.Check(driver.ModuleLoadData(&loaded, major >= 8 ? ptx.sm80 : ptx.sm75), "loading " + what));
  module->reset(new KernelModule(driver, loaded));
  return {};
}

Status KernelModule::Find(const std::string& name, void* idle_parameter, CUstream stream, CUfunction* kernel) const {
  const std::string what = "kernel '" + name + "'";
  RT_TRY(driver_.Check(driver_.ModuleGetFunction(kernel, module_, name.c_str()), what));
  return Launch(*kernel, 1, idle_parameter, stream, what);
}

Status KernelModule::Launch(CUfunction kernel, unsigned blocks, void* parameter, CUstream stream,
                            const std::string& what) const {
  void* parameters[] = {parameter};
  return driver_.Check(driver_.LaunchKernel(kernel, blocks, 1, 1, kPackThreads, 1, 1, 0, stream, parameters, nullptr),
                       "launching " + what + " of " + std::to_string(blocks) + " blocks");
}

}  // namespace ringtrain
