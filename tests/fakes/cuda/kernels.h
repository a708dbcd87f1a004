// Kernels of the product as host code, found by the name that their PTX gives them.
#ifndef RINGTRAIN_TESTS_FAKES_CUDA_KERNELS_H_
#define RINGTRAIN_TESTS_FAKES_CUDA_KERNELS_H_

#include <string>

#include "cuda/module.h"

namespace fakes {

// nullptr if the product has no kernel of this name.
decltype(Function::body) FindKernel(const std::string& name);

}  // namespace fakes
#endif  // RINGTRAIN_TESTS_FAKES_CUDA_KERNELS_H_
