#include "device/pack_kernels.h"

#include <string>

namespace ringtrain {
namespace {

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

Status PackKernels::Load(const Driver& driver, CUdevice device, CUstream stream,
                         std::unique_ptr<PackKernels>* kernels) {
  std::unique_ptr<PackKernels> loaded(new PackKernels);
  RT_TRY(KernelModule::Load(driver, device, kPackPtx, "the pack kernels", &loaded->module_));
  for (const std::string& name : kKernels) {
    loaded->packing_.push_back(nullptr);
    loaded->unpacking_.push_back(nullptr);
    RT_TRY(loaded->module_->Find("pack_" + name, loaded->launch_.get(), stream, &loaded->packing_.back()));
    RT_TRY(loaded->module_->Find("unpack_" + name, loaded->launch_.get(), stream, &loaded->unpacking_.back()));
  }
  *kernels = std::move(loaded);
  return {};
}

Status PackKernels::Run(const std::vector<CUfunction>& kernels, const PackJob& job, CUstream stream) {
  const CUfunction kernel = kernels[KernelOf(job.tensor_dtype, job.buffer_dtype, job.scale != 1)];
  launch_->buffer = job.buffer;
  launch_->scale = job.scale;
  return InLaunches(*job.tensors, Bytes(job.tensor_dtype), launch_.get(), [&](uint32_t chunks) {
    return module_->Launch(kernel, chunks, launch_.get(), stream, "a pack kernel");
  });
}

}  // namespace ringtrain
