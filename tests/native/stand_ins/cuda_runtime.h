// The names of CUDA's run-time headers that nccl.h uses, so that it compiles without them.
#ifndef RINGTRAIN_TESTS_NATIVE_STAND_INS_CUDA_RUNTIME_H_
#define RINGTRAIN_TESTS_NATIVE_STAND_INS_CUDA_RUNTIME_H_

#include <stddef.h>
#include <stdint.h>

#define CUDART_VERSION 10000  // so that it asks for no type of 8 or 16 bits
typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;

#endif  // RINGTRAIN_TESTS_NATIVE_STAND_INS_CUDA_RUNTIME_H_
