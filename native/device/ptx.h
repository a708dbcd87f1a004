// The kernels' programs: PTX text, ended by a 0 as the driver wants it.
#ifndef RINGTRAIN_DEVICE_PTX_H_
#define RINGTRAIN_DEVICE_PTX_H_

namespace ringtrain {

// One program, for GPUs from a compute capability on.
struct Ptx {
  const char* sm75;
  const char* sm80;
};

extern const Ptx kPackPtx, kSumPtx;

}  // namespace ringtrain
#endif  // RINGTRAIN_DEVICE_PTX_H_
