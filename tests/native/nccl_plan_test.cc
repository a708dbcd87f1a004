// What members plan to do with NCCL, done on the processor: the plans of all members fit, and what they leave is the
// sum.
#include "gpu/nccl_plan.h"

#include <cstring>
#include <map>
#include <memory>
#include <string>

#include "check.h"
#include "kernels/reduce.h"

namespace ringtrain {
namespace {

using Kind = NcclCall::Kind;

constexpr float kUntouched = -7;

// A member's memory: input, output and room, each with a margin behind it that nobody may write to.
struct Memory {
  std::vector<float> input, output, room;
};

struct Members {
  int count;
  std::vector<Memory> memory;
  std::vector<NcclPlan> plans;

  // What two NCCL calls do for members that are threads of one: one element after the other.
  void PerformCalls(size_t step) {
    std::map<std::pair<int, int>, std::vector<const NcclCall*>> sent;  // by sender and receiver
    for (int member = 0; member < count; ++member)
      for (const NcclCall& call : plans[member][step].calls)
        if (call.kind == Kind::kSend) sent[{member, call.peer}].push_back(&call);
    for (int member = 0; member < count; ++member)
      for (const NcclCall& call : plans[member][step].calls)
        if (call.kind == Kind::kReceive) {
          std::vector<const NcclCall*>& waiting = sent[{call.peer, member}];
          RT_CHECK(!waiting.empty() && waiting.front()->elements == call.elements);
          std::memcpy(call.to, waiting.front()->from, call.elements * sizeof(float));
          waiting.erase(waiting.begin());
        }
    for (const auto& pair : sent) RT_CHECK(pair.second.empty());
    std::vector<std::vector<const NcclCall*>> collective(count);
    for (int member = 0; member < count; ++member)
      for (const NcclCall& call : plans[member][step].calls)
        if (call.kind != Kind::kSend && call.kind != Kind::kReceive) collective[member].push_back(&call);
    for (size_t index = 0; index < collective[0].size(); ++index) {
      std::vector<const NcclCall*> calls;
      for (int member = 0; member < count; ++member) {
        RT_CHECK_EQ(collective[member].size(), collective[0].size());
        calls.push_back(collective[member][index]);
        RT_CHECK(calls.back()->kind == calls[0]->kind && calls.back()->elements == calls[0]->elements &&
                 calls.back()->peer == calls[0]->peer);
      }
      PerformCollective(calls);
    }
  }

  void PerformCollective(const std::vector<const NcclCall*>& calls) {
    const size_t elements = calls[0]->elements, bytes = elements * sizeof(float);
    const bool scatters = calls[0]->kind == Kind::kReduceScatter;
    std::vector<const void*> sources;
    std::vector<float> gathered, summed(elements * (scatters ? count : 1));
    for (const NcclCall* call : calls) {
      sources.push_back(call->from);
      const float* from = reinterpret_cast<const float*>(call->from);
      gathered.insert(gathered.end(), from, from + elements);
    }
    if (calls[0]->kind == Kind::kAllReduce || scatters)
      Reduce(DType::kFloat32, Reduction::kSum, summed.data(), sources.data(), count, summed.size(), {});
    for (int member = 0; member < count; ++member) {
      switch (calls[0]->kind) {
        case Kind::kAllReduce:
          std::memcpy(calls[member]->to, summed.data(), bytes);
          break;
        case Kind::kReduceScatter:
          std::memcpy(calls[member]->to, &summed[member * elements], bytes);
          break;
        case Kind::kAllGather:
          std::memcpy(calls[member]->to, gathered.data(), count * bytes);
          break;
        default:
          std::memcpy(calls[member]->to, &gathered[calls[0]->peer * elements], bytes);
          break;
      }
    }
  }

  void PerformSums(size_t step) {
    for (const NcclPlan& plan : plans)
      for (const SumJob& job : plan[step].sums) {
        const SumLaunch launch = LaunchOf(job);
        for (uint32_t chunk = 0; chunk * kPackChunk < job.elements; ++chunk)
          SumShare<float, float>(launch, chunk, 0, 1);
      }
  }
};

Topology OneHost(int members, int me) {
  std::vector<int> ranks;
  for (int rank = 0; rank < members; ++rank) ranks.push_back(rank);
  return MakeTopology(ranks, me, std::vector<int>(members, 0));
}

float ValueOf(int member, size_t element) {
  return 1.0f / static_cast<float>(3 * element + 7 * static_cast<size_t>(member) + 1);
}

// An allreduce of float32 by all members; room in elements.
Members Reduced(Schedule schedule, int count, size_t elements, size_t room, bool in_place, const Batch& batch) {
  Members members{count, std::vector<Memory>(count), {}};
  for (int member = 0; member < count; ++member) {
    Memory& memory = members.memory[member];
    memory.room.assign(room + 1, kUntouched);
    memory.output.assign(elements + 1, kUntouched);
    for (size_t element = 0; element < elements; ++element) memory.input.push_back(ValueOf(member, element));
    if (in_place) std::copy(memory.input.begin(), memory.input.end(), memory.output.begin());
    char* const output = reinterpret_cast<char*>(memory.output.data());
    const char* const input = in_place ? output : reinterpret_cast<const char*>(memory.input.data());
    members.plans.push_back(PlanAllreduce({{input, output, elements, DType::kFloat32}}, schedule, batch,
                                          OneHost(count, member),
                                          {reinterpret_cast<char*>(memory.room.data()), room * sizeof(float)}));
  }
  for (const NcclPlan& plan : members.plans) RT_CHECK_EQ(plan.size(), members.plans[0].size());
  for (size_t step = 0; step < members.plans[0].size(); ++step) {
    members.PerformCalls(step);
    members.PerformSums(step);
  }
  return members;
}

// Of the host, which adds in the order of the ranks.
std::vector<float> OnHost(int count, size_t elements, const Scaling& scaling) {
  std::vector<std::vector<float>> inputs(count);
  std::vector<const void*> sources;
  for (int member = 0; member < count; ++member) {
    for (size_t element = 0; element < elements; ++element) inputs[member].push_back(ValueOf(member, element));
    sources.push_back(inputs[member].data());
  }
  std::vector<float> sum(elements);
  if (elements > 0) Reduce(DType::kFloat32, Reduction::kSum, sum.data(), sources.data(), count, elements, scaling);
  return sum;
}

template <typename Check>
void ForEachShape(const Check& check) {
  for (int count : {2, 3, 4, 5, 7})
    for (size_t elements : {0, 1, 3, 64, 1000, 1024, 2240})
      for (bool in_place : {false, true}) check(count, elements, in_place);
}

Batch Sum(int count) {
  Batch batch;
  batch.dtype = DType::kFloat32;
  batch.joined.assign(count, false);
  return batch;
}

RT_TEST(every_schedule_leaves_the_sum_on_all_members_and_nothing_else) {
  for (Schedule schedule : {Schedule::kNccl, Schedule::kScatterGather, Schedule::kOrdered})
    ForEachShape([&](int count, size_t elements, bool in_place) {
      const std::vector<float> expected = OnHost(count, elements, {});
      for (const Memory& memory : Reduced(schedule, count, elements, 512, in_place, Sum(count)).memory) {
        for (size_t element = 0; element < elements; ++element)
          RT_CHECK(std::abs(memory.output[element] - expected[element]) <= 1e-6f * expected[element]);
        RT_CHECK_EQ(memory.output[elements], kUntouched);
        RT_CHECK_EQ(memory.room.back(), kUntouched);
      }
    });
}

RT_TEST(an_ordered_sum_has_the_bits_of_the_host_and_is_scaled_as_there) {
  ForEachShape([&](int count, size_t elements, bool in_place) {
    Batch batch = Sum(count);
    batch.scaling.prescale = 0.3;
    batch.scaling.divisor = count;
    batch.scaling.postscale = 1.7;
    for (int member = 0; member < count; ++member) batch.weights.push_back(1.0 / (member + 3));
    Scaling scaling = batch.scaling;
    scaling.weights = batch.weights.data();
    const std::vector<float> expected = OnHost(count, elements, scaling);
    for (const Memory& memory : Reduced(Schedule::kOrdered, count, elements, 512, in_place, batch).memory)
      RT_CHECK(std::equal(expected.begin(), expected.end(), memory.output.begin()));
  });
}

RT_TEST(the_bits_of_an_ordered_sum_do_not_depend_on_its_pieces) {
  const Members whole = Reduced(Schedule::kOrdered, 3, 5000, 5000, true, Sum(3));
  const Members cut = Reduced(Schedule::kOrdered, 3, 5000, 192, true, Sum(3));
  RT_CHECK(cut.plans[0].size() > whole.plans[0].size());
  RT_CHECK(cut.memory[1].output == whole.memory[2].output);
}

RT_TEST(shards_that_are_equal_are_gathered_by_one_call) {
  const Batch batch = Sum(3);
  std::vector<float> run(192), room(192);
  char* const memory = reinterpret_cast<char*>(run.data());
  const NcclRoom space{reinterpret_cast<char*>(room.data()), room.size() * sizeof(float)};
  const auto last = [&](size_t elements) {
    return PlanAllreduce({{memory, memory, elements, DType::kFloat32}}, Schedule::kOrdered, batch, OneHost(3, 1), space)
        .back()
        .calls;
  };
  RT_CHECK(last(192).size() == 1 && last(192)[0].kind == Kind::kAllGather);
  RT_CHECK(last(191).size() == 3 && last(191)[2].kind == Kind::kBroadcast && last(191)[2].elements == 63);
}

}  // namespace
}  // namespace ringtrain
