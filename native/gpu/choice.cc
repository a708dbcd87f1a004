#include "gpu/choice.h"

#include <algorithm>
#include <functional>
#include <map>

#include "base/bytes.h"
#include "base/ranks.h"
#include "device/nccl.h"
#include "device/pack_kernels.h"
#include "device/sum_kernels.h"

namespace ringtrain {
namespace {

constexpr int kOldestMultiRank = 23000;
constexpr size_t kLongestProblem = 200;

constexpr char kSubject[] = "gpu_plane 'nccl': ";

using GroupsOf = std::map<std::string, std::vector<int>>;  // ranks by what they say

GroupsOf GroupByBus(const Topology& topology, const std::vector<GpuFacts>& facts) {
  GroupsOf groups;
  for (size_t member = 0; member < facts.size(); ++member)
    groups[std::to_string(topology.host_of[member]) + " " + facts[member].bus].push_back(topology.members[member]);
  return groups;
}

// Empty if all have NCCL.
std::string WithoutNccl(const Topology& topology, const std::vector<GpuFacts>& facts) {
  std::vector<int> ranks;
  std::string problem;
  for (size_t member = 0; member < facts.size(); ++member) {
    if (facts[member].nccl_version != 0) continue;
    if (ranks.empty()) problem = facts[member].problem;
    ranks.push_back(topology.members[member]);
  }
  return ranks.empty() ? "" : "expected NCCL on all ranks but found none on " + RanksText(ranks) + ": " + problem;
}

Status CompareVersions(const Topology& topology, const std::vector<GpuFacts>& facts) {
  GroupsOf versions;
  for (size_t member = 0; member < facts.size(); ++member)
    if (facts[member].nccl_version != 0)
      versions[NcclVersionText(facts[member].nccl_version)].push_back(topology.members[member]);
  if (versions.size() <= 1) return {};
  std::string text = "NCCL: expected one version on all ranks but found ";
  for (auto version = versions.begin(); version != versions.end(); ++version)
    text += (version == versions.begin() ? "" : " and ") + version->first + " on " + RanksText(version->second);
  return Status::Mismatch(text + ". Install one, or point nccl_lib at it; gpu_plane=staged needs none.");
}

// Empty if hosts can exchange shards, or need not.
std::string Unlayered(const Options& options, const Topology& topology) {
  if (!WithinHosts(options.nccl_algorithm, topology)) return "";
  const auto unlike = [&](const std::vector<int>& host) {
    return host.size() != topology.hosts[0].size() || host.size() < 2;
  };
  if (std::none_of(topology.hosts.begin(), topology.hosts.end(), unlike)) return "";
  std::string found;
  for (const std::vector<int>& host : topology.hosts)
    found += (found.empty() ? "" : ", ") + std::to_string(host.size());
  return "nccl_algorithm 'hierarchical': expected as many ranks on each host, and two at least, but found " + found +
         " on the hosts. Start as many on each, or choose another algorithm.";
}

// Empty if each has a GPU of its own, or NCCL may serve several.
std::string Sharing(const Options& options, const Topology& topology, const std::vector<GpuFacts>& facts) {
  for (const auto& group : GroupByBus(topology, facts)) {
    if (group.second.size() < 2) continue;
    const std::string who = "expected a GPU for each rank but found one for " + RanksText(group.second);
    if (options.nccl_multi_rank == 0)
      return who + ". Start fewer ranks on the host, or set nccl_multi_rank=1 with NCCL 2.30 or newer.";
    if (facts[0].nccl_version < kOldestMultiRank)
      return who + ", which takes NCCL 2.30 or newer, not " + NcclVersionText(facts[0].nccl_version) + ". Update it.";
  }
  return "";
}

size_t PackedBytes(const Batch& batch) {
  size_t elements = 0;
  for (const BatchTensor& tensor : batch.tensors) elements += InBuffer(tensor.bytes / Bytes(batch.dtype));
  return elements * Bytes(batch.wire());
}

bool Scales(const Batch& batch) { return !batch.scaling.identity() || !batch.weights.empty(); }

int MembersOf(const Batch& batch) { return static_cast<int>(batch.joined.size()); }
bool Adds(const Batch& batch) { return Find(batch.reduction)->adds(); }

// Whether the bits of a reduction depend on its order; a sum or product of one has none.
bool OrderMatters(const Batch& batch) {
  const bool rounds =
      Rounds(Find(batch.dtype)->arithmetic) && (Adds(batch) || Find(batch.reduction)->fold == Fold::kMultiply);
  return Find(batch.operation)->reduces && rounds && MembersOf(batch) > 1;
}

// Whether the kernels of ours add it, in an order of ours.
bool Orders(const Batch& batch) {
  return batch.operation == Operation::kAllreduce && Adds(batch) && SumKernels::Can(batch.wire(), MembersOf(batch));
}

size_t TravellingBytes(const Batch& batch) {
  size_t bytes = 0;
  for (const BatchTensor& tensor : batch.tensors) bytes += tensor.bytes / Bytes(batch.dtype) * Bytes(batch.wire());
  return bytes;
}

}  // namespace

std::string GpuFacts::Encode() const {
  Encoder encoder;
  encoder.Unsigned(static_cast<uint64_t>(nccl_version));
  encoder.Unsigned(buffer_bytes);
  encoder.Text(problem.substr(0, kLongestProblem));
  encoder.Text(bus);
  encoder.Text(unique_id);
  std::string bytes = encoder.Take();
  bytes.resize(kBytes);
  return bytes;
}

bool GpuFacts::Decode(const std::string& bytes, GpuFacts* facts) {
  Decoder decoder(bytes);
  facts->nccl_version = static_cast<int>(decoder.Unsigned());
  facts->buffer_bytes = static_cast<size_t>(decoder.Unsigned());
  facts->problem = decoder.Text();
  facts->bus = decoder.Text();
  facts->unique_id = decoder.Text();
  return decoder.ok();
}

Opening OpeningOf(const std::string& gpu_plane, int process_set, const std::vector<int64_t>& devices) {
  const bool joined = std::find(devices.begin(), devices.end(), -1) != devices.end();
  if (gpu_plane == "staged" || joined) return Opening::kStaged;
  if (devices.size() == 1) return Opening::kAlone;
  return gpu_plane == "auto" && process_set != 0 ? Opening::kStaged : Opening::kMeet;
}

Status ChooseWay(const Options& options, const Topology& topology, const std::vector<GpuFacts>& facts, Way* way,
                 std::string* reason) {
  RT_TRY(CompareVersions(topology, facts));
  *reason = WithoutNccl(topology, facts);
  if (reason->empty()) *reason = Sharing(options, topology, facts);
  if (reason->empty()) *reason = Unlayered(options, topology);
  *way = reason->empty() ? Way::kNccl : Way::kStaged;
  if (*way == Way::kStaged && options.gpu_plane == "nccl") return Status::Unsupported(kSubject + *reason);
  return {};
}

bool ShareGpu(const Topology& topology, const std::vector<GpuFacts>& facts) {
  return GroupByBus(topology, facts).size() < facts.size();
}

bool WithinHosts(const std::string& nccl_algorithm, const Topology& topology) {
  return nccl_algorithm == "hierarchical" && topology.host_count() > 1;
}

bool NcclCan(const Batch& batch, const std::string& nccl_algorithm, const Topology& topology) {
  if (std::find(batch.joined.begin(), batch.joined.end(), true) != batch.joined.end()) return false;
  if (WithinHosts(nccl_algorithm, topology) && batch.operation != Operation::kAllreduce) return false;
  if (!Find(batch.operation)->reduces) return true;
  const ReductionRow& reduction = *Find(batch.reduction);
  if (reduction.fold == Fold::kProject || reduction.map != Map::kItself || reduction.takes_bits()) return false;
  const bool as_dtype = batch.codec->identity() || batch.wire() != batch.dtype;
  if (!as_dtype && topology.host_count() > 1) return false;  // within a host nothing is compressed
  if (NcclDType(batch.dtype) < 0 || std::find(batch.weights.begin(), batch.weights.end(), 0.0) != batch.weights.end())
    return false;
  if (Scales(batch) && !PackKernels::Can(batch.dtype, batch.dtype, true)) return false;
  if (nccl_algorithm == "ordered" && OrderMatters(batch) && !Orders(batch)) return false;
  if (batch.operation == Operation::kAllreduce) return true;
  const bool even = std::all_of(batch.tensors.begin(), batch.tensors.end(), EvenRows);
  return even && batch.weights.empty() && (Adds(batch) || batch.scaling.prescale == 1.0);
}

Schedule ScheduleOf(const Batch& batch, const std::string& nccl_algorithm, const Topology& topology) {
  if (WithinHosts(nccl_algorithm, topology)) return Schedule::kHierarchical;
  const bool ours = OrderMatters(batch) && Orders(batch);
  if (nccl_algorithm == "ordered" && ours) return Schedule::kOrdered;
  if (nccl_algorithm == "scatter_gather" && TravellingBytes(batch) >= kLeastScattered) return Schedule::kScatterGather;
  return Schedule::kNccl;
}

bool EvenRows(const BatchTensor& tensor) {
  return std::adjacent_find(tensor.rows.begin(), tensor.rows.end(), std::not_equal_to<int64_t>()) == tensor.rows.end();
}

bool Packs(const Batch& batch, Schedule schedule, size_t buffer_bytes) {
  if (batch.operation != Operation::kAllreduce) return false;
  const bool scales = Scales(batch) && schedule != Schedule::kOrdered;
  const bool changed = scales || batch.wire() != batch.dtype;
  if (batch.tensors.size() == 1 && !changed) return false;
  const bool large = PackedBytes(batch) >= kLargeTensor * batch.tensors.size();
  if (large && batch.wire() == batch.dtype) return false;
  return PackedBytes(batch) <= buffer_bytes && PackKernels::Can(batch.dtype, batch.wire(), scales);
}

}  // namespace ringtrain
