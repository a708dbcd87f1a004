// Modules of the fake libcuda: PTX text is read as far as a driver must to accept it, and its kernels run as host code.
#ifndef RINGTRAIN_TESTS_FAKES_CUDA_MODULE_H_
#define RINGTRAIN_TESTS_FAKES_CUDA_MODULE_H_

#include <cstddef>
#include <map>
#include <string>

namespace fakes {

struct Launch3 {
  unsigned x = 0, y = 0, z = 0;
};

struct Function {
  std::string name;
  size_t parameter_bytes;  // as the PTX declares the only parameter
  // The kernel as host code, on the stream's thread.
  void (*body)(const void* parameters, Launch3 grid, Launch3 block);
  bool loaded = false;
};

struct Module {
  int device;
  std::map<std::string, Function> functions;
};

// CUresult: 0 and the module, or what a driver of this version with a device of this capability answers to the text.
int LoadModule(const char* ptx, int driver_version, int capability, Module* module);

}  // namespace fakes
#endif  // RINGTRAIN_TESTS_FAKES_CUDA_MODULE_H_
