#include "gpu/nccl_plan.h"

#include <algorithm>

#include "collectives/rows.h"

namespace ringtrain {
namespace {

using Kind = NcclCall::Kind;

// A run as its members share it out.
struct Shards {
  const NcclRun& run;
  int members;

  size_t bytes() const { return Bytes(run.dtype); }
  size_t each() const { return (run.elements + members - 1) / members; }
  size_t Begin(int member) const { return std::min(run.elements, each() * member); }
  size_t Count(int member) const { return Begin(member + 1) - Begin(member); }
  const char* From(int member) const { return run.from + Begin(member) * bytes(); }
  char* To(int member) const { return run.to + Begin(member) * bytes(); }
  bool even() const { return run.elements % members == 0; }
};

// Also where there is nothing to do: the plans of all members have the same steps.
void AddStep(std::vector<NcclCall> calls, NcclPlan* plan) {
  calls.erase(std::remove_if(calls.begin(), calls.end(), [](const NcclCall& call) { return call.elements == 0; }),
              calls.end());
  plan->push_back({std::move(calls), {}, {}});
}

void AddSum(SumJob job, NcclPlan* plan) { plan->push_back({{}, {std::move(job)}, {}}); }

void AddCrossing(const Crossing& crossing, NcclPlan* plan) {
  if (crossing.elements > 0) plan->push_back({{}, {}, {crossing}});
}

// Every member has its shard of the sum in its place: hands them to all.
void GatherShards(const Shards& shards, int me, NcclPlan* plan) {
  std::vector<NcclCall> calls;
  if (shards.even()) calls.push_back({Kind::kAllGather, shards.To(me), shards.run.to, shards.each(), shards.run.dtype});
  for (int owner = 0; owner < shards.members && !shards.even(); ++owner)
    calls.push_back(
        {Kind::kBroadcast, shards.To(owner), shards.To(owner), shards.Count(owner), shards.run.dtype, owner});
  AddStep(std::move(calls), plan);
}

// What is left over where the run cannot be cut evenly, less than an element for each member, is reduced by all, and
// crosses by each.
void PlanScatterGather(const NcclRun& run, const Topology& topology, bool crosses, NcclPlan* plan) {
  const size_t members = static_cast<size_t>(topology.member_count()), each = run.elements / members,
               whole = each * members;
  const size_t bytes = Bytes(run.dtype);
  char* const own = run.to + topology.me * each * bytes;
  AddStep({{Kind::kReduceScatter, run.from, own, each, run.dtype},
           {Kind::kAllReduce, run.from + whole * bytes, run.to + whole * bytes, run.elements - whole, run.dtype}},
          plan);
  if (crosses) {
    AddCrossing({own, each, run.dtype}, plan);
    AddCrossing({run.to + whole * bytes, run.elements - whole, run.dtype}, plan);
  }
  AddStep({{Kind::kAllGather, own, run.to, each, run.dtype}}, plan);
}

std::vector<float> Factors(const Batch& batch, int members) {
  std::vector<float> factors;
  for (int member = 0; member < members; ++member)
    factors.push_back(
        static_cast<float>(batch.scaling.prescale * (batch.weights.empty() ? 1.0 : batch.weights[member])));
  return factors;
}

void PlanOrdered(const NcclRun& run, const Batch& batch, const Topology& topology, const NcclRoom& room,
                 NcclPlan* plan) {
  const int members = topology.member_count(), me = topology.me;
  const Shards shards{run, members};
  const size_t own = shards.Count(me);
  std::vector<NcclCall> exchange;
  char* to = room.memory;
  for (int peer = 0; peer < members; ++peer) {
    if (peer == me) continue;
    exchange.push_back({Kind::kSend, shards.From(peer), nullptr, shards.Count(peer), run.dtype, peer});
    exchange.push_back({Kind::kReceive, nullptr, to, own, run.dtype, peer});
    to += own * shards.bytes();
  }
  AddStep(std::move(exchange), plan);
  AddSum({run.dtype, shards.From(me), room.memory, own, shards.To(me), own, me, Factors(batch, members),
          static_cast<float>(batch.scaling.divisor), static_cast<float>(batch.scaling.postscale)},
         plan);
  GatherShards(shards, me, plan);
}

// Pieces of which the room holds all shards, cut where elements of any dtype are aligned.
std::vector<NcclRun> CutRun(const NcclRun& run, const NcclRoom& room, int members) {
  const size_t bytes = Bytes(run.dtype), block = InBuffer(1) * static_cast<size_t>(members);
  const size_t most = std::max(block, room.bytes / bytes / block * block);
  std::vector<NcclRun> pieces;
  for (size_t begin = 0; begin < run.elements; begin += most)
    pieces.push_back(
        {run.from + begin * bytes, run.to + begin * bytes, std::min(most, run.elements - begin), run.dtype});
  return pieces;
}

NcclPlan PlanGather(const Batch& batch, const Topology& topology) {
  std::vector<NcclCall> calls;
  for (const BatchTensor& tensor : batch.tensors) {
    char* to = tensor.output;
    if (EvenRows(tensor)) {
      calls.push_back({Kind::kAllGather, tensor.input, to, tensor.rows[0] * tensor.row_bytes, DType::kUInt8});
      continue;
    }
    for (int member = 0; member < topology.member_count(); ++member) {
      const size_t bytes = tensor.rows[member] * tensor.row_bytes;
      calls.push_back({Kind::kBroadcast, member == topology.me ? tensor.input : to, to, bytes, DType::kUInt8, member});
      to += bytes;
    }
  }
  NcclPlan plan;
  AddStep(std::move(calls), &plan);
  return plan;
}

NcclPlan PlanExchange(const Batch& batch, const Topology& topology) {
  const int members = topology.member_count();
  std::vector<NcclCall> calls;
  for (const BatchTensor& tensor : batch.tensors) {
    const char* from = tensor.input;
    char* to = tensor.output;
    for (int peer = 0; peer < members; ++peer) {
      const size_t sent = RowsTo(tensor.rows, peer) * tensor.row_bytes;
      const size_t received = RowsFrom(tensor.rows, members, peer) * tensor.row_bytes;
      calls.push_back({Kind::kSend, from, nullptr, sent, DType::kUInt8, peer});
      calls.push_back({Kind::kReceive, nullptr, to, received, DType::kUInt8, peer});
      from += sent;
      to += received;
    }
  }
  NcclPlan plan;
  AddStep(std::move(calls), &plan);
  return plan;
}

}  // namespace

NcclPlan PlanAllreduce(const std::vector<NcclRun>& runs, Schedule schedule, const Batch& batch, const Topology& ranks,
                       const NcclRoom& room) {
  NcclPlan plan;
  std::vector<NcclCall> whole;
  for (const NcclRun& run : runs) {
    if (schedule == Schedule::kNccl) whole.push_back({Kind::kAllReduce, run.from, run.to, run.elements, run.dtype});
    const bool crosses = schedule == Schedule::kHierarchical;
    if (crosses || schedule == Schedule::kScatterGather) PlanScatterGather(run, ranks, crosses, &plan);
    if (schedule != Schedule::kOrdered) continue;
    for (const NcclRun& piece : CutRun(run, room, ranks.member_count())) PlanOrdered(piece, batch, ranks, room, &plan);
  }
  if (schedule == Schedule::kNccl) AddStep(std::move(whole), &plan);
  return plan;
}

NcclPlan PlanOther(const Batch& batch, const Topology& topology) {
  const OperationRow& operation = *Find(batch.operation);
  if (operation.layout == Layout::kGather) return PlanGather(batch, topology);
  if (operation.layout == Layout::kExchange) return PlanExchange(batch, topology);
  std::vector<NcclCall> calls;
  for (const BatchTensor& tensor : batch.tensors) {
    const size_t elements = OutputBytes(batch, tensor, topology) / Bytes(batch.dtype);
    if (operation.rooted)
      calls.push_back({Kind::kBroadcast, tensor.input, tensor.output, tensor.bytes, DType::kUInt8, batch.root});
    else
      calls.push_back({Kind::kReduceScatter, tensor.input, tensor.output, elements, batch.dtype});
  }
  NcclPlan plan;
  AddStep(std::move(calls), &plan);
  return plan;
}

}  // namespace ringtrain
