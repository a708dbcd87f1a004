// Which way batches on GPUs take: the rules, and what is said where there is none.
#include "gpu/choice.h"

#include "check.h"
#include "six_bits.h"

namespace ringtrain {
namespace {

Topology OnHosts(const std::vector<int>& host_of) {
  std::vector<int> members;
  for (size_t rank = 0; rank < host_of.size(); ++rank) members.push_back(static_cast<int>(rank));
  return MakeTopology(members, 0, host_of);
}

Options With(const std::string& lines) {
  Options options;
  RT_CHECK(Options::Parse(lines, &options).ok());
  return options;
}

GpuFacts Facts(int version, const std::string& bus) {
  GpuFacts facts;
  facts.nccl_version = version;
  facts.bus = bus;
  if (version == 0) facts.problem = "no library.";
  return facts;
}

struct Chosen {
  Status status;
  Way way = Way::kStaged;
  std::string reason;
};

Chosen Choose(const std::string& options, const std::vector<int>& hosts, const std::vector<GpuFacts>& facts) {
  Chosen chosen;
  chosen.status = ChooseWay(With(options), OnHosts(hosts), facts, &chosen.way, &chosen.reason);
  return chosen;
}

RT_TEST(members_meet_only_where_they_have_to) {
  RT_CHECK(OpeningOf("auto", 0, {0, 1}) == Opening::kMeet);
  RT_CHECK(OpeningOf("nccl", 3, {0, 1}) == Opening::kMeet);
  RT_CHECK(OpeningOf("auto", 3, {0, 1}) == Opening::kStaged);
  RT_CHECK(OpeningOf("staged", 0, {0, 1}) == Opening::kStaged);
  RT_CHECK(OpeningOf("nccl", 0, {0, -1}) == Opening::kStaged);
  RT_CHECK(OpeningOf("auto", 2, {1}) == Opening::kAlone);
  RT_CHECK(OpeningOf("staged", 0, {1}) == Opening::kStaged);
}

RT_TEST(nccl_where_all_have_it_and_a_gpu_of_their_own) {
  RT_CHECK(Choose("", {0, 0}, {Facts(22809, "a"), Facts(22809, "b")}).way == Way::kNccl);
  RT_CHECK(Choose("", {0, 1}, {Facts(22809, "a"), Facts(22809, "a")}).way == Way::kNccl);  // the same bus on two hosts
  const Chosen shared = Choose("", {0, 0, 0}, {Facts(23007, "a"), Facts(23007, "b"), Facts(23007, "a")});
  RT_CHECK(shared.way == Way::kStaged && shared.status.ok());
  RT_CHECK_EQ(
      shared.reason,
      std::string("expected a GPU for each rank but found one for ranks 0, 2. Start fewer ranks on the host, or set "
                  "nccl_multi_rank=1 with NCCL 2.30 or newer."));
  RT_CHECK(Choose("nccl_multi_rank=1", {0, 0}, {Facts(23007, "a"), Facts(23007, "a")}).way == Way::kNccl);
  RT_CHECK(Choose("nccl_multi_rank=1", {0, 0}, {Facts(22907, "a"), Facts(22907, "a")}).way == Way::kStaged);
}

RT_TEST(what_is_missing_is_an_error_only_where_nccl_was_asked_for) {
  const std::vector<GpuFacts> facts = {Facts(22809, "a"), Facts(0, "b")};
  const Chosen automatic = Choose("", {0, 0}, facts);
  RT_CHECK(automatic.status.ok() && automatic.way == Way::kStaged);
  RT_CHECK_EQ(automatic.reason, std::string("expected NCCL on all ranks but found none on rank 1: no library."));
  RT_CHECK_EQ(Choose("gpu_plane=nccl", {0, 0}, facts).status.message(), "gpu_plane 'nccl': " + automatic.reason);
  RT_CHECK(Choose("gpu_plane=nccl", {0, 0}, facts).status.code() == StatusCode::kUnsupported);
}

RT_TEST(versions_must_be_equal) {
  const Chosen chosen = Choose("", {0, 0, 0}, {Facts(22809, "a"), Facts(23007, "b"), Facts(22809, "c")});
  RT_CHECK(chosen.status.code() == StatusCode::kMismatch);
  RT_CHECK_EQ(chosen.status.message(),
              std::string("NCCL: expected one version on all ranks but found 2.28.9 on ranks 0, 2 and 2.30.7 on rank "
                          "1. Install one, or point nccl_lib at it; gpu_plane=staged needs none."));
}

RT_TEST(facts_arrive_as_they_were_told) {
  GpuFacts facts = Facts(23007, "0000:01:00");
  facts.unique_id = std::string(128, '\0');
  facts.problem = std::string(5000, 'x');
  const std::string bytes = facts.Encode();
  RT_CHECK_EQ(bytes.size(), GpuFacts::kBytes);
  GpuFacts heard;
  RT_CHECK(GpuFacts::Decode(bytes, &heard));
  RT_CHECK(heard.nccl_version == 23007 && heard.bus == facts.bus && heard.unique_id == facts.unique_id);
  RT_CHECK_EQ(heard.problem, std::string(200, 'x'));
}

const Topology kOneHost = OnHosts({0, 0});

Batch Allreduce(DType dtype, std::vector<size_t> elements) {
  Batch batch;
  batch.dtype = dtype;
  batch.joined = {false, false};
  for (size_t count : elements) {
    BatchTensor tensor;
    tensor.bytes = count * Bytes(dtype);
    batch.tensors.push_back(tensor);
  }
  return batch;
}

RT_TEST(nccl_carries_what_it_can_compute_as_the_host_would) {
  RT_CHECK(NcclCan(Allreduce(DType::kFloat32, {10, 20}), "auto", kOneHost));
  RT_CHECK(NcclCan(Allreduce(DType::kInt64, {10}), "auto", kOneHost));
  RT_CHECK(!NcclCan(Allreduce(DType::kInt16, {10}), "auto", kOneHost));
  Batch average = Allreduce(DType::kInt32, {10});
  average.scaling.divisor = 2;
  RT_CHECK(!NcclCan(average, "auto", kOneHost));  // whole numbers are divided exactly
  average.dtype = DType::kBFloat16;
  RT_CHECK(NcclCan(average, "auto", kOneHost));
  average.weights = {3, 0};
  RT_CHECK(!NcclCan(average, "auto", kOneHost));  // 0 times infinity would be no number
  average.weights = {3, 1};
  RT_CHECK(NcclCan(average, "auto", kOneHost));
  average.operation = Operation::kReducescatter;
  RT_CHECK(!NcclCan(average, "auto", kOneHost));
  Batch joined = Allreduce(DType::kFloat32, {10});
  joined.joined[1] = true;
  RT_CHECK(!NcclCan(joined, "auto", kOneHost));
  Batch scatter = Allreduce(DType::kFloat32, {10});
  scatter.operation = Operation::kReducescatter;
  scatter.tensors[0].rows = {5, 5};
  RT_CHECK(NcclCan(scatter, "auto", kOneHost));
  scatter.tensors[0].rows = {5, 4};
  RT_CHECK(!NcclCan(scatter, "auto", kOneHost));
}

// Between hosts such a batch goes as the host encodes it; within one nothing is encoded.
RT_TEST(a_form_that_is_no_dtype_goes_through_the_host) {
  static const SixBits codec(false);
  Batch batch = Allreduce(DType::kFloat32, {10});
  batch.codec = &codec;
  RT_CHECK(NcclCan(batch, "auto", kOneHost));
  RT_CHECK(!NcclCan(batch, "auto", OnHosts({0, 1})) && !NcclCan(batch, "hierarchical", OnHosts({0, 1})));
  batch.codec = &CodecFor(Compression::kBFloat16, batch.dtype, 10);
  RT_CHECK(NcclCan(batch, "auto", OnHosts({0, 1})));
}

RT_TEST(a_buffer_for_what_needs_one_and_fits) {
  RT_CHECK(!Packs(Allreduce(DType::kFloat32, {100}), Schedule::kNccl, 4096));
  RT_CHECK(Packs(Allreduce(DType::kFloat32, {100, 100}), Schedule::kNccl, 4096));
  RT_CHECK(Packs(Allreduce(DType::kFloat32, {512, 512}), Schedule::kNccl, 4096));
  RT_CHECK(!Packs(Allreduce(DType::kFloat32, {512, 513}), Schedule::kNccl, 4096));
  Batch narrow = Allreduce(DType::kFloat32, {2048});
  narrow.codec = &CodecFor(Compression::kBFloat16, narrow.dtype, 0);
  RT_CHECK(Packs(narrow, Schedule::kNccl, 4096));
  Batch scaled = Allreduce(DType::kFloat64, {10});
  scaled.scaling.prescale = 0.5;
  RT_CHECK(!Packs(scaled, Schedule::kNccl, 4096) && !NcclCan(scaled, "auto", kOneHost));
}

RT_TEST(what_is_large_on_average_is_not_packed) {
  constexpr size_t kRoom = 64 << 20, kLarge = kLargeTensor / 4;  // elements
  Batch large = Allreduce(DType::kFloat32, {2 * kLarge - 64, 64});
  RT_CHECK(!Packs(large, Schedule::kNccl, kRoom));
  RT_CHECK(Packs(Allreduce(DType::kFloat32, {2 * kLarge - 128, 64}), Schedule::kNccl, kRoom));
  large.scaling.divisor = 2;
  RT_CHECK(!Packs(large, Schedule::kNccl, kRoom));
  large.codec = &CodecFor(Compression::kBFloat16, large.dtype, 0);
  RT_CHECK(Packs(large, Schedule::kNccl, kRoom));
}

RT_TEST(schedules_are_for_what_they_are_good_for) {
  const Batch small = Allreduce(DType::kFloat32, {1000}), large = Allreduce(DType::kFloat32, {1 << 17, 1 << 17});
  RT_CHECK(ScheduleOf(large, "auto", kOneHost) == Schedule::kNccl &&
           ScheduleOf(large, "nccl", kOneHost) == Schedule::kNccl);
  RT_CHECK(ScheduleOf(large, "scatter_gather", kOneHost) == Schedule::kScatterGather);
  RT_CHECK(ScheduleOf(small, "scatter_gather", kOneHost) == Schedule::kNccl);
  RT_CHECK(ScheduleOf(small, "ordered", kOneHost) == Schedule::kOrdered);
  Batch narrow = large;
  narrow.codec = &CodecFor(Compression::kBFloat16, narrow.dtype, 0);
  RT_CHECK(ScheduleOf(narrow, "scatter_gather", kOneHost) == Schedule::kNccl);  // half a mebibyte travels
  const Batch whole = Allreduce(DType::kInt64, {1000});
  RT_CHECK(ScheduleOf(whole, "ordered", kOneHost) == Schedule::kNccl && NcclCan(whole, "ordered", kOneHost));
  Batch most = small;
  most.reduction = Reduction::kMax;
  RT_CHECK(ScheduleOf(most, "ordered", kOneHost) == Schedule::kNccl && NcclCan(most, "ordered", kOneHost));
}

RT_TEST(what_cannot_be_ordered_goes_through_the_host) {
  Batch product = Allreduce(DType::kFloat32, {1000});
  product.reduction = Reduction::kProduct;
  RT_CHECK(NcclCan(product, "auto", kOneHost) && !NcclCan(product, "ordered", kOneHost));
  Batch scatter = Allreduce(DType::kFloat32, {10});
  scatter.operation = Operation::kReducescatter;
  scatter.tensors[0].rows = {5, 5};
  RT_CHECK(!NcclCan(scatter, "ordered", kOneHost));
  scatter.dtype = DType::kInt32;
  RT_CHECK(NcclCan(scatter, "ordered", kOneHost));
  Batch many = Allreduce(DType::kFloat32, {1000});
  many.joined.assign(1024, false);
  RT_CHECK(NcclCan(many, "ordered", kOneHost));
  many.joined.assign(1025, false);
  RT_CHECK(!NcclCan(many, "ordered", kOneHost) && ScheduleOf(many, "ordered", kOneHost) == Schedule::kNccl);
}

RT_TEST(adasum_goes_through_the_host) {
  Batch adasum = Allreduce(DType::kFloat32, {1000});
  adasum.reduction = Reduction::kAdasum;
  for (const char* algorithm : {"auto", "nccl", "scatter_gather", "ordered", "hierarchical"}) {
    RT_CHECK(!NcclCan(adasum, algorithm, kOneHost));
    RT_CHECK(!NcclCan(adasum, algorithm, OnHosts({0, 0, 1, 1})));
  }
}

RT_TEST(nccl_keeps_within_hosts_that_are_alike_where_it_was_asked_to) {
  const Topology two_by_two = OnHosts({0, 0, 1, 1});
  const Batch sum = Allreduce(DType::kFloat32, {1000});
  RT_CHECK(ScheduleOf(sum, "hierarchical", two_by_two) == Schedule::kHierarchical &&
           NcclCan(sum, "hierarchical", two_by_two));
  RT_CHECK(ScheduleOf(sum, "hierarchical", kOneHost) == Schedule::kNccl && NcclCan(sum, "hierarchical", kOneHost));
  Batch gather = sum;
  gather.operation = Operation::kAllgather;
  RT_CHECK(!NcclCan(gather, "hierarchical", two_by_two) && NcclCan(gather, "hierarchical", kOneHost));
  const std::vector<GpuFacts> facts = {Facts(22809, "a"), Facts(22809, "b"), Facts(22809, "a")};
  RT_CHECK(Choose("nccl_algorithm=hierarchical", {0, 0, 1}, facts).way == Way::kStaged);
  RT_CHECK_EQ(Choose("nccl_algorithm=hierarchical\ngpu_plane=nccl", {0, 0, 1}, facts).status.message(),
              std::string("gpu_plane 'nccl': nccl_algorithm 'hierarchical': expected as many ranks on each host, and "
                          "two at least, but found "
                          "2, 1 on the hosts. Start as many on each, or choose another algorithm."));
}

RT_TEST(an_ordered_sum_is_scaled_by_its_kernel) {
  Batch scaled = Allreduce(DType::kFloat32, {100});
  scaled.scaling.divisor = 3;
  RT_CHECK(Packs(scaled, Schedule::kNccl, 4096) && !Packs(scaled, Schedule::kOrdered, 4096));
}

}  // namespace
}  // namespace ringtrain
