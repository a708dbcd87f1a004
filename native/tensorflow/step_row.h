// What ranks say of a step to find that they step alike, as kernels: the row of this rank, and whether the maximum of
// all ranks' rows says that all is well. ringtrain/_training/watch.py has the form of a row, and makes it for eager
// steps.
#ifndef RINGTRAIN_TENSORFLOW_STEP_ROW_H_
#define RINGTRAIN_TENSORFLOW_STEP_ROW_H_

#include <cstddef>

#include "tensorflow/kernel_api.h"

namespace ringtrain::tensorflow {

constexpr size_t kSaid = 16;            // bytes: a digest of the settings, and the learning rate as float64
constexpr size_t kRow = 2 * kSaid + 1;  // what is said, its complement, and whether a look is asked for

// The input is the learning rate, of one element, as float64; 0 without one.
void* CreateStepRow(TF_OpKernelConstruction* construction);
void ComputeStepRow(void* step_row, TF_OpKernelContext* context);
void DeleteStepRow(void* step_row);

// The input is such a maximum.
void ComputeIsQuiet(void*, TF_OpKernelContext* context);

}  // namespace ringtrain::tensorflow
#endif  // RINGTRAIN_TENSORFLOW_STEP_ROW_H_
