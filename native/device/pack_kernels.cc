#include "device/pack_kernels.h"

#include <string>

namespace ringtrain {
namespace {

const char kPtxSm75[] =
#include "device/pack_sm75.ptx.h"
    ;
const char kPtxSm80[] =
#include "device/pack_sm80.ptx.h"
    ;

const std::vector<std::string> kKernels = {
#define RT_PACKING(name, Tensor, Buffer) #name,
#include "device/pack.def"
#undef RT_PACKING
};

constexpr int kNone = -1;

int KernelCalled(const std::string& name) {
  for (size_t kernel = 0; kernel < kKernels.size(); ++kernel)
    if (kKernels[kernel] == name) return static_cast<int>(kernel);
  return kNone;
}

int KernelOf(DType tensor, DType buffer, bool scaled) {
  const int by_value = KernelCalled(std::string(Text(tensor)) + "_" + Text(buffer));
  if (by_value != kNone) return by_value;
  return tensor == buffer && !scaled ? KernelCalled("word" + std::to_string(Bytes(tensor))) : kNone;
}

}  // namespace

bool PackKernels::Can(DType tensor_dtype, DType buffer_dtype, bool scaled) {
  return KernelOf(tensor_dtype, buffer_dtype, scaled) != kNone;
}

Status PackKernels::Load(const Driver& driver, CUdevice device, std::unique_ptr<PackKernels>* kernels) {
  int major = 0;
  RT_TRY(driver.Check(driver.DeviceGetAttribute(&major, kCudaAttributeComputeMajor, device), "compute capability"));
  std::unique_ptr<PackKernels> loaded(new PackKernels(driver));
  RT_TRY(driver.Check(driver.ModuleLoadData(&loaded->module_, major >= 8 ? kPtxSm80 : kPtxSm75), "loading the pack kernels"));
  const auto find = [&](const std::string& name, std::vector<CUfunction>* functions) {
    functions->push_back(nullptr);
    return driver.Check(driver.ModuleGetFunction(&functions->back(), loaded->module_, name.c_str()), "kernel '" + name + "'");
  };
  for (const std::string& name : kKernels) {
    RT_TRY(find("pack_" + name, &loaded->packing_));
    RT_TRY(find("unpack_" + name, &loaded->unpacking_));
  }
  *kernels = std::move(loaded);
  return {};
}

PackKernels::~PackKernels() {
  if (module_ != nullptr) driver_.ModuleUnload(module_);
}

Status PackKernels::Run(const std::vector<CUfunction>& kernels, const PackJob& job, CUstream stream) {
  const CUfunction kernel = kernels[KernelOf(job.tensor_dtype, job.buffer_dtype, job.scale != 1)];
  launch_->buffer = job.buffer;
  launch_->scale = job.scale;
  launch_->found_infinite = job.found_infinite;
  void* parameters[] = {launch_.get()};
  return InLaunches(*job.tensors, Bytes(job.tensor_dtype), launch_.get(), [&](uint32_t chunks) {
    return driver_.Check(driver_.LaunchKernel(kernel, chunks, 1, 1, kPackThreads, 1, 1, 0, stream, parameters, nullptr),
                         "launching a pack kernel of " + std::to_string(chunks) + " blocks");
  });
}

}  // namespace ringtrain
