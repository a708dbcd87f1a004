// Choice: how batches on GPUs travel. Pure: every member decides alike from the same facts.
#ifndef RINGTRAIN_GPU_CHOICE_H_
#define RINGTRAIN_GPU_CHOICE_H_

#include <string>
#include <vector>

#include "base/options.h"
#include "base/status.h"
#include "collectives/batch.h"
#include "collectives/topology.h"

namespace ringtrain {

// What a member tells the others before they first exchange tensors on these GPUs.
struct GpuFacts {
  static constexpr size_t kBytes = 512;  // encoded

  int nccl_version = 0;     // 10000 * major + 100 * minor + patch; 0: it has none
  size_t buffer_bytes = 0;  // of its fusion buffers; the first member's counts
  std::string problem;      // then, why
  std::string bus;          // of its GPU
  std::string unique_id;    // of the communicator to be; the first member's counts

  std::string Encode() const;  // kBytes long; a long problem is cut
  static bool Decode(const std::string& bytes, GpuFacts* facts);
};

enum class Way { kStaged, kNccl };

// See nccl_plan.h.
enum class Schedule { kNccl, kScatterGather, kOrdered, kHierarchical };

// The rule of option gpu_plane before anything is known of the others: whether they need to meet at all.
//   staged, or a member that has joined             staged, at once
//   auto, and a process set that is not the world   staged, at once: sets agree each on an order of their own, and NCCL
//                                                   may deadlock where ranks launch on one GPU in different orders
//   otherwise, with one member                      NCCL's way, which has nothing to exchange
//   otherwise                                       they meet
enum class Opening { kStaged, kAlone, kMeet };
Opening OpeningOf(const std::string& gpu_plane, int process_set, const std::vector<int64_t>& devices);

// What they do once they have met. Refused where versions differ; with gpu_plane=nccl also where one has no NCCL, where
// two share a GPU and option nccl_multi_rank or NCCL itself does not allow that, and where nccl_algorithm=hierarchical
// finds hosts that have one member, or not equally many; with auto those are staged, and *reason says why. facts: by
// member.
Status ChooseWay(const Options& options, const Topology& topology, const std::vector<GpuFacts>& facts, Way* way,
                 std::string* reason);

// Whether two members have one GPU.
bool ShareGpu(const Topology& topology, const std::vector<GpuFacts>& facts);

// Whether NCCL and the pack kernels give the result that the host would, as far as rounding goes: not for batches with
// joined members or weights of 0, dtypes that NCCL lacks, scaled elements that no kernel has, and uneven rows or
// weights of a reduction that scatters. With nccl_algorithm=ordered neither for floats whose reduction no kernel of
// ours orders: products, what scatters, too many members; where NCCL is for the ranks of a host only, for allreduce
// alone.
bool NcclCan(const Batch& batch, const std::string& nccl_algorithm, const Topology& topology);
// How NCCL reduces an allreduce that it can:
//   scatter_gather   from kLeastScattered bytes on, in which the batch travels; below it two launches cost too much
//   ordered          sums of floats; other results do not depend on the order
//   hierarchical     on several hosts
//   otherwise        ncclAllReduce
Schedule ScheduleOf(const Batch& batch, const std::string& nccl_algorithm, const Topology& topology);
// Whether communicators are for the ranks of one host: with nccl_algorithm=hierarchical, on several hosts.
bool WithinHosts(const std::string& nccl_algorithm, const Topology& topology);
constexpr size_t kLeastScattered = 1 << 20;
// Whether the batch goes through a fusion buffer of that size: several tensors, scaled ones, or ones that travel in 16
// bits. Reduced in its outputs, in its own dtype, is what does not fit, and what is large on average, unless that would
// keep it from travelling in 16 bits: one call for each tensor costs less than two copies, and to scale in place takes
// half of them. kOrdered scales by itself.
bool Packs(const Batch& batch, Schedule schedule, size_t buffer_bytes);
constexpr size_t kLargeTensor = 4 << 20;  // bytes; a copy of them takes longer than a call, by far
// Whether all members have as many rows of it.
bool EvenRows(const BatchTensor& tensor);
// Elements from the beginning of a tensor in the buffer to that of the next: a multiple of 128 bytes of 16-bit floats.
constexpr size_t InBuffer(size_t elements) { return (elements + 63) / 64 * 64; }

}  // namespace ringtrain
#endif  // RINGTRAIN_GPU_CHOICE_H_
