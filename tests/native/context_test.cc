// The whole core through its Context: worlds of ranks that are threads of this process, every operation against an
// oracle of small integers, and what happens when ranks join, abort, leave, refuse and misuse. Failures print the seed.
#include "run/context.h"

#include <algorithm>
#include <cmath>
#include <complex>
#include <cstring>
#include <numeric>
#include <random>
#include <set>

#include "check.h"
#include "kernels/float16.h"
#include "transport/in_process.h"

namespace ringtrain {
namespace {

// Longer than any wait that is not a hang.
constexpr double kHang = 100;

Nanoseconds HangDeadline() { return DeadlineAfter(kHang); }

using Handles = std::vector<std::shared_ptr<Submission>>;

Status OpenRank(const std::shared_ptr<Hub>& hub, int rank, const std::string& text, std::shared_ptr<Context>* context) {
  Options options;
  RT_TRY(Options::Parse(text, &options));
  std::unique_ptr<Rendezvous> rendezvous;
  RT_TRY(Hub::Join(hub, rank, &rendezvous));
  return Context::Open(*rendezvous, options, context);
}

class Ranks {
 public:
  explicit Ranks(int size, const std::string& layout = "", const std::string& options = "") : contexts_(size) {
    std::vector<int> hosts;
    RT_REQUIRE_OK(ParseLayout(layout, size, &hosts));
    hub_ = std::make_shared<Hub>(hosts);
    Run([&](int rank) { RT_REQUIRE_OK(OpenRank(hub_, rank, options, &contexts_[rank])); });
  }
  ~Ranks() { Close(); }

  int size() const { return static_cast<int>(contexts_.size()); }
  Context& operator[](int rank) { return *contexts_[rank]; }
  Hub& hub() { return *hub_; }
  std::shared_ptr<Context>& shared(int rank) { return contexts_[rank]; }
  void Run(const std::function<void(int)>& body) { check::RunRanks(size(), body); }
  // The test has made the world fail, and Close says so.
  void ExpectFailure() { failed_ = true; }
  void Close() {
    Run([&](int rank) {
      if (contexts_[rank] == nullptr) return;
      const Status ended = contexts_[rank]->Close();
      if (!failed_) RT_CHECK_OK(ended);
    });
  }

 private:
  std::shared_ptr<Hub> hub_;
  std::vector<std::shared_ptr<Context>> contexts_;
  bool failed_ = false;
};

// Waits for the operation; one that hangs ends the process, because its tensors must not go before it.
Status WaitFor(Context& context, Submission& submission) {
  context.Wait(*submission.handle, HangDeadline());
  if (submission.handle->done()) return submission.handle->status();
  std::fprintf(stderr, "%s hangs on rank %d\n", submission.request.Subject().c_str(), context.world().rank);
  std::abort();
}

// ---- elements ----

void Store(DType dtype, double value, char* to) {
  const int64_t whole = static_cast<int64_t>(value);
  auto put = [&](auto element) { std::memcpy(to, &element, sizeof element); };
  switch (dtype) {
    case DType::kUInt8:
      return put(static_cast<uint8_t>(whole));
    case DType::kInt8:
      return put(static_cast<int8_t>(whole));
    case DType::kInt16:
      return put(static_cast<int16_t>(whole));
    case DType::kInt32:
      return put(static_cast<int32_t>(whole));
    case DType::kInt64:
      return put(whole);
    case DType::kFloat16:
      return put(Float32ToFloat16(static_cast<float>(value)));
    case DType::kBFloat16:
      return put(Float32ToBFloat16(static_cast<float>(value)));
    case DType::kFloat32:
      return put(static_cast<float>(value));
    case DType::kFloat64:
      return put(value);
    case DType::kBool:
      return put(static_cast<uint8_t>(value != 0));
    case DType::kUInt16:
      return put(static_cast<uint16_t>(whole));
    case DType::kUInt32:
      return put(static_cast<uint32_t>(whole));
    case DType::kUInt64:
      return put(static_cast<uint64_t>(whole));
    case DType::kComplex64:
      return put(std::complex<float>(static_cast<float>(value), static_cast<float>(-value)));
    case DType::kComplex128:
      return put(std::complex<double>(value, -value));
    case DType::kFloat8E4M3FN:  // which are only moved
    case DType::kFloat8E4M3FNUZ:
    case DType::kFloat8E5M2:
    case DType::kFloat8E5M2FNUZ:
    case DType::kFloat8E8M0FNU:
      return put(static_cast<uint8_t>(whole));
  }
}

constexpr DType kDTypes[] = {DType::kUInt8,   DType::kInt8,      DType::kInt16,      DType::kInt32,
                             DType::kInt64,   DType::kFloat16,   DType::kBFloat16,   DType::kFloat32,
                             DType::kFloat64, DType::kBool,      DType::kUInt16,     DType::kUInt32,
                             DType::kUInt64,  DType::kComplex64, DType::kComplex128, DType::kFloat8E5M2};

bool IsReduced(DType dtype, Reduction reduction) {
  if (dtype == DType::kBool) return reduction != Reduction::kAverage;
  if (dtype == DType::kComplex64 || dtype == DType::kComplex128)
    return reduction == Reduction::kSum || reduction == Reduction::kAverage;
  return dtype != DType::kFloat8E5M2;
}

// Small enough that no sum or product of seven ranks is rounded.
int64_t Value(Reduction reduction, int rank, int64_t index) {
  return reduction == Reduction::kProduct ? 1 + (rank + index) % 2 : (rank * 7 + index * 3 + index / 256) % 5;
}

double Combine(const Request& request, const std::vector<int>& ranks, int64_t index, int divisor) {
  const Reduction reduction = request.reduction;
  const bool is_bool = request.tensors[0].dtype == DType::kBool;
  double result = static_cast<double>(Value(reduction, ranks[0], index));
  if (is_bool) result = result != 0;
  for (size_t next = 1; next < ranks.size(); ++next) {
    double value = static_cast<double>(Value(reduction, ranks[next], index));
    if (is_bool) value = value != 0;
    if (reduction == Reduction::kMin)
      result = std::min(result, value);
    else if (reduction == Reduction::kMax)
      result = std::max(result, value);
    else if (reduction == Reduction::kProduct)
      result *= value;
    else
      result += value;
  }
  if (reduction != Reduction::kAverage) return result;
  return Find(request.tensors[0].dtype)->text[0] == 'f' && request.tensors[0].dtype != DType::kFloat64
             ? static_cast<float>(result) / static_cast<float>(divisor)
             : result / divisor;
}

// ---- operations with their oracle ----

// One operation of one rank, its memory, and what it must give. `members` are those that take part, `active` those of
// them that have not joined.
struct Trial {
  std::shared_ptr<Submission> submission = std::make_shared<Submission>();
  std::vector<std::vector<char>> inputs, outputs, expected;
  std::vector<int64_t> expected_splits;

  void Check() const {
    const Handle& handle = *submission->handle;
    for (size_t tensor = 0; tensor < expected.size(); ++tensor) {
      const Handle::Output& output = handle.outputs[tensor];
      TensorSpec spec{submission->request.tensors[tensor].dtype, output.shape};
      if (!RT_CHECK_EQ(spec.bytes(), expected[tensor].size())) continue;
      if (spec.bytes() > 0 && std::memcmp(output.data, expected[tensor].data(), spec.bytes()) != 0)
        RT_CHECK_EQ("wrong elements in " + submission->request.Subject() + " " + spec.Text(), std::string());
    }
    RT_CHECK(handle.received_splits == expected_splits);
  }
};

struct Plan {
  std::string name;
  Operation operation;
  Reduction reduction = Reduction::kSum;
  DType dtype = DType::kFloat32;
  int64_t count = 0;
  int tensors = 1;
  bool in_place = false;
  int root = 0;  // global rank
  int process_set = 0;
  Compression compression = Compression::kNone;
};

struct Party {
  std::vector<int> members, active;  // global ranks
  int divisor = 0;                   // 0: the active ones
};

Party Everyone(int size) {
  Party party;
  party.members.resize(size);
  std::iota(party.members.begin(), party.members.end(), 0);
  party.active = party.members;
  return party;
}

int64_t GatherRows(int64_t count, int rank) { return rank % 2 == 1 ? count : count / 2; }
int64_t SplitRows(int64_t count, int from, int to, int size) {
  return count / size + (count > 0 ? (from + 2 * to) % 3 : 0);
}

std::vector<char> Elements(const Plan& plan, int rank, int64_t count) {
  const size_t bytes = Bytes(plan.dtype);
  std::vector<char> data(count * bytes);
  for (int64_t index = 0; index < count; ++index)
    Store(plan.dtype, static_cast<double>(Value(plan.reduction, rank, index)), data.data() + index * bytes);
  return data;
}

void Append(std::vector<char>* to, const std::vector<char>& from, size_t begin, size_t bytes) {
  to->insert(to->end(), from.begin() + begin, from.begin() + begin + bytes);
}

Trial MakeTrial(const Plan& plan, const Party& party, int rank) {
  Trial trial;
  Submission& submission = *trial.submission;
  Request& request = submission.request;
  request.name = plan.name;
  request.operation = plan.operation;
  request.reduction = plan.reduction;
  request.compression = plan.compression;
  if (plan.operation == Operation::kBroadcast) request.root = plan.root;
  submission.process_set = plan.process_set;
  const size_t bytes = Bytes(plan.dtype);
  const int size = static_cast<int>(party.members.size());
  const int me = static_cast<int>(std::find(party.members.begin(), party.members.end(), rank) - party.members.begin());
  for (int tensor = 0; tensor < plan.tensors; ++tensor) {
    const int64_t count = plan.count + tensor;
    std::vector<char> expected;
    int64_t elements = count;
    std::vector<int64_t> shape = {count};
    if (plan.operation == Operation::kAllreduce || plan.operation == Operation::kReducescatter) {
      if (plan.operation == Operation::kReducescatter) shape = {count, 2}, elements *= 2;
      request.tensors.push_back({plan.dtype, shape});
      const int divisor = party.divisor > 0 ? party.divisor : static_cast<int>(party.active.size());
      std::vector<char> all(elements * bytes);
      for (int64_t index = 0; index < elements; ++index)
        Store(plan.dtype, Combine(request, party.active, index, divisor), all.data() + index * bytes);
      if (plan.operation == Operation::kAllreduce) {
        expected = all;
      } else {
        int64_t begin = 0;
        auto rows = [&](int member) { return count / size + (member < count % size ? 1 : 0); };
        for (int member = 0; member < me; ++member) begin += rows(member);
        Append(&expected, all, begin * 2 * bytes, rows(me) * 2 * bytes);
      }
    } else if (plan.operation == Operation::kAllgather) {
      elements = GatherRows(count, rank);
      request.tensors.push_back({plan.dtype, {elements}});
      for (int other : party.active) {
        const int64_t rows = GatherRows(count, other);
        Append(&expected, Elements(plan, other, rows), 0, rows * bytes);
      }
    } else if (plan.operation == Operation::kBroadcast) {
      request.tensors.push_back({plan.dtype, shape});
      expected = Elements(plan, plan.root, count);
    } else {  // alltoall
      auto splits = [&](int from) {
        std::vector<int64_t> rows;
        for (int to = 0; to < size; ++to) rows.push_back(SplitRows(count, from, to, size));
        return rows;
      };
      request.splits = splits(me);
      elements = std::accumulate(request.splits.begin(), request.splits.end(), int64_t{0});
      request.tensors.push_back({plan.dtype, {elements}});
      for (int from = 0; from < size; ++from) {
        const bool active = std::count(party.active.begin(), party.active.end(), party.members[from]) > 0;
        const std::vector<int64_t> rows = active ? splits(from) : std::vector<int64_t>(size, 0);
        const int64_t begin = std::accumulate(rows.begin(), rows.begin() + me, int64_t{0});
        const int64_t all = std::accumulate(rows.begin(), rows.end(), int64_t{0});
        Append(&expected, Elements(plan, party.members[from], all), begin * bytes, rows[me] * bytes);
        trial.expected_splits.push_back(rows[me]);
      }
    }
    trial.inputs.push_back(Elements(plan, rank, elements));
    trial.outputs.emplace_back(elements * bytes);
    trial.expected.push_back(std::move(expected));
  }
  for (int tensor = 0; tensor < plan.tensors; ++tensor) {
    char* input = trial.inputs[tensor].data();
    submission.inputs.push_back(input);
    const bool given = Find(plan.operation)->output == Output::kSame && plan.count % 3 != 1;  // else the core allocates
    submission.outputs.push_back(!given ? nullptr : plan.in_place ? input : trial.outputs[tensor].data());
  }
  return trial;
}

std::vector<Plan> AllPlans(int size) {
  std::vector<Plan> plans;
  auto add = [&](Plan plan) {
    plan.name = std::to_string(plans.size());
    plans.push_back(plan);
  };
  for (DType dtype : kDTypes)
    for (int64_t count : {0, 1, size - 1, size, 13, 257}) {
      for (Reduction reduction :
           {Reduction::kSum, Reduction::kAverage, Reduction::kMin, Reduction::kMax, Reduction::kProduct})
        if (IsReduced(dtype, reduction)) add({"", Operation::kAllreduce, reduction, dtype, count, 1, count % 2 == 1});
      for (Operation operation :
           {Operation::kAllgather, Operation::kBroadcast, Operation::kAlltoall, Operation::kReducescatter})
        if (operation != Operation::kReducescatter || IsReduced(dtype, Reduction::kSum))
          add({"", operation, Reduction::kSum, dtype, count, 1, false, static_cast<int>(count) % size});
    }
  // Longer than many chunks, so that every slot is used again; and groups.
  for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kUInt8})
    for (Operation operation : {Operation::kAllreduce, Operation::kAllgather, Operation::kBroadcast,
                                Operation::kAlltoall, Operation::kReducescatter}) {
      add({"", operation, Reduction::kSum, dtype, 20011, 1, true, size - 1});
      if (operation != Operation::kAlltoall) add({"", operation, Reduction::kSum, dtype, 611, 3, true, size / 2});
    }
  // Sums small enough to lose nothing on a 16-bit wire.
  for (DType dtype : {DType::kFloat32, DType::kFloat64, DType::kInt32})
    for (Compression compression : {Compression::kFloat16, Compression::kBFloat16})
      for (Operation operation : {Operation::kAllreduce, Operation::kReducescatter})
        for (int64_t count : {size - 1, 611})
          add({"", operation, Reduction::kSum, dtype, count, 2, true, 0, 0, compression});
  return plans;
}

// Enough to meet in any order: what dtypes do differs in arithmetic alone, which has no threads.
std::vector<Plan> EachFifth(const std::vector<Plan>& plans) {
  std::vector<Plan> some;
  for (size_t index = 0; index < plans.size(); index += 5) some.push_back(plans[index]);
  return some;
}

// Submits all in a random order, waits in another, checks everything.
void RunPlans(Context& context, const std::vector<Plan>& plans, const Party& party, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<Trial> trials;
  for (const Plan& plan : plans) trials.push_back(MakeTrial(plan, party, context.world().rank));
  std::vector<size_t> order(trials.size());
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  for (size_t index : order) RT_CHECK_OK(context.Submit(trials[index].submission, {}, false));
  std::shuffle(order.begin(), order.end(), random);
  for (size_t index : order)
    if (RT_CHECK_OK(WaitFor(context, *trials[index].submission))) trials[index].Check();
}

RT_TEST(every_operation_in_every_world) {
  struct WorldCase {
    int size;
    const char* layout;
    const char* algorithm;
  };
  const WorldCase worlds[] = {{1, "", "auto"},     {2, "", "auto"},        {2, "1+1", "auto"}, {3, "", "auto"},
                              {3, "2+1", "auto"},  {3, "", "ring"},        {4, "", "auto"},    {4, "2+2", "auto"},
                              {4, "1+3", "auto"},  {4, "1+1+1+1", "auto"}, {7, "", "auto"},    {7, "3+4", "auto"},
                              {7, "2+4+1", "auto"}};
  for (const WorldCase& world : worlds) {
    if (check::kThreadSanitizer && world.size > 4) continue;  // a third of a minute
    const int before = check::Failures();
    Ranks ranks(world.size, world.layout,
                std::string("chunk_bytes=256\nfusion_threshold_bytes=20000\nalgorithm=") + world.algorithm);
    std::vector<Plan> plans = AllPlans(world.size);
    if (check::kThreadSanitizer) plans = EachFifth(plans);
    ranks.Run([&](int rank) {
      for (int step = 0; step < 2; ++step) RunPlans(ranks[rank], plans, Everyone(world.size), rank + 100 * step);
    });
    if (check::Failures() > before)
      std::fprintf(stderr, "size %d layout '%s' algorithm %s\n", world.size, world.layout, world.algorithm);
  }
}

// ---- bits ----

// Sums of random float32 by rank, with all sizes in flight at once, in an order of its own on each rank.
std::vector<std::vector<float>> RandomSums(int size, const std::string& layout, const std::string& options,
                                           uint64_t seed, bool one_by_one) {
  const std::vector<size_t> counts = {1, 2, 3, 5, 64, 1000, 4099, 30000};
  Ranks ranks(size, layout, options);
  std::vector<std::vector<float>> sums;
  for (size_t count : counts) sums.emplace_back(count);
  ranks.Run([&](int rank) {
    std::vector<std::vector<float>> data;
    for (size_t count : counts) {
      std::mt19937 values(static_cast<unsigned>(count * 31 + rank));
      std::normal_distribution<float> normal;
      data.emplace_back(count);
      for (float& value : data.back()) value = normal(values);
    }
    std::vector<size_t> order(counts.size());
    std::iota(order.begin(), order.end(), 0);
    std::mt19937_64 shuffle(one_by_one ? seed : seed + rank);
    std::shuffle(order.begin(), order.end(), shuffle);
    Handles handles;
    for (size_t index : order) {
      auto submission = std::make_shared<Submission>();
      submission->request.name = std::to_string(index);
      submission->request.tensors = {{DType::kFloat32, {static_cast<int64_t>(counts[index])}}};
      submission->inputs = {data[index].data()};
      submission->outputs = {data[index].data()};
      RT_CHECK_OK(ranks[rank].Submit(submission, {}, one_by_one));
      if (one_by_one) RT_CHECK_OK(WaitFor(ranks[rank], *submission));
      handles.push_back(std::move(submission));
    }
    for (auto& handle : handles) RT_CHECK_OK(WaitFor(ranks[rank], *handle));
    if (rank == size - 1) sums = data;
  });
  return sums;
}

bool SameBits(const std::vector<std::vector<float>>& a, const std::vector<std::vector<float>>& b) {
  if (a.size() != b.size()) return false;
  for (size_t tensor = 0; tensor < a.size(); ++tensor)
    if (a[tensor].size() != b[tensor].size() ||
        std::memcmp(a[tensor].data(), b[tensor].data(), 4 * a[tensor].size()) != 0)
      return false;
  return true;
}

RT_TEST(sums_on_one_host_are_the_sums_in_rank_order) {
  for (int size : {2, 3, 4, 7}) {
    std::vector<std::vector<float>> expected;
    for (size_t count : {1, 2, 3, 5, 64, 1000, 4099, 30000}) {
      expected.emplace_back(count);
      for (int rank = 0; rank < size; ++rank) {
        std::mt19937 values(static_cast<unsigned>(count * 31 + rank));
        std::normal_distribution<float> normal;
        for (float& sum : expected.back()) sum = rank == 0 ? normal(values) : sum + normal(values);
      }
    }
    for (const char* options :
         {"", "chunk_bytes=256", "fusion_threshold_bytes=0", "fusion_threshold_bytes=5000\nchunk_bytes=10000"})
      for (uint64_t seed : {1, 2}) RT_CHECK(SameBits(RandomSums(size, "", options, seed, seed == 2), expected));
  }
}

RT_TEST(sums_across_hosts_do_not_depend_on_fusion_or_order) {
  struct WorldCase {
    int size;
    const char* layout;
    const char* algorithm;
  };
  for (const WorldCase& world : {WorldCase{2, "1+1", "auto"},
                                 {4, "2+2", "hierarchical"},
                                 {5, "2+3", "auto"},
                                 {6, "2+2+2", "auto"},
                                 {4, "", "ring"}}) {
    const std::string options = std::string("chunk_bytes=4096\nalgorithm=") + world.algorithm;
    const auto expected = RandomSums(world.size, world.layout, options + "\nfusion_threshold_bytes=0", 1, true);
    for (const char* more : {"", "\nfusion_threshold_bytes=0", "\nfusion_threshold_bytes=5000", "\ncache_capacity=2"})
      for (int seed = 1; seed <= check::Rounds(3); ++seed)
        RT_CHECK(SameBits(RandomSums(world.size, world.layout, options + more, static_cast<uint64_t>(seed), false),
                          expected));
  }
}

// ---- many at once ----

std::shared_ptr<Submission> SmallSum(const std::string& name, float* value, int process_set = 0) {
  auto submission = std::make_shared<Submission>();
  submission->process_set = process_set;
  submission->request.name = name;
  submission->request.tensors = {{DType::kFloat32, {1}}};
  submission->inputs = {value};
  submission->outputs = {value};
  return submission;
}

std::shared_ptr<Submission> Control(Operation operation, const std::string& name, std::vector<int64_t> list = {}) {
  auto submission = std::make_shared<Submission>();
  submission->request.operation = operation;
  submission->request.name = name;
  submission->request.splits = std::move(list);
  return submission;
}

// A sum over the world of one element, waited for.
Status SumOnce(Context& context, const std::string& name, float* value, int process_set = 0) {
  auto submission = SmallSum(name, value, process_set);
  RT_TRY(context.Submit(submission, {}, true));
  return WaitFor(context, *submission);
}

RT_TEST(several_threads_of_each_rank_submit_in_any_order) {
  for (const char* layout : {"", "2+1"})
    for (const char* spin : {"0", "20"}) {
      Ranks ranks(3, layout, std::string("spin_microseconds=") + spin);
      check::RunRanks(9, [&](int number) {
        const int rank = number / 3, thread = number % 3;
        std::mt19937_64 random(number);
        for (int step = 0; step < 10; ++step) {
          constexpr int kNames = 20;
          std::vector<float> values(kNames);
          std::vector<int> order(kNames);
          std::iota(order.begin(), order.end(), 0);
          std::shuffle(order.begin(), order.end(), random);
          Handles handles(kNames);
          for (int name : order) {
            values[name] = static_cast<float>(name * (rank + 1));
            handles[name] = SmallSum(std::to_string(thread) + "." + std::to_string(name), &values[name]);
            const bool waits = random() % 4 == 0;
            RT_CHECK_OK(ranks[rank].Submit(handles[name], {}, waits));
          }
          std::shuffle(order.begin(), order.end(), random);
          for (int name : order) {
            RT_CHECK_OK(WaitFor(ranks[rank], *handles[name]));
            RT_CHECK_EQ(values[name], static_cast<float>(name * 6));
          }
        }
      });
    }
}

// One small operation after another, waited for or polled for: wake-ups that get lost show here as a hang.
// Each rank sends to each other one from two threads, in an order of their own, and receives in another.
RT_TEST(sends_and_receives_of_several_threads) {
  for (const char* layout : {"", "1+1+1", "2+1"}) {
    Ranks ranks(3, layout);
    constexpr int kTags = 12;
    const auto bytes_of = [](int tag) { return std::vector<size_t>{0, 5, 8192, 8193, 200'000, 1'500'000}[tag % 6]; };
    ranks.Run([&](int rank) {
      const auto act = [&](bool sends, unsigned seed) {
        std::mt19937 random(seed);
        std::vector<std::pair<int, int>> pairs;  // other rank, tag
        for (int other = 0; other < ranks.size(); ++other)
          for (int tag = 0; tag < kTags; ++tag)
            if (other != rank) pairs.emplace_back(other, tag);
        std::shuffle(pairs.begin(), pairs.end(), random);
        std::vector<std::vector<char>> memory;
        Handles handles;
        for (const auto& [other, tag] : pairs) {
          memory.emplace_back(bytes_of(tag), static_cast<char>(sends ? rank * 50 + tag : -1));
          auto submission = std::make_shared<Submission>();
          submission->request.name = (sends ? "s" : "r") + std::to_string(other) + "." + std::to_string(tag);
          submission->request.operation = sends ? Operation::kSend : Operation::kReceive;
          submission->request.root = other;
          submission->request.splits = {tag};
          submission->request.tensors = {{DType::kUInt8, {static_cast<int64_t>(bytes_of(tag))}}};
          char none;
          submission->inputs = {bytes_of(tag) == 0 ? &none : memory.back().data()};
          submission->outputs = {memory.back().data()};
          handles.push_back(submission);
          RT_REQUIRE_OK(ranks[rank].Submit(submission, {}, random() % 2 == 0));
        }
        for (size_t index = 0; index < pairs.size(); ++index) {
          RT_CHECK_OK(WaitFor(ranks[rank], *handles[index]));
          const auto [other, tag] = pairs[index];
          if (sends) continue;
          RT_CHECK_EQ(handles[index]->handle->result, other);
          RT_CHECK(memory[index] == std::vector<char>(bytes_of(tag), static_cast<char>(other * 50 + tag)));
        }
      };
      std::thread sender(act, true, static_cast<unsigned>(rank));
      act(false, static_cast<unsigned>(rank + 10));
      sender.join();
    });
  }
}

RT_TEST(small_operations_back_to_back) {
  for (int size : {2, 3, 4})
    for (const char* spin : {"0", "20"}) {
      Ranks ranks(size, size == 4 ? "2+2" : "", std::string("spin_microseconds=") + spin);
      ranks.Run([&](int rank) {
        std::mt19937_64 random(size * 10 + rank);
        for (int step = 0; step < check::Rounds(500); ++step) {
          float value = static_cast<float>(step);
          auto submission = SmallSum("x", &value);
          const bool waits = random() % 2 == 0;
          RT_CHECK_OK(ranks[rank].Submit(submission, {}, waits));
          if (!waits && random() % 2 == 0)
            for (const Nanoseconds deadline = HangDeadline(); !submission->handle->done() && Now() < deadline;)
              std::this_thread::yield();
          RT_CHECK_OK(WaitFor(ranks[rank], *submission));
          RT_CHECK_EQ(value, static_cast<float>(step * size));
        }
      });
    }
}

RT_TEST(many_barriers_at_once) {
  Ranks ranks(3);
  ranks.Run([&](int rank) {
    Handles handles;
    for (int index = 0; index < 30; ++index) {
      handles.push_back(Control(Operation::kBarrier, "barrier" + std::to_string((index + rank * 10) % 30)));
      RT_CHECK_OK(ranks[rank].Submit(handles.back(), {}, false));
    }
    for (auto& handle : handles) RT_CHECK_OK(WaitFor(ranks[rank], *handle));
  });
}

// It was announced that the caller waits, and then it does not: the context's own thread finds the operation at its
// next look.
RT_TEST(caller_that_never_waits_is_served) {
  Ranks ranks(2);
  ranks.Run([&](int rank) {
    float value = 1;
    auto submission = SmallSum("x", &value);
    RT_CHECK_OK(ranks[rank].Submit(submission, {}, true));
    for (const Nanoseconds deadline = HangDeadline(); !submission->handle->done() && Now() < deadline;)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    RT_REQUIRE(submission->handle->done());
    RT_CHECK_EQ(value, 2.0f);
  });
}

RT_TEST(nothing_happens_while_nothing_is_pending) {
  Ranks ranks(2);
  ranks.Run([&](int rank) {
    float value = 1;
    RT_CHECK_OK(SumOnce(ranks[rank], "x", &value));
  });
  const int64_t frames = ranks[1].counters().Get(static_cast<int>(Counter::kFramesSent));
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  RT_CHECK_EQ(ranks[1].counters().Get(static_cast<int>(Counter::kFramesSent)), frames);
}

// ---- callbacks and handles ----

struct Callbacks {
  std::vector<char> memory;
  std::vector<int64_t> shape;
  std::atomic<int> done{0};
  int status = -1;
  std::string error;

  static void* Allocate(void* context, int32_t tensor, int32_t ndim, const int64_t* shape) {
    Callbacks& self = *static_cast<Callbacks*>(context);
    RT_CHECK_EQ(tensor, 0);
    self.shape.assign(shape, shape + ndim);
    self.memory.resize(std::max<int64_t>(1, shape[0] * 4));
    return self.memory.data();
  }
  static void Done(void* context, int32_t status, const char* error) {
    Callbacks& self = *static_cast<Callbacks*>(context);
    self.status = status;
    self.error = error == nullptr ? "" : error;
    ++self.done;
  }
};

RT_TEST(callbacks_provide_memory_and_hear_of_the_end) {
  Ranks ranks(3);
  ranks.Run([&](int rank) {
    Callbacks callbacks, refused;
    const float values[] = {static_cast<float>(rank), 10};
    auto submission = std::make_shared<Submission>();
    submission->request.name = "x";
    submission->request.operation = Operation::kAllgather;
    submission->request.tensors = {{DType::kFloat32, {2}}};
    submission->inputs = {values};
    submission->outputs = {nullptr};
    submission->allocate = &Callbacks::Allocate;
    submission->done = &Callbacks::Done;
    submission->callback_context = &callbacks;
    RT_CHECK_OK(ranks[rank].Submit(submission, {}, true));
    RT_CHECK_OK(WaitFor(ranks[rank], *submission));
    RT_CHECK(callbacks.shape == std::vector<int64_t>{6});
    RT_CHECK_EQ(callbacks.done.load(), 1);
    RT_CHECK_EQ(callbacks.status, 0);
    for (int other = 0; other < 3; ++other) {
      float found;
      std::memcpy(&found, callbacks.memory.data() + other * 8, sizeof found);
      RT_CHECK_EQ(found, static_cast<float>(other));
    }
    // A refusal raises; the callback belongs to operations that were accepted.
    float value = 1;
    auto bad = SmallSum("bad", &value);
    bad->done = &Callbacks::Done;
    bad->callback_context = &refused;
    RT_CHECK(!ranks[rank].Submit(bad, Status::InvalidArgument("no"), false).ok());
    RT_CHECK_EQ(refused.done.load(), 0);
  });
}

// An allgather, reducescatter or alltoall of which one rank has no memory for the result.
std::shared_ptr<Submission> WithoutOutput(Operation operation, const float* values, int64_t rows, bool lacks) {
  auto submission = std::make_shared<Submission>();
  submission->request.name = "x";
  submission->request.operation = operation;
  submission->request.tensors = {{DType::kFloat32, {rows, 100}}};
  submission->inputs = {values};
  submission->outputs = {nullptr};
  if (lacks) submission->allocate = [](void*, int32_t, int32_t, const int64_t*) -> void* { return nullptr; };
  return submission;
}

RT_TEST(no_memory_for_a_result_fails_the_operation_of_that_rank_alone) {
  for (const char* layout : {"", "1+2"})
    for (Operation operation : {Operation::kAllgather, Operation::kReducescatter, Operation::kAlltoall}) {
      if (operation == Operation::kAlltoall && layout[0] != '\0') continue;  // where it ends the world
      Ranks ranks(3, layout);
      ranks.Run([&](int rank) {
        const std::vector<float> values(300 * 100, static_cast<float>(rank + 1));
        for (int round = 0; round < 4; ++round) {
          const bool lacks = rank == round % 3;
          auto submission = WithoutOutput(operation, values.data(), 300, lacks);
          RT_CHECK_OK(ranks[rank].Submit(submission, {}, true));
          const Status status = WaitFor(ranks[rank], *submission);
          RT_CHECK_EQ(status.ok(), !lacks);
          if (lacks) {
            RT_CHECK(status.message().find("no memory for the output float32[") != std::string::npos);
            continue;
          }
          float last;
          const Handle::Output& output = submission->handle->outputs[0];
          const int64_t elements = output.shape[0] * output.shape[1];
          std::memcpy(&last, static_cast<const char*>(output.data) + (elements - 1) * 4, sizeof last);
          RT_CHECK_EQ(last, operation == Operation::kReducescatter ? 6.0f : 3.0f);
        }
        float value = 1;
        RT_CHECK_OK(SumOnce(ranks[rank], "after", &value));
        RT_CHECK_EQ(value, 3.0f);
      });
    }
}

RT_TEST(no_memory_for_an_alltoall_between_hosts_ends_the_world_with_a_text) {
  Ranks ranks(2, "1+1");
  ranks.ExpectFailure();
  ranks.Run([&](int rank) {
    const std::vector<float> values(100 * 100, 1);
    auto submission = WithoutOutput(Operation::kAlltoall, values.data(), 100, rank == 1);
    RT_CHECK_OK(ranks[rank].Submit(submission, {}, true));
    const Status status = WaitFor(ranks[rank], *submission);
    RT_CHECK(!status.ok());
    RT_CHECK(status.message().find("no memory for the output") != std::string::npos);
  });
}

// A rank that has joined needs room for the rows that come to it; no vector has room for these.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // which end the process instead of throwing
RT_TEST(running_out_of_memory_within_an_operation_ends_the_world_with_a_text) {
  Ranks ranks(2);
  ranks.ExpectFailure();
  static const char nothing = 0;
  ranks.Run([&](int rank) {
    auto submission = std::make_shared<Submission>();
    submission->request.name = rank == 1 ? "join" : "x";
    if (rank == 1) {
      submission->request.operation = Operation::kJoin;
    } else {
      submission->request.operation = Operation::kAlltoall;
      submission->request.tensors = {{DType::kUInt8, {int64_t{1} << 62}}};
      submission->request.splits = {0, int64_t{1} << 62};
      submission->inputs = {&nothing};
      submission->outputs = {nullptr};
    }
    RT_CHECK_OK(ranks[rank].Submit(submission, {}, true));
    const Status status = WaitFor(ranks[rank], *submission);
    RT_CHECK(!status.ok());
    RT_CHECK(status.message().find("rank 1: its memory must suffice") != std::string::npos);
  });
}
#endif

RT_TEST(a_tensor_without_memory_is_refused_for_all) {
  Ranks ranks(2);
  ranks.Run([&](int rank) {
    float value = 1;
    auto submission = SmallSum("x", &value);
    if (rank == 1) submission->inputs = {nullptr};
    Status status = ranks[rank].Submit(submission, {}, false);
    if (status.ok()) status = WaitFor(ranks[rank], *submission);
    RT_CHECK_EQ(
        status.message(),
        std::string("allreduce 'x': the tensor must have memory, but float32[1] has none. Was its storage freed? "
                    "Found on rank 1."));
    value = 1;
    RT_CHECK_OK(SumOnce(ranks[rank], "x", &value));
  });
}

RT_TEST(duplicate_names_raise_and_leave_the_first_unharmed) {
  Ranks ranks(2);
  float first = 1, second = 10, peer = 2;
  auto submission = SmallSum("x", &first);
  RT_CHECK_OK(ranks[0].Submit(submission, {}, false));
  RT_CHECK_EQ(ranks[0].Submit(SmallSum("x", &second), {}, false).code(), StatusCode::kInvalidArgument);
  RT_CHECK_EQ(ranks[0].Submit(SmallSum("x", &second), Status::InvalidArgument("refused as well"), false).code(),
              StatusCode::kInvalidArgument);
  RT_CHECK_OK(SumOnce(ranks[1], "x", &peer));
  RT_CHECK_OK(WaitFor(ranks[0], *submission));
  RT_CHECK_EQ(first, 3.0f);
  RT_CHECK_EQ(peer, 3.0f);
  RT_CHECK_EQ(second, 10.0f);
}

RT_TEST(refusal_of_one_rank_fails_its_peers_and_the_next_round_works) {
  for (const char* layout : {"", "1+2"}) {
    Ranks ranks(3, layout);
    ranks.Run([&](int rank) {
      for (int round = 0; round < 20; ++round) {
        float value = 1;
        auto submission = SmallSum("x", &value);
        if (rank == round % 3) submission->request.tensors[0].shape = {-1};  // only this rank can see it
        Status status = ranks[rank].Submit(submission, {}, false);
        RT_CHECK_EQ(status.ok(), rank != round % 3);
        if (status.ok()) status = WaitFor(ranks[rank], *submission);
        RT_CHECK_EQ(status.message(),
                    "allreduce 'x': the shape must not be negative, but is float32[-1]. Found on rank " +
                        std::to_string(round % 3) + ".");
        value = 1;
        RT_CHECK_OK(SumOnce(ranks[rank], "x", &value));
        RT_CHECK_EQ(value, 3.0f);
      }
    });
  }
}

RT_TEST(handles_outlive_the_context) {
  std::vector<std::shared_ptr<Submission>> kept(2);
  {
    Ranks ranks(2);
    ranks.Run([&](int rank) {
      Plan plan{"g", Operation::kAllgather, Reduction::kSum, DType::kInt32, 5};
      Trial trial = MakeTrial(plan, Everyone(2), rank);
      RT_CHECK_OK(ranks[rank].Submit(trial.submission, {}, true));
      RT_CHECK_OK(WaitFor(ranks[rank], *trial.submission));
      kept[rank] = trial.submission;
    });
  }
  for (auto& submission : kept) {
    RT_CHECK(submission->handle->outputs[0].owned);
    RT_CHECK_EQ(submission->handle->outputs[0].shape[0], int64_t{7});
    int32_t last;
    std::memcpy(&last, static_cast<char*>(submission->handle->outputs[0].data) + 6 * 4, sizeof last);
    RT_CHECK_EQ(int64_t{last}, Value(Reduction::kSum, 1, 4));
  }
}

// ---- join ----

// Ranks join one after another while the others go on with every operation.
void RunWithJoins(int size, const std::string& layout, bool initial_divisor) {
  Ranks ranks(size, layout, std::string("chunk_bytes=256\njoin_divisor=") + (initial_divisor ? "initial" : "active"));
  ranks.Run([&](int rank) {
    for (int epoch = 0; epoch < 2; ++epoch) {
      // Rank (size - 1 + epoch) % size joins first, then the one below it, and so on.
      const int my_steps = (rank - epoch + size) % size;
      for (int step = 0; step <= my_steps; ++step) {
        Party party = Everyone(size);
        party.active.clear();
        for (int other = 0; other < size; ++other)
          if ((other - epoch + size) % size >= step) party.active.push_back(other);
        if (initial_divisor) party.divisor = size;
        std::vector<Plan> plans;
        for (Operation operation : {Operation::kAllreduce, Operation::kAllgather, Operation::kBroadcast,
                                    Operation::kAlltoall, Operation::kReducescatter})
          for (int64_t count : {0, 1, 50, 3001})
            for (DType dtype : {DType::kFloat32, DType::kBFloat16})
              plans.push_back({std::to_string(plans.size()), operation,
                               operation == Operation::kAllreduce ? Reduction::kAverage : Reduction::kSum, dtype, count,
                               1, true, party.active.back()});
        for (Reduction reduction : {Reduction::kMin, Reduction::kMax, Reduction::kProduct})
          plans.push_back(
              {std::to_string(plans.size()), Operation::kAllreduce, reduction, DType::kInt32, 77, 1, false, 0});
        RunPlans(ranks[rank], plans, party, rank + 10 * step);
      }
      auto join = Control(Operation::kJoin, "join");
      RT_CHECK_OK(ranks[rank].Submit(join, {}, true));
      RT_CHECK_OK(WaitFor(ranks[rank], *join));
      RT_CHECK_EQ(join->handle->result, (size - 1 + epoch) % size);
    }
  });
}

RT_TEST(joined_ranks_contribute_nothing) {
  RunWithJoins(2, "", false);
  RunWithJoins(4, "", true);
  RunWithJoins(3, "2+1", false);
  RunWithJoins(4, "2+2", false);
  RunWithJoins(3, "1+1+1", true);
}

// ---- process sets ----

int AddProcessSet(Context& context, const std::string& name, std::vector<int64_t> ranks) {
  auto submission = Control(Operation::kAddProcessSet, name, std::move(ranks));
  RT_CHECK_OK(context.Submit(submission, {}, true));
  RT_CHECK_OK(WaitFor(context, *submission));
  return submission->handle->result;
}

RT_TEST(overlapping_process_sets_work_at_the_same_time) {
  for (const char* layout : {"", "2+2"}) {
    Ranks ranks(4, layout, "chunk_bytes=256");
    ranks.Run([&](int rank) {
      Context& context = ranks[rank];
      for (int round = 0; round < 3; ++round) {
        const std::vector<std::vector<int64_t>> lists = {{0, 1}, {1, 2, 3}, {0, 2}, {3}, {0, 1, 2, 3}};
        std::vector<int> ids;
        for (size_t list = 0; list < lists.size(); ++list)
          ids.push_back(AddProcessSet(context, "add" + std::to_string(list), lists[list]));
        for (size_t list = 0; list < lists.size(); ++list) {
          RT_CHECK_EQ(ids[list], static_cast<int>(round * lists.size() + list + 1));
          RT_CHECK(context.ProcessSetRanks(ids[list]) == std::vector<int>(lists[list].begin(), lists[list].end()));
        }
        std::vector<Trial> trials;
        for (int step = 0; step < 3; ++step)
          for (size_t list = 0; list < lists.size(); ++list) {
            Party party;
            party.members.assign(lists[list].begin(), lists[list].end());
            party.active = party.members;
            if (std::count(party.members.begin(), party.members.end(), rank) == 0) continue;
            for (Operation operation :
                 {Operation::kAllreduce, Operation::kAllgather, Operation::kAlltoall, Operation::kBroadcast}) {
              Plan plan{std::to_string(static_cast<int>(operation)) + "." + std::to_string(step),
                        operation,
                        Reduction::kSum,
                        DType::kFloat32,
                        1500,
                        1,
                        false,
                        party.members[0],
                        ids[list]};
              trials.push_back(MakeTrial(plan, party, rank));
            }
          }
        std::mt19937_64 random(rank);
        std::shuffle(trials.begin(), trials.end(), random);
        for (Trial& trial : trials) RT_CHECK_OK(context.Submit(trial.submission, {}, false));
        for (Trial& trial : trials)
          if (RT_CHECK_OK(WaitFor(context, *trial.submission))) trial.Check();
        for (int id : ids) {
          auto removal = Control(Operation::kRemoveProcessSet, "remove", {id});
          RT_CHECK_OK(context.Submit(removal, {}, true));
          RT_CHECK_OK(WaitFor(context, *removal));
          RT_CHECK(context.ProcessSetRanks(id).empty());
          float value = 1;
          RT_CHECK_EQ(SumOnce(context, "x", &value, id).code(), StatusCode::kInvalidArgument);
        }
      }
    });
  }
}

RT_TEST(process_set_misuse_is_refused) {
  Ranks ranks(3);
  std::vector<int> ids(3);
  ranks.Run([&](int rank) { ids[rank] = AddProcessSet(ranks[rank], "add", {0, 1}); });
  const int id = ids[0];
  float value = 1, waiting = 1;
  auto refused = [&](std::shared_ptr<Submission> submission) {
    RT_CHECK_EQ(ranks[2].Submit(submission, {}, false).code(), StatusCode::kInvalidArgument);
  };
  refused(SmallSum("x", &value, id));  // not a member
  refused(SmallSum("x", &value, 77));  // no such set
  for (const std::vector<int64_t>& list : std::vector<std::vector<int64_t>>{{}, {1, 0}, {1, 1}, {0, 3}, {-1}})
    refused(Control(Operation::kAddProcessSet, "bad", list));
  for (const std::vector<int64_t>& list : std::vector<std::vector<int64_t>>{{}, {0}, {77}, {1, 2}, {-1}})
    refused(Control(Operation::kRemoveProcessSet, "bad", list));
  auto inside = Control(Operation::kAddProcessSet, "inside", {0, 1});
  inside->process_set = id;
  RT_CHECK_EQ(ranks[0].Submit(inside, {}, false).code(), StatusCode::kInvalidArgument);

  // Rank 0 has something pending in the set: its refusal fails the removal on all.
  auto pending = SmallSum("pending", &waiting, id);
  RT_CHECK_OK(ranks[0].Submit(pending, {}, false));
  ranks.Run([&](int rank) {
    auto removal = Control(Operation::kRemoveProcessSet, "remove", {id});
    Status status = ranks[rank].Submit(removal, {}, false);
    if (status.ok()) status = WaitFor(ranks[rank], *removal);
    RT_CHECK_EQ(
        status.message(),
        "remove_process_set 'remove': rank 0 has operations pending in it. Wait for them first. Found on rank 0.");
  });
  RT_CHECK_OK(SumOnce(ranks[1], "pending", &value, id));
  RT_CHECK_OK(WaitFor(ranks[0], *pending));
  RT_CHECK_EQ(waiting, 2.0f);
  // While it is removed, it takes nothing new.
  auto removal = Control(Operation::kRemoveProcessSet, "remove", {id});
  RT_CHECK_OK(ranks[0].Submit(removal, {}, false));
  RT_CHECK_EQ(ranks[0].Submit(SmallSum("late", &value, id), {}, false).code(), StatusCode::kInvalidArgument);
  for (int rank : {1, 2})
    RT_CHECK_OK(ranks[rank].Submit(Control(Operation::kRemoveProcessSet, "remove", {id}), {}, false));
  RT_CHECK_OK(WaitFor(ranks[0], *removal));
}

// ---- abort ----

RT_TEST(abort_fails_everything_on_all_ranks_with_the_first_cause) {
  for (const char* layout : {"", "2+1", "1+1+1"})
    for (int aborter = 0; aborter < 3; ++aborter) {
      Ranks ranks(3, layout);
      ranks.ExpectFailure();
      ranks.Run([&](int rank) {
        float never = 1;
        auto pending = SmallSum("only" + std::to_string(rank), &never);
        Status status = ranks[rank].Submit(pending, {}, rank == 1);  // another rank may have aborted before
        if (rank == aborter) {
          ranks[rank].Abort("rank " + std::to_string(rank) + " ran out of luck");
          ranks[rank].Abort("a later cause");
        }
        const std::string cause = "rank " + std::to_string(aborter) + " ran out of luck";
        if (status.ok()) status = WaitFor(ranks[rank], *pending);
        RT_CHECK_EQ(status.message(), cause);
        RT_CHECK_EQ(status.code(), StatusCode::kPeerLost);
        float value = 1;
        RT_CHECK_EQ(SumOnce(ranks[rank], "later", &value).message(), cause);
      });
    }
}

// As a process does that ends with an uncaught exception: its goodbye must not overtake the cause.
RT_TEST(abort_and_close_at_once_is_an_abort_for_the_others) {
  for (const char* layout : {"", "2+1", "1+1+1"})
    for (int round = 0; round < 40; ++round) {
      Ranks ranks(3, layout);
      ranks.ExpectFailure();
      const int leaver = round % 3;
      const std::string cause = "rank " + std::to_string(leaver) + " raised ValueError";
      ranks.Run([&](int rank) {
        float value = 1;
        if (rank == leaver) {
          RT_CHECK_OK(SumOnce(ranks[rank], "all", &value));
          for (int pause = 0; pause < round * 5; ++pause) std::this_thread::yield();
          ranks[rank].Abort(cause);
          RT_CHECK_EQ(ranks[rank].Close().message(), cause);
          return;
        }
        Status status = SumOnce(ranks[rank], "all", &value);
        if (status.ok()) status = SumOnce(ranks[rank], "left out", &value);
        RT_CHECK_EQ(status.code(), StatusCode::kPeerLost);
        RT_CHECK_EQ(status.message(), cause);
      });
    }
}

// The tensors of a failed operation belong to their owner at once, wherever it was (run under AddressSanitizer).
RT_TEST(abort_in_the_middle_of_operations_lets_go_of_their_memory) {
  for (const char* layout : {"", "1+1", "2+1"})
    for (Operation operation : {Operation::kAllreduce, Operation::kAlltoall, Operation::kBroadcast})
      for (int round = 0; round < check::Rounds(5); ++round) {
        const int size = std::string(layout) == "1+1" ? 2 : 3;
        Ranks ranks(size, layout, "chunk_bytes=256");
        ranks.ExpectFailure();
        ranks.Run([&](int rank) {
          for (int step = 0;; ++step) {
            Plan plan{"x" + std::to_string(step), operation, Reduction::kSum, DType::kFloat32, 50000};
            Trial trial = MakeTrial(plan, Everyone(size), rank);
            Status status = ranks[rank].Submit(trial.submission, {}, rank > 0);
            if (rank == 0 && step == 2) {
              for (int pause = 0; pause < round * 20; ++pause) std::this_thread::yield();
              ranks[rank].Abort("enough");
            }
            if (status.ok()) status = WaitFor(ranks[rank], *trial.submission);
            if (!status.ok()) {
              RT_CHECK_EQ(status.message(), std::string("enough"));
              break;
            }
          }
          for (int pause = 0; pause < 100; ++pause)
            std::this_thread::yield();  // whoever still used the memory would do it now
        });
      }
}

// Between two operations, in one that waits for the lost rank, and in the middle of its tensors.
RT_TEST(a_lost_connection_fails_everything_at_once_and_names_the_rank) {
  for (const char* layout : {"2+1", "1+1+1"})
    for (int round = 0; round < check::Rounds(12); ++round) {
      Ranks ranks(3, layout, "chunk_bytes=4096");
      ranks.ExpectFailure();
      const int lost = 2;
      const std::string subject = "rank 2 on host '" + ranks[0].world().host_names[2] + "': ";
      const Nanoseconds begin = Now();
      ranks.Run([&](int rank) {
        Status status;
        for (int step = 0; status.ok(); ++step) {
          Plan plan{"x" + std::to_string(step), Operation::kAllreduce, Reduction::kSum, DType::kFloat32, 100000};
          Trial trial = MakeTrial(plan, Everyone(3), rank);
          if (rank == lost && step == 2) {
            for (int pause = 0; pause < round * 20; ++pause) std::this_thread::yield();
            ranks.hub().CutOff(lost, "the cable was pulled");
          }
          status = ranks[rank].Submit(trial.submission, {}, rank > 0);
          if (status.ok()) status = WaitFor(ranks[rank], *trial.submission);
        }
        RT_CHECK_EQ(status.code(), StatusCode::kPeerLost);
        const std::string text = "the connection to it must last until shutdown(), but was lost: the cable was pulled.";
        RT_CHECK(status.message().find(text) != std::string::npos);
        if (rank != lost) RT_CHECK_EQ(status.message().find(subject + text), size_t{0});
        float value = 1;
        RT_CHECK_EQ(SumOnce(ranks[rank], "later", &value).message(), status.message());
      });
      RT_CHECK(Now() - begin < 10 * INT64_C(1000000000));  // no bound of silence was waited for
    }
}

// ---- the end ----

RT_TEST(leaving_fails_what_others_still_wait_for) {
  for (const char* layout : {"", "1+2"})
    for (int leaver = 0; leaver < 3; ++leaver) {
      Ranks ranks(3, layout);
      ranks.Run([&](int rank) {
        float value = 1;
        RT_CHECK_OK(SumOnce(ranks[rank], "all", &value));
        if (rank == leaver) return RT_CHECK_OK(ranks[rank].Close()), void();
        const Status status = SumOnce(ranks[rank], "x", &value);
        RT_CHECK_EQ(status.code(), StatusCode::kClosed);
        RT_CHECK(status.message().find("rank " + std::to_string(leaver) + " ") != std::string::npos);
        RT_CHECK_OK(ranks[rank].Close());
      });
    }
}

// A rank that does not wait for its last operation and shuts down: it serves until the others have come, and the
// operation runs.
RT_TEST(leaving_with_an_operation_pending) {
  for (int leaver = 0; leaver < 3; ++leaver)
    for (int round = 0; round < 20; ++round) {
      Ranks ranks(3, round % 2 == 0 ? "" : "2+1", "shutdown_timeout_seconds=20");
      ranks.Run([&](int rank) {
        float value = 1;
        auto submission = SmallSum("x", &value);
        if (rank != leaver)
          for (int pause = 0; pause < round * 10; ++pause) std::this_thread::yield();
        RT_CHECK_OK(ranks[rank].Submit(submission, {}, false));
        if (rank == leaver) RT_CHECK_OK(ranks[rank].Close());
        RT_CHECK_OK(WaitFor(ranks[rank], *submission));
        RT_CHECK_EQ(value, 3.0f);
        RT_CHECK_OK(ranks[rank].Close());
      });
    }
}

RT_TEST(close_ends_waits_without_a_deadline) {
  for (const char* spin : {"0", "20"})
    for (bool caller_waits : {false, true}) {
      Ranks ranks(2, "", std::string("shutdown_timeout_seconds=0.05\nspin_microseconds=") + spin);
      float value = 1;
      auto submission = SmallSum("x", &value);
      RT_CHECK_OK(ranks[0].Submit(submission, {}, caller_waits));
      std::thread waiter([&] { ranks[0].Wait(*submission->handle, kNever); });
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      RT_CHECK_OK(ranks[0].Close());
      waiter.join();
      RT_CHECK_EQ(submission->handle->status().code(), StatusCode::kClosed);
      RT_CHECK_EQ(ranks[0].Submit(SmallSum("later", &value), {}, false).message(),
                  std::string("rank 0 has called shutdown(); call init() to start again."));
    }
}

RT_TEST(submitting_while_closing_never_hangs) {
  for (int round = 0; round < 30; ++round) {
    Ranks ranks(2, round % 2 == 0 ? "" : "1+1", "shutdown_timeout_seconds=0.2");
    check::RunRanks(4, [&](int number) {
      const int rank = number % 2;
      if (number >= 2) {
        for (int pause = 0; pause < round * 7; ++pause) std::this_thread::yield();
        RT_CHECK_OK(ranks[rank].Close());
        return;
      }
      for (int step = 0;; ++step) {
        float value = 1;
        const Status status = SumOnce(ranks[rank], "x", &value);
        if (status.ok()) {
          RT_CHECK_EQ(value, 2.0f);
          continue;
        }
        // Closed, or lost because the other left in the middle.
        RT_CHECK(status.code() == StatusCode::kClosed || status.code() == StatusCode::kPeerLost);
        break;
      }
    });
  }
}

RT_TEST(stall_fails_on_all_that_submitted) {
  Ranks ranks(3, "", "stall_warning_seconds=0.02\nstall_abort_seconds=0.1");
  ranks.Run([&](int rank) {
    if (rank == 1) return;
    float value = 1;
    const Status status = SumOnce(ranks[rank], "x", &value);
    RT_CHECK_EQ(status.code(), StatusCode::kTimeout);
    RT_CHECK(status.message().find("submitted by ranks 0, 2; missing rank 1") != std::string::npos);
  });
  float value = 1;
  RT_CHECK_EQ(SumOnce(ranks[1], "x", &value).code(), StatusCode::kTimeout);
  std::string line;
  RT_CHECK(ranks[0].log().Next(&line));
  RT_CHECK(line.find("warning|allreduce 'x': waiting") == 0);
}

RT_TEST(worlds_open_and_close_many_times) {
  for (int round = 0; round < 200; ++round) {
    Ranks ranks(1 + round % 3, round % 3 == 2 ? "2+1" : "");
    ranks.Run([&](int rank) {
      float value = 1;
      if (round % 2 == 0) RT_CHECK_OK(SumOnce(ranks[rank], "x", &value));
      RT_CHECK_OK(ranks[rank].Close());
      RT_CHECK_OK(ranks[rank].Close());
      ranks.shared(rank).reset();
    });
  }
}

// ---- the start ----

RT_TEST(options_that_differ_are_refused_in_the_same_words) {
  auto hub = std::make_shared<Hub>(std::vector<int>{3});
  std::vector<std::string> texts(3);
  check::RunRanks(3, [&](int rank) {
    std::shared_ptr<Context> context;
    const Status status = OpenRank(hub, rank, rank == 1 ? "cache_capacity=5" : "", &context);
    RT_CHECK_EQ(status.code(), StatusCode::kMismatch);
    texts[rank] = status.message();
  });
  for (const std::string& text : texts)
    RT_CHECK_EQ(
        text,
        std::string(
            "init: RINGTRAIN_CACHE_CAPACITY must be the same on all ranks, but is '1024' on ranks 0, 2 and '5' on "
            "rank 1. Set it alike everywhere."));
}

RT_TEST(a_context_whose_timeline_cannot_be_written_does_not_open) {
  std::shared_ptr<Context> context;
  const Status status =
      OpenRank(std::make_shared<Hub>(std::vector<int>{1}), 0, "timeline=/no/such/folder/trace.json", &context);
  RT_CHECK(!status.ok());
  RT_CHECK(context == nullptr);
}

RT_TEST(missing_ranks_are_named_at_the_start) {
  auto hub = std::make_shared<Hub>(std::vector<int>{3});
  std::shared_ptr<Context> context;
  const Status status = OpenRank(hub, 0, "start_timeout_seconds=0.1", &context);
  RT_CHECK_EQ(status.code(), StatusCode::kTimeout);
  RT_CHECK(status.message().find("but ranks 1, 2 did not in time") != std::string::npos);
  RT_CHECK_EQ(OpenRank(hub, 0, "", &context).code(), StatusCode::kInvalidArgument);  // taken
  RT_CHECK_EQ(OpenRank(hub, 3, "", &context).code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace ringtrain
