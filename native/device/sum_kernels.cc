#include "device/sum_kernels.h"

#include <algorithm>
#include <string>

namespace ringtrain {
namespace {

const std::vector<std::string> kKernels = {
#define RT_SUMMING(name, Element, Value) #name,
#include "device/sum.def"
#undef RT_SUMMING
};

size_t KernelOf(DType dtype) { return std::find(kKernels.begin(), kKernels.end(), Text(dtype)) - kKernels.begin(); }

}  // namespace

bool SumKernels::Can(DType dtype, int members) {
  return KernelOf(dtype) < kKernels.size() && members <= static_cast<int>(kMaxSummed);
}

Status SumKernels::Load(const Driver& driver, CUdevice device, CUstream stream, std::unique_ptr<SumKernels>* kernels) {
  std::unique_ptr<SumKernels> loaded(new SumKernels);
  RT_TRY(KernelModule::Load(driver, device, kSumPtx, "the summing kernels", &loaded->module_));
  SumLaunch nothing{};
  for (const std::string& name : kKernels) {
    loaded->kernels_.push_back(nullptr);
    RT_TRY(loaded->module_->Find("sum_" + name, &nothing, stream, &loaded->kernels_.back()));
  }
  *kernels = std::move(loaded);
  return {};
}

SumLaunch LaunchOf(const SumJob& job) {
  SumLaunch launch{};
  launch.to = reinterpret_cast<uint64_t>(job.to);
  launch.own = reinterpret_cast<uint64_t>(job.own);
  launch.received = reinterpret_cast<uint64_t>(job.received);
  launch.stride = job.stride;
  launch.elements = job.elements;
  launch.members = static_cast<uint32_t>(job.factors.size());
  launch.me = static_cast<uint32_t>(job.me);
  launch.divisor = job.divisor;
  launch.postscale = job.postscale;
  std::copy(job.factors.begin(), job.factors.end(), launch.factors);
  return launch;
}

Status SumKernels::Sum(const SumJob& job, CUstream stream) const {
  if (job.elements == 0) return {};
  SumLaunch launch = LaunchOf(job);
  const unsigned blocks = static_cast<unsigned>((job.elements + kPackChunk - 1) / kPackChunk);
  return module_->Launch(kernels_[KernelOf(job.dtype)], blocks, &launch, stream, "a summing kernel");
}

}  // namespace ringtrain
