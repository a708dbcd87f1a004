// The kernels of sum.def. bin/generate-ptx compiles this file to sum_sm75.ptx.h and sum_sm80.ptx.h, whose text the core
// carries.
#include "device/sum.h"

using namespace ringtrain;

#define RT_SUMMING(name, Element, Value)                                                                            \
  extern "C" __global__ void __launch_bounds__(kPackThreads) sum_##name(const __grid_constant__ SumLaunch launch) { \
    SumShare<Element, Value>(launch, blockIdx.x, threadIdx.x, blockDim.x);                                          \
  }
#include "device/sum.def"
