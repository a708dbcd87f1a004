// The kernels of pack.def. bin/generate-ptx compiles this file to pack_sm75.ptx.h and pack_sm80.ptx.h, whose text the
// core carries.
#include "device/pack.h"

using namespace ringtrain;

#define RT_PACKING(name, Tensor, Buffer)                                                                              \
  extern "C" __global__ void __launch_bounds__(kPackThreads) pack_##name(const __grid_constant__ PackLaunch launch) { \
    PackShare<Tensor, Buffer>(launch, blockIdx.x, gridDim.x, threadIdx.x, blockDim.x);                                \
  }                                                                                                                   \
  extern "C" __global__ void __launch_bounds__(kPackThreads)                                                          \
      unpack_##name(const __grid_constant__ PackLaunch launch) {                                                      \
    UnpackShare<Tensor, Buffer>(launch, blockIdx.x, gridDim.x, threadIdx.x, blockDim.x);                              \
  }
#include "device/pack.def"
