// What the fake NCCL uses of the fake libcuda: one exported function, fake_cuda_seam, gives the table.
//
// It is looked up in the handle of dlopen("libcuda.so.1", RTLD_NOLOAD), because the product opens libcuda with
// RTLD_LOCAL.
#ifndef RINGTRAIN_TESTS_FAKES_SEAM_H_
#define RINGTRAIN_TESTS_FAKES_SEAM_H_

#include <cstddef>
#include <cstdint>

namespace fakes {

class Moment;
struct Stream;

struct CudaSeam {
  // Device whose context is current on this thread, -1 if none is.
  int (*current_device)();
  void (*identity)(int device, char uuid[16], int64_t* bus);
  // The stream of a handle as a user passes it; nullptr if it is capturing. A dead handle is a violation.
  Stream* (*stream)(void* handle);
  int (*device_of_stream)(Stream* stream);
  // Runs work(argument) on the stream's thread, after what was enqueued before.
  void (*launch)(Stream* stream, void (*work)(void*), void* argument);
  // Device that owns all of [address, address + bytes), -1 for anything else.
  int (*device_of_memory)(uint64_t address, size_t bytes);
  // Address at which the stream's thread reaches device memory; it counts as in use until it is released.
  void* (*use)(uint64_t address, size_t bytes, const char* user);
  void (*release)(uint64_t address);
  uint64_t (*allocate)(size_t bytes);
  void (*free)(uint64_t address);
};

}  // namespace fakes
#endif  // RINGTRAIN_TESTS_FAKES_SEAM_H_
