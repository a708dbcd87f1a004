// CUresult: the codes that the fake libcuda answers with.
#ifndef RINGTRAIN_TESTS_FAKES_CUDA_RESULTS_H_
#define RINGTRAIN_TESTS_FAKES_CUDA_RESULTS_H_

namespace fakes {

enum Result : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kInvalidContext = 201,
  kNoBinaryForGpu = 209,
  kInvalidPtx = 218,
  kUnsupportedPtxVersion = 222,
  kInvalidHandle = 400,
  kNotFound = 500,
  kNotReady = 600,
  kLaunchOutOfResources = 701,
  kHostMemoryAlreadyRegistered = 712,
  kHostMemoryNotRegistered = 713,
  kCaptureUnsupported = 900,
};

}  // namespace fakes
#endif  // RINGTRAIN_TESTS_FAKES_CUDA_RESULTS_H_
