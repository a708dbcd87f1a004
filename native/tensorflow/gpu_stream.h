// The CUDA stream on which TensorFlow's own GPU device runs a kernel.
#ifndef RINGTRAIN_TENSORFLOW_GPU_STREAM_H_
#define RINGTRAIN_TENSORFLOW_GPU_STREAM_H_

#include "tensorflow/kernel_api.h"

namespace ringtrain::tensorflow {

// A CUstream; nullptr on a device that has none: the CPU, and those that plugins bring, whose streams are their own.
void* GpuStreamOf(TF_OpKernelContext* context);

}  // namespace ringtrain::tensorflow
#endif  // RINGTRAIN_TENSORFLOW_GPU_STREAM_H_
