#include "device/driver.h"

#include <dlfcn.h>

#include <atomic>

#include "base/mutex.h"

namespace ringtrain {
namespace {

using GetProcAddress = CUresult (*)(const char* name, void** function, int version, uint64_t flags, int* status);

constexpr char kAdvice[] = " Install NVIDIA's driver, or pass tensors in host memory.";

Mutex opening;
std::atomic<const Driver*> opened{nullptr};  // kept to the end of the process: CUDA cannot be unloaded either

std::string TextOf(int version) { return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10); }

Status Refuse(const std::string& library, const std::string& problem) {
  return Status::Unsupported("CUDA driver '" + library + "': " + problem);
}

Status Resolve(const std::string& library, GetProcAddress find, Driver* driver) {
  int known = 0;
#define RT_CUDA(name, version, parameters)                                                                  \
  if (find("cu" #name, reinterpret_cast<void**>(&driver->name), version, 0, &known) != kCudaSuccess ||      \
      driver->name == nullptr)                                                                              \
    return Refuse(library, "expected the function cu" #name " but found none. Update the driver to CUDA " + \
                               TextOf(kOldestDriver) + " or newer.");
#include "device/driver.def"
#undef RT_CUDA
  return {};
}

Status Start(const std::string& library, Driver* driver) {
  RT_TRY(driver->Check(driver->Init(0), "cuInit of '" + library + "'"));
  RT_TRY(driver->Check(driver->DriverGetVersion(&driver->version), "cuDriverGetVersion of '" + library + "'"));
  if (driver->version < kOldestDriver)
    return Refuse(library, "expected CUDA " + TextOf(kOldestDriver) + " or newer but found " + driver->VersionText() +
                               ". Update the driver.");
  int devices = 0;
  RT_TRY(driver->Check(driver->DeviceGetCount(&devices), "cuDeviceGetCount of '" + library + "'"));
  if (devices == 0)
    return Refuse(library, "expected a GPU but found none. Look at CUDA_VISIBLE_DEVICES and at nvidia-smi.");
  return {};
}

Status Load(const std::string& library, Driver* driver) RT_REQUIRES(opening) {
  void* object = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (object == nullptr)
    return Refuse(library, "expected a library but found: " + std::string(dlerror()) + "." + kAdvice);
  const auto find = reinterpret_cast<GetProcAddress>(dlsym(object, "cuGetProcAddress_v2"));
  if (find == nullptr)
    return Refuse(library, "expected CUDA " + TextOf(kOldestDriver) +
                               " or newer but found one without cuGetProcAddress_v2. "
                               "Update the driver.");
  Dl_info where;
  driver->path = dladdr(reinterpret_cast<void*>(find), &where) != 0 ? where.dli_fname : library;
  RT_TRY(Resolve(library, find, driver));
  return Start(library, driver);
}

}  // namespace

Status Driver::Open(const std::string& library, const Driver** driver) {
  MutexLock lock(opening);
  if (opened.load() == nullptr) {
    auto* loaded = new Driver;
    Status status = Load(library.empty() ? "libcuda.so.1" : library, loaded);
    if (!status.ok()) {
      delete loaded;
      return status;
    }
    opened.store(loaded);
  }
  *driver = opened.load();
  return {};
}

const Driver* Driver::Opened() { return opened.load(); }

std::string Driver::VersionText() const { return TextOf(version); }

Status Driver::Check(CUresult result, const std::string& what) const {
  if (result == kCudaSuccess) return {};
  const char* text = nullptr;
  if (GetErrorString(result, &text) != kCudaSuccess || text == nullptr) text = "an unknown error";
  return Status::Internal(what + ": expected success but found CUDA error " + std::to_string(result) + ", " + text +
                          ".");
}

}  // namespace ringtrain
