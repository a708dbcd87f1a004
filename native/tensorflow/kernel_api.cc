#include "tensorflow/kernel_api.h"

#include <dlfcn.h>

namespace ringtrain::tensorflow {
namespace {

constexpr char kFrameworkLibrary[] = "libtensorflow_framework.so.2";

KernelApi Resolve() {
  KernelApi api{};
  void* library = dlopen(kFrameworkLibrary, RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) {
    api.missing = std::string(kFrameworkLibrary) + ", which is not loaded";
    return api;
  }
#define RT_TF(result, name, parameters)                                   \
  api.name = reinterpret_cast<decltype(api.name)>(dlsym(library, #name)); \
  if (api.name == nullptr && api.missing.empty()) api.missing = #name;
#include "tensorflow/kernel_api.def"
#undef RT_TF
  return api;
}

}  // namespace

const KernelApi& tf() {
  static const KernelApi api = Resolve();
  return api;
}

}  // namespace ringtrain::tensorflow
