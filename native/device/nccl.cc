#include "device/nccl.h"

#include <dlfcn.h>

#include <atomic>

#include "base/mutex.h"

namespace ringtrain {
namespace {

constexpr int kOldestNccl = 21800;
constexpr char kSoname[] = "libnccl.so.2";

Mutex opening;
std::string suggested RT_GUARDED_BY(opening);
std::string suggested_interfaces RT_GUARDED_BY(opening);
std::atomic<const Nccl*> opened{nullptr};  // kept to the end of the process: it may have threads of its own

Status Refuse(const std::string& library, const std::string& problem) {
  return Status::Unsupported("NCCL '" + library + "': " + problem);
}

// What a result is most often a sign of; "" for those that nobody is known to meet.
const char* HintAt(ncclResult_t result) {
  switch (result) {
    case 1:
      return " See nvidia-smi and dmesg for faults of the GPU, and whether its memory is full.";
    case 2:
      return " See whether the network is up, whether the hosts reach each other, and whether /dev/shm is full.";
    case 3:
      return " See what NCCL says of itself, or try another release of it.";
    case 4:
    case 5:
      return " See whether the program calls NCCL by itself, too; else please report it.";
    case 6:
      return " See the first error of the other ranks: one has ended, or the network was cut.";
    default:
      return "";
  }
}

// A second copy of NCCL in a process would order its launches apart from the first one's, so what is loaded comes
// first.
void* FindObject(const std::string& library, std::string* tried) RT_REQUIRES(opening) {
  *tried = library.empty() ? kSoname : library;
  if (!library.empty()) return dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (void* loaded = dlopen(kSoname, RTLD_NOW | RTLD_NOLOAD)) return loaded;
  if (!suggested.empty())
    if (void* wheel = dlopen(suggested.c_str(), RTLD_NOW | RTLD_LOCAL)) return wheel;
  return dlopen(kSoname, RTLD_NOW | RTLD_LOCAL);
}

Status Load(const std::string& library, Nccl* nccl) RT_REQUIRES(opening) {
  std::string tried;
  void* object = FindObject(library, &tried);
  if (object == nullptr)
    return Refuse(tried, "expected a library but found: " + std::string(dlerror()) +
                             ". Install ringtrain[cu12] or ringtrain[cu13], or set gpu_plane=staged.");
#define RT_NCCL(name, result, parameters, since) *reinterpret_cast<void**>(&nccl->name) = dlsym(object, "nccl" #name);
#include "device/nccl.def"
#undef RT_NCCL
  Dl_info where;
  nccl->interfaces = suggested_interfaces;
  nccl->path = tried;
  if (nccl->GetVersion != nullptr && dladdr(reinterpret_cast<void*>(nccl->GetVersion), &where) != 0)
    nccl->path = where.dli_fname;
  if (nccl->GetVersion == nullptr || nccl->GetVersion(&nccl->version) != kNcclSuccess)
    return Refuse(nccl->path, "expected ncclGetVersion but found none. Point nccl_lib at NCCL.");
  if (nccl->version < kOldestNccl)
    return Refuse(nccl->path, "expected version " + NcclVersionText(kOldestNccl) + " or newer but found " +
                                  NcclVersionText(nccl->version) + ". Update it, or set gpu_plane=staged.");
#define RT_NCCL(name, result, parameters, since)                              \
  if (since <= kOldestNccl && nccl->name == nullptr)                          \
    return Refuse(nccl->path, "expected the function nccl" #name              \
                              " but found none. Point nccl_lib at an intact " \
                              "NCCL.");
#include "device/nccl.def"
#undef RT_NCCL
  return {};
}

}  // namespace

Status Nccl::Open(const std::string& library, const Nccl** nccl) {
  MutexLock lock(opening);
  if (opened.load() == nullptr) {
    auto* loaded = new Nccl;
    Status status = Load(library, loaded);
    if (!status.ok()) {
      delete loaded;
      return status;
    }
    opened.store(loaded);
  }
  *nccl = opened.load();
  return {};
}

const Nccl* Nccl::Opened() { return opened.load(); }

void Nccl::Suggest(const std::string& library, const std::string& socket_interfaces) {
  MutexLock lock(opening);
  suggested = library;
  suggested_interfaces = socket_interfaces;
}

std::string NcclVersionText(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

std::string Nccl::VersionText() const { return NcclVersionText(version); }

std::string Nccl::NetworkText() const {
  return " NCCL_SOCKET_IFNAME is " + (interfaces.empty() ? "not set" : "'" + interfaces + "'") +
         "; NCCL_DEBUG=WARN tells more.";
}

Status Nccl::Check(ncclResult_t result, const std::string& what, ncclComm_t comm) const {
  if (result == kNcclSuccess || result == kNcclInProgress) return {};
  const char* last = GetLastError(comm);
  return Status::Internal(what + ": expected success but found NCCL error " + std::to_string(result) + ", " +
                          GetErrorString(result) +
                          (last == nullptr || *last == '\0' ? std::string() : "; " + std::string(last)) + "." +
                          HintAt(result) + NetworkText());
}

ncclDataType_t NcclDType(DType dtype) {
  switch (dtype) {
    case DType::kInt8:
      return 0;
    case DType::kUInt8:
      return 1;
    case DType::kBool:
      return 1;
    case DType::kInt32:
      return 2;
    case DType::kUInt32:
      return 3;
    case DType::kInt64:
      return 4;
    case DType::kUInt64:
      return 5;
    case DType::kFloat16:
      return 6;
    case DType::kFloat32:
      return 7;
    case DType::kFloat64:
      return 8;
    case DType::kBFloat16:
      return 9;
    default:
      return -1;
  }
}

ncclRedOp_t NcclReduction(DType dtype, Reduction reduction) {
  constexpr ncclRedOp_t kSum = 0, kProduct = 1, kMax = 2, kMin = 3;
  const bool boolean = dtype == DType::kBool;
  switch (Find(reduction)->fold) {
    case Fold::kMultiply:
      return boolean ? kMin : kProduct;
    case Fold::kGreatest:
      return kMax;
    case Fold::kLeast:
      return kMin;
    default:
      return boolean ? kMax : kSum;  // an average is a sum that is scaled afterwards
  }
}

}  // namespace ringtrain
