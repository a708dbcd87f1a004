// NcclPlan: the calls of NCCL, and the kernels between them, that carry a batch out. Pure: each member plans for
// itself, and what they plan fits together.
//
// A reduction is planned for runs of elements, each in one of these schedules (nccl_algorithm chooses; choice.h has the
// rule):
//
//     nccl            ncclAllReduce, which chooses its own
//     scatter_gather  ncclReduceScatter, which leaves each member one shard of the sum; ncclAllGather
//     ordered         each member gets its shard from all others and adds in the order of the ranks; ncclAllGather
//     hierarchical    ncclReduceScatter in each host, each shard the host's way across hosts, ncclAllGather in each
//     host
//
// Shards are the run cut into as many equal pieces as there are members; where that does not come out even the last
// ones are shorter, and a broadcast from each takes the place of ncclAllGather.
#ifndef RINGTRAIN_GPU_NCCL_PLAN_H_
#define RINGTRAIN_GPU_NCCL_PLAN_H_

#include <vector>

#include "collectives/batch.h"
#include "collectives/topology.h"
#include "device/sum_kernels.h"
#include "gpu/choice.h"

namespace ringtrain {

// One call; peer: also the root. Elements are counted as NCCL counts them: of a shard for ncclReduceScatter and
// ncclAllGather.
struct NcclCall {
  enum class Kind { kAllReduce, kReduceScatter, kAllGather, kBroadcast, kSend, kReceive };
  Kind kind;
  const char* from;
  char* to;
  size_t elements;
  DType dtype;
  int peer = 0;
};

// Elements that are reduced across hosts, in place, by the members with one local rank.
struct Crossing {
  char* memory;
  size_t elements;
  DType dtype;
};

// Calls that are one group, so that NCCL launches them as one; or, without calls, a sum on the same stream; or a
// crossing; or nothing.
struct NcclStep {
  std::vector<NcclCall> calls;
  std::vector<SumJob> sums;
  std::vector<Crossing> crossings;  // one at most
};
using NcclPlan = std::vector<NcclStep>;

// Elements that are reduced into memory that may be the same, and nothing else of which they overlap.
struct NcclRun {
  const char* from;
  char* to;
  size_t elements;
  DType dtype;
};

// Memory for what comes from other members.
struct NcclRoom {
  char* memory = nullptr;
  size_t bytes = 0;
};

// ranks: of the communicator; with kHierarchical those of one host. room: for kOrdered; longer runs are reduced piece
// by piece. kOrdered scales as the batch says, in the sum.
NcclPlan PlanAllreduce(const std::vector<NcclRun>& runs, Schedule schedule, const Batch& batch, const Topology& ranks,
                       const NcclRoom& room);

// The operations but allreduce, which have one way each.
NcclPlan PlanOther(const Batch& batch, const Topology& topology);

}  // namespace ringtrain
#endif  // RINGTRAIN_GPU_NCCL_PLAN_H_
