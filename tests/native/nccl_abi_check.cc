// Compares device/nccl.h and nccl.def with the nccl.h of a release; with an argument, calls that release's library.
//
// Layouts, signatures and most values are checked while compiling, the rest by a run without arguments. Run as
// `nccl_abi_check LIBRARY`, on a machine without a GPU, it loads the library as the product does and goes as far as one
// can come there: the version, an id, and the error of a communicator.
#include <nccl.h>

#include <cstdio>
#include <cstring>

#include "device/nccl.h"
#include "signatures.h"

namespace {

using Ours = ringtrain::NcclConfig;

#define RT_SAME_FIELD(ours, theirs)                                               \
  static_assert(offsetof(Ours, ours) == offsetof(ncclConfig_t, theirs), #theirs); \
  static_assert(kAlike<decltype(Ours::ours), decltype(ncclConfig_t::theirs)>, #theirs);
RT_SAME_FIELD(size, size)
RT_SAME_FIELD(magic, magic)
RT_SAME_FIELD(version, version)
RT_SAME_FIELD(blocking, blocking)
RT_SAME_FIELD(cga_cluster_size, cgaClusterSize)
RT_SAME_FIELD(least_ctas, minCTAs)
RT_SAME_FIELD(most_ctas, maxCTAs)
RT_SAME_FIELD(net_name, netName)
RT_SAME_FIELD(split_share, splitShare)
RT_SAME_FIELD(traffic_class, trafficClass)
static_assert(sizeof(Ours) == offsetof(ncclConfig_t, commName), "our prefix ends where a field begins");
static_assert(sizeof(ringtrain::ncclUniqueId) == sizeof(ncclUniqueId), "ncclUniqueId");
static_assert(NCCL_CONFIG_UNDEF_INT == INT_MIN, "NCCL_CONFIG_UNDEF_INT");
static_assert(ncclSuccess == ringtrain::kNcclSuccess && ncclInProgress == ringtrain::kNcclInProgress, "ncclResult_t");

#define RT_NCCL(name, result, parameters, since)                                                            \
  static_assert(SameSignature(decltype (&::nccl##name)(nullptr), decltype(ringtrain::Nccl::name)(nullptr)), \
                "nccl" #name);
#include "device/nccl.def"
#undef RT_NCCL

int failures = 0;

template <typename Found>
void Expect(const char* what, Found found, long expected) {
  if (found == static_cast<Found>(expected)) return;
  std::printf("%s is %ld, but %ld in nccl.h\n", what, static_cast<long>(found), expected);
  ++failures;
}

void CheckValues() {
  using ringtrain::DType;
  using ringtrain::NcclDType;
  using ringtrain::NcclReduction;
  using ringtrain::Reduction;
  const ncclConfig_t initial = NCCL_CONFIG_INITIALIZER;
  const Ours ours;
  Expect("magic", ours.magic, initial.magic);
  Expect("int8", NcclDType(DType::kInt8), ncclInt8);
  Expect("uint8", NcclDType(DType::kUInt8), ncclUint8);
  Expect("int32", NcclDType(DType::kInt32), ncclInt32);
  Expect("int64", NcclDType(DType::kInt64), ncclInt64);
  Expect("uint32", NcclDType(DType::kUInt32), ncclUint32);
  Expect("uint64", NcclDType(DType::kUInt64), ncclUint64);
  Expect("float16", NcclDType(DType::kFloat16), ncclFloat16);
  Expect("bfloat16", NcclDType(DType::kBFloat16), ncclBfloat16);
  Expect("float32", NcclDType(DType::kFloat32), ncclFloat32);
  Expect("float64", NcclDType(DType::kFloat64), ncclFloat64);
  Expect("sum", NcclReduction(DType::kFloat32, Reduction::kSum), ncclSum);
  Expect("product", NcclReduction(DType::kFloat32, Reduction::kProduct), ncclProd);
  Expect("maximum", NcclReduction(DType::kFloat32, Reduction::kMax), ncclMax);
  Expect("minimum", NcclReduction(DType::kFloat32, Reduction::kMin), ncclMin);
}

// What the library answers on a machine without a GPU.
void CallLibrary(const char* path) {
  const ringtrain::Nccl* nccl = nullptr;
  const ringtrain::Status opened = ringtrain::Nccl::Open(path, &nccl);
  if (!opened.ok()) {
    std::printf("%s\n", opened.message().c_str());
    ++failures;
    return;
  }
  Expect("version", nccl->version, NCCL_VERSION_CODE);
  ringtrain::ncclUniqueId id;
  Expect("result of ncclGetUniqueId", nccl->GetUniqueId(&id), ncclSuccess);
  Ours config;
  config.version = static_cast<unsigned>(nccl->version);
  ringtrain::ncclComm_t comm = nullptr;
  const ringtrain::ncclResult_t result = nccl->CommInitRankConfig(&comm, 1, id, 0, &config);
  const ringtrain::Status refused = nccl->Check(result, "ncclCommInitRankConfig", nullptr);
  std::printf("%s: %s\n", nccl->path.c_str(), refused.message().c_str());
  Expect("a communicator without a GPU is refused", refused.ok(), false);
}

}  // namespace

int main(int argc, char** argv) {
  CheckValues();
  if (argc > 1) CallLibrary(argv[1]);
  return failures == 0 ? 0 : 1;
}
