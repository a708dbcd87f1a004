// NCCL, found when it is first wanted. nccl.def lists what is called; a test compares it and the types here with
// nccl.h.
#ifndef RINGTRAIN_DEVICE_NCCL_H_
#define RINGTRAIN_DEVICE_NCCL_H_

#include <climits>
#include <cstddef>
#include <string>

#include "base/status.h"
#include "device/driver.h"
#include "tables/tables.h"

namespace ringtrain {

using ncclResult_t = int;
using ncclDataType_t = int;
using ncclRedOp_t = int;
using ncclComm_t = struct NcclComm*;

struct ncclUniqueId {
  char internal[128];
};

// The first fields of ncclConfig_t. NCCL copies `size` bytes over its own defaults, so a prefix is legal if it ends
// where a field ends: after `splitShare` alone the padding would fall into `trafficClass`.
struct NcclConfig {
  size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = 0;  // of the library: fields that came later are reset by it
  int blocking = 0;      // a communicator that can be aborted must not block
  int cga_cluster_size = INT_MIN;
  int least_ctas = INT_MIN;
  int most_ctas = INT_MIN;
  const char* net_name = nullptr;
  int split_share = INT_MIN;
  int traffic_class = INT_MIN;
};
static_assert(sizeof(NcclConfig) == 48, "ends where ncclConfig_t's commName begins");

constexpr ncclResult_t kNcclSuccess = 0;
constexpr ncclResult_t kNcclInProgress = 7;

// "2.30.7" of 23007.
std::string NcclVersionText(int version);

struct Nccl {
#define RT_NCCL(name, result, parameters, since) result(*name) parameters = nullptr;
#include "device/nccl.def"
#undef RT_NCCL
  int version = 0;         // 10000 * major + 100 * minor + patch
  std::string path;        // of the library
  std::string interfaces;  // that it was told to use; empty: it chooses

  // The process's NCCL; the first successful call decides, later ones get the same. library: a path that the user asked
  // for, or "": then what the process has loaded already, the file that Suggest named, or the system's, in this order.
  // Any thread.
  static Status Open(const std::string& library, const Nccl** nccl);
  // What Open found, or nullptr.
  static const Nccl* Opened();
  // Where a wheel has put it, and what NCCL_SOCKET_IFNAME says, as Python knows.
  static void Suggest(const std::string& library, const std::string& socket_interfaces);

  std::string VersionText() const;
  // The end of a text about a failure: the network that it was told to use.
  std::string NetworkText() const;
  // What a call's result means: success and being in progress are ok. what: "ncclAllReduce". comm may be NULL. The text
  // has NCCL's own words, its network, and a hint at what to look for.
  Status Check(ncclResult_t result, const std::string& what, ncclComm_t comm) const;
};

// NCCL's number for a dtype, -1 where it has none (int16). bool travels as uint8.
ncclDataType_t NcclDType(DType dtype);
// NCCL's number for a reduction of such elements: the sum of bool is their maximum.
ncclRedOp_t NcclReduction(DType dtype, Reduction reduction);

}  // namespace ringtrain
#endif  // RINGTRAIN_DEVICE_NCCL_H_
