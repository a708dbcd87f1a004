#include "device/sum_kernels.h"

#include <algorithm>
#include <string>

namespace ringtrain {
namespace {

const char kPtxSm75[] =
#include "device/sum_sm75.ptx.h"
    ;
const char kPtxSm80[] =
#include "device/sum_sm80.ptx.h"
    ;

const std::vector<std::string> kKernels = {
#define RT_SUMMING(name, Element, Value) #name,
#include "device/sum.def"
#undef RT_SUMMING
};

size_t KernelOf(DType dtype) { return std::find(kKernels.begin(), kKernels.end(), Text(dtype)) - kKernels.begin(); }

}  // namespace

bool SumKernels::Can(DType dtype, int members) {
  return KernelOf(dtype) < kKernels.size() && members <= static_cast<int>(kMostSummed);
}

Status SumKernels::Load(const Driver& driver, CUdevice device, std::unique_ptr<SumKernels>* kernels) {
  int major = 0;
  RT_TRY(driver.Check(driver.DeviceGetAttribute(&major, kCudaAttributeComputeMajor, device), "compute capability"));
  std::unique_ptr<SumKernels> loaded(new SumKernels(driver));
  RT_TRY(driver.Check(driver.ModuleLoadData(&loaded->module_, major >= 8 ? kPtxSm80 : kPtxSm75), "loading the summing kernels"));
  for (const std::string& name : kKernels) {
    loaded->functions_.push_back(nullptr);
    RT_TRY(driver.Check(driver.ModuleGetFunction(&loaded->functions_.back(), loaded->module_, ("sum_" + name).c_str()),
                        "kernel 'sum_" + name + "'"));
  }
  *kernels = std::move(loaded);
  return {};
}

SumKernels::~SumKernels() {
  if (module_ != nullptr) driver_.ModuleUnload(module_);
}

Status SumKernels::Sum(const SumJob& job, CUstream stream) const {
  if (job.elements == 0) return {};
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
  void* parameters[] = {&launch};
  const unsigned blocks = static_cast<unsigned>((job.elements + kPackChunk - 1) / kPackChunk);
  const CUfunction kernel = functions_[KernelOf(job.dtype)];
  return driver_.Check(driver_.LaunchKernel(kernel, blocks, 1, 1, kPackThreads, 1, 1, 0, stream, parameters, nullptr),
                       "launching a summing kernel of " + std::to_string(blocks) + " blocks");
}

}  // namespace ringtrain
