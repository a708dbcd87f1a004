// Every collective over random layouts, sizes and dtypes, driven by one thread in a random interleaving of its members:
// two batches under way at a time, results against a plain loop, and the same bits whatever the interleaving. Failures
// print the seed.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <string>

#include "check.h"
#include "collectives/contribution.h"
#include "collectives/group.h"
#include "meeting.h"
#include "six_bits.h"

namespace ringtrain {
namespace {

using Random = std::mt19937_64;
using Bytes8 = std::vector<char>;

int64_t Pick(Random* random, int64_t bound) { return std::uniform_int_distribution<int64_t>(0, bound - 1)(*random); }

// A wire on which rank 0 takes long to send a long message: it is complete after so many looks.
class SlowSender : public Transport {
 public:
  static constexpr size_t kLong = 30000;
  static constexpr int kLooks = 4000;
  explicit SlowSender(std::unique_ptr<Transport> wire) : wire_(std::move(wire)) {}

  int rank() const override { return wire_->rank(); }
  int size() const override { return wire_->size(); }
  Status SendFrame(int to, const std::string& frame) override { return wire_->SendFrame(to, frame); }
  Status ReceiveFrame(int* from, std::string* frame, bool* arrived) override {
    return wire_->ReceiveFrame(from, frame, arrived);
  }
  Status StartSend(int to, int tag, const void* data, size_t bytes, Ticket* ticket) override {
    RT_TRY(wire_->StartSend(to, tag, data, bytes, ticket));
    sent_[to] += static_cast<int64_t>(bytes);
    if (bytes >= kLong && rank() == 0) looks_left_[*ticket] = kLooks;
    return {};
  }
  Status StartReceive(int from, int tag, void* data, size_t bytes, Ticket* ticket) override {
    return wire_->StartReceive(from, tag, data, bytes, ticket);
  }
  Status Test(Ticket ticket, bool* complete) override {
    const auto slow = looks_left_.find(ticket);
    *complete = false;
    if (slow != looks_left_.end() && --slow->second > 0) return {};
    looks_left_.erase(ticket);
    return wire_->Test(ticket, complete);
  }
  void Abandon() override { wire_->Abandon(); }
  bool TakeLostPeer(LostPeer* lost) override { return wire_->TakeLostPeer(lost); }
  Status Drive() override { return wire_->Drive(); }
  bool Busy() const override { return wire_->Busy(); }
  bool RingsDoorbell() const override { return wire_->RingsDoorbell(); }
  void SetDoorbell(Doorbell* doorbell) override { wire_->SetDoorbell(doorbell); }
  void Close(bool clean, double timeout_seconds) override { wire_->Close(clean, timeout_seconds); }
  std::string Describe() const override { return wire_->Describe(); }
  // Bytes of messages so far, by receiver.
  const std::map<int, int64_t>& sent() const { return sent_; }

 private:
  const std::unique_ptr<Transport> wire_;
  std::map<int, int64_t> sent_;
  std::map<Ticket, int> looks_left_;
};

// One member: its place in the world, and the memory of its tensors.
struct Member {
  std::unique_ptr<SlowSender> transport;
  std::unique_ptr<HostMemory> memory, alone;
  Counters counters;
  Residuals residuals;
  Group group;
  int64_t wire_bytes() const { return counters.Get(static_cast<int>(Counter::kWireBytesSent)); }
};

class Members {
 public:
  // sites: by host; none: all are at one.
  Members(const std::vector<int>& layout, size_t chunk_bytes, const std::vector<std::string>& sites = {})
      : hub_(std::make_shared<Hub>(layout)), all_(hub_->size()) {
    std::vector<int> ranks(hub_->size()), host_of_rank;
    std::vector<std::string> site_of_rank;
    std::iota(ranks.begin(), ranks.end(), 0);
    for (size_t host = 0; host < layout.size(); ++host) {
      host_of_rank.insert(host_of_rank.end(), layout[host], static_cast<int>(host));
      if (!sites.empty()) site_of_rank.insert(site_of_rank.end(), layout[host], sites[host]);
    }
    std::vector<Meeting> meetings = MeetAll(hub_);
    for (int rank : ranks)
      Open(rank, std::move(meetings[rank]), MakeTopology(ranks, rank, host_of_rank, site_of_rank), chunk_bytes);
  }

  int size() const { return static_cast<int>(all_.size()); }
  Member& operator[](int member) { return all_[member]; }

 private:
  void Open(int rank, Meeting meeting, Topology topology, size_t chunk_bytes) {
    Member& member = all_[rank];
    member.memory = std::move(meeting.memory);
    member.transport = std::make_unique<SlowSender>(std::move(meeting.transport));
    Group& group = member.group;
    group.topology = std::move(topology);
    group.geometry = MakeGeometry(group.topology, chunk_bytes, size_t{1} << 25);
    group.wire = member.transport.get();
    group.counters = &member.counters;
    const int participants = group.topology.local_count();
    HostMemory* memory = member.memory.get();
    if (participants == 1) {
      member.alone = OpenProcessMemory(MakeProcessHost(1), 0);
      memory = member.alone.get();
    }
    char* window;
    RT_REQUIRE_OK(memory->MapWindow(0, participants, group.geometry.Bytes(participants), &window));
    group.window = Window(window, group.geometry, participants);
    for (int local = 0; local < participants; ++local)
      if (local != group.topology.my_local()) group.peers.push_back(&member.memory->doorbell(local));
  }

  const std::shared_ptr<Hub> hub_;
  std::vector<Member> all_;
};

// A batch as all members see it: what each contributes, and what a plain loop says that each must get.
struct Exchange {
  Batch batch;
  std::vector<std::vector<Bytes8>> inputs, outputs;  // by member and tensor
  std::vector<std::vector<Bytes8>> expected;         // the same; empty where only bits are compared
  std::vector<Ahead> ahead;                          // by member; empty: nothing has gone before
};

Bytes8 RandomBytes(Random* random, DType dtype, size_t bytes) {
  Bytes8 made(bytes);
  if (dtype == DType::kFloat32)
    for (size_t at = 0; at < bytes; at += sizeof(float)) {
      const float value = static_cast<float>(Pick(random, 1 << 20)) * 1e-3f - 500.0f;
      std::memcpy(made.data() + at, &value, sizeof value);
    }
  else
    for (char& byte : made) byte = static_cast<char>(Pick(random, 256));
  return made;
}

// Sums of int32 that wrap, in any order.
Bytes8 SumOf(const Exchange& exchange, size_t tensor, size_t offset, size_t bytes) {
  Bytes8 sum(bytes, 0);
  for (const std::vector<Bytes8>& of_member : exchange.inputs)
    for (size_t at = 0; at < bytes; at += sizeof(uint32_t)) {
      const size_t size = std::min(sizeof(uint32_t), bytes - at);  // elements of 16 bits may be an odd number
      uint32_t total = 0, value = 0;
      std::memcpy(&total, sum.data() + at, size);
      std::memcpy(&value, of_member[tensor].data() + offset + at, size);
      total += value;
      std::memcpy(sum.data() + at, &total, size);
    }
  return sum;
}

size_t Rows(const BatchTensor& tensor, int first, int count, int stride = 1) {
  int64_t rows = 0;
  for (int index = 0; index < count; ++index) rows += tensor.rows[first + index * stride];
  return rows * tensor.row_bytes;
}

void AddTensor(Random* random, int members, Exchange* exchange) {
  Batch& batch = exchange->batch;
  const size_t element = Bytes(batch.dtype), index = batch.tensors.size();
  constexpr int64_t kCounts[] = {0, 1, 2, 7, 64, 500, 1025, 5003, 20000};
  const int64_t count = kCounts[Pick(random, 9)];
  BatchTensor tensor;
  tensor.bytes = count * element;
  tensor.row_bytes = element * (1 + Pick(random, 3));
  if (batch.operation == Operation::kReducescatter) {
    for (int member = 0; member < members; ++member)
      tensor.rows.push_back(count / members + (member < count % members ? 1 : 0));
    tensor.bytes = count * tensor.row_bytes;
  } else if (batch.operation == Operation::kAllgather) {
    for (int member = 0; member < members; ++member) tensor.rows.push_back(Pick(random, 2) * count / (member + 1));
  } else if (batch.operation == Operation::kAlltoall) {
    for (int pair = 0; pair < members * members; ++pair)
      tensor.rows.push_back(Pick(random, 3) * count / (1 + pair % members));
  }
  batch.tensors.push_back(tensor);
  for (int member = 0; member < members; ++member) {
    size_t in = tensor.bytes;
    if (batch.operation == Operation::kAllgather) in = Rows(tensor, member, 1);
    if (batch.operation == Operation::kAlltoall) in = Rows(tensor, member * members, members);
    exchange->inputs[member].push_back(RandomBytes(random, batch.dtype, in));
  }
  for (int member = 0; member < members; ++member) {
    Bytes8 expected;
    auto append = [&](const Bytes8& from, size_t offset, size_t bytes) {
      expected.insert(expected.end(), from.begin() + offset, from.begin() + offset + bytes);
    };
    switch (batch.operation) {
      case Operation::kAllreduce:
        expected = SumOf(*exchange, index, 0, tensor.bytes);
        break;
      case Operation::kReducescatter:
        expected = SumOf(*exchange, index, Rows(tensor, 0, member), Rows(tensor, member, 1));
        break;
      case Operation::kBroadcast:
        append(exchange->inputs[batch.root][index], 0, tensor.bytes);
        break;
      case Operation::kAllgather:
        for (int from = 0; from < members; ++from) append(exchange->inputs[from][index], 0, Rows(tensor, from, 1));
        break;
      default:
        for (int from = 0; from < members; ++from)
          append(exchange->inputs[from][index], Rows(tensor, from * members, member),
                 Rows(tensor, from * members + member, 1));
    }
    exchange->outputs[member].emplace_back(expected.size());
    exchange->expected[member].push_back(std::move(expected));
  }
}

constexpr Operation kCollectives[] = {Operation::kAllreduce, Operation::kReducescatter, Operation::kAllgather,
                                      Operation::kBroadcast, Operation::kAlltoall};

Exchange RandomExchange(Random* random, int members, Operation operation, DType dtype) {
  Exchange exchange;
  exchange.inputs.resize(members);
  exchange.outputs.resize(members);
  exchange.expected.resize(members);
  Batch& batch = exchange.batch;
  batch.operation = operation;
  batch.dtype = dtype;
  batch.joined.resize(members);
  batch.root = static_cast<int>(Pick(random, members));
  for (int64_t tensors = operation == Operation::kAlltoall ? 1 : 1 + Pick(random, 4); tensors > 0; --tensors)
    AddTensor(random, members, &exchange);
  return exchange;
}

void AddFloats(Random* random, size_t count, Exchange* exchange) {
  BatchTensor tensor;
  tensor.bytes = count * sizeof(float);
  exchange->batch.tensors.push_back(tensor);
  for (std::vector<Bytes8>& of_member : exchange->inputs)
    of_member.push_back(RandomBytes(random, DType::kFloat32, tensor.bytes));
  for (std::vector<Bytes8>& of_member : exchange->outputs) of_member.emplace_back(tensor.bytes);
}

// Of the rows that each has for each what concerns this member.
void TakeOwnRows(const Topology& topology, int member, BatchTensor* tensor) {
  const std::vector<int64_t> all = tensor->rows;
  const int members = topology.member_count();
  const auto rows = [&](int from, int to) { return all[from * members + to]; };
  tensor->rows.clear();
  for (int to = 0; to < members; ++to) tensor->rows.push_back(rows(member, to));
  for (int from = 0; from < members; ++from) tensor->rows.push_back(rows(from, member));
  for (const std::vector<int>& host : topology.hosts)
    for (int from : host)
      for (int to : host)
        if (from != to) tensor->most_within_host = std::max(tensor->most_within_host, rows(from, to));
}

Batch BatchOf(Exchange* exchange, int member, const Topology& topology, Residuals* residuals) {
  Batch batch = exchange->batch;
  if (batch.operation == Operation::kAlltoall) TakeOwnRows(topology, member, &batch.tensors[0]);
  for (size_t tensor = 0; tensor < batch.tensors.size() && batch.codec->form().feedback; ++tensor)
    batch.tensors[tensor].residual =
        residuals->Of(0, Text(batch.operation), tensor, batch.tensors[tensor].bytes / Bytes(batch.dtype));
  for (size_t tensor = 0; tensor < batch.tensors.size(); ++tensor) {
    batch.tensors[tensor].input = exchange->inputs[member][tensor].data();
    batch.tensors[tensor].output = exchange->outputs[member][tensor].data();
  }
  if (!exchange->ahead.empty()) batch.ahead = exchange->ahead[static_cast<size_t>(member)];
  return batch;
}

// Runs the exchanges, two at a time and in one order as the executor does; `random` says whose turn it is.
void Perform(Members& members, std::vector<Exchange>* exchanges, Random* random) {
  std::vector<size_t> begun(members.size(), 0);
  std::vector<std::vector<std::unique_ptr<Task>>> tasks(members.size());
  int64_t idle = 0;
  for (int left = members.size() * static_cast<int>(exchanges->size()); left > 0;) {
    const int member = static_cast<int>(Pick(random, members.size()));
    std::vector<std::unique_ptr<Task>>& mine = tasks[member];
    if (mine.size() < 2 && begun[member] < exchanges->size())
      mine.push_back(MakeTask(
          BatchOf(&(*exchanges)[begun[member]++], member, members[member].group.topology, &members[member].residuals),
          &members[member].group, nullptr));
    bool moved = false;
    for (const std::unique_ptr<Task>& task : mine)
      if (!task->done()) RT_REQUIRE_OK(task->Advance(&moved));
    while (!mine.empty() && mine.front()->done()) {
      members[member].residuals.ForEach(0, Text((*exchanges)[begun[member] - mine.size()].batch.operation),
                                        [](const Residuals::Key&, Residual& residual) { residual.Turn(); });
      mine.erase(mine.begin());
      --left;
      moved = true;
    }
    idle = moved ? 0 : idle + 1;
    // Else nobody can move: a deadlock. A step may send to each other member, and looks at one message after the other.
    RT_REQUIRE(idle < 2 * SlowSender::kLooks * members.size() * members.size());
  }
}

// ---- codecs ----

using Floats = std::vector<float>;

Floats FloatsOf(const Bytes8& bytes) {
  Floats values(bytes.size() / sizeof(float));
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

// What a plain loop makes of a compressed exchange: each host's sum is encoded, with what it has lost before, from the
// start of the tensor or of a member's share; then their average is, and the postscale multiplies what is decoded.
class CodecOracle {
 public:
  CodecOracle(const Codec& codec, std::vector<int> layout) : codec_(codec), layout_(std::move(layout)) {}

  // The result of a tensor, whole. shares: elements, each encoded on its own.
  Floats Reduce(const Exchange& exchange, size_t tensor, const std::vector<size_t>& shares) {
    std::vector<Floats> sums;
    size_t member = 0, count = 0;
    for (int members : layout_) {
      Floats sum = FloatsOf(exchange.inputs[member][tensor]);
      for (int local = 1; local < members; ++local) {
        const Floats values = FloatsOf(exchange.inputs[member + local][tensor]);
        for (size_t i = 0; i < sum.size(); ++i) sum[i] += values[i];
      }
      member += members;
      count = sum.size();
      sums.push_back(std::move(sum));
    }
    if (layout_.size() == 1) {
      for (float& value : sums[0])
        value = value / static_cast<float>(exchange.batch.scaling.divisor) *
                static_cast<float>(exchange.batch.scaling.postscale);
      return sums[0];
    }
    residuals_[tensor].resize(layout_.size() + 1, Floats(count));
    for (size_t host = 0; host < sums.size(); ++host) sums[host] = Coded(sums[host], shares, &residuals_[tensor][host]);
    for (size_t host = 1; host < sums.size(); ++host)
      for (size_t i = 0; i < count; ++i) sums[0][i] += sums[host][i];
    for (float& value : sums[0]) value /= static_cast<float>(exchange.batch.scaling.divisor);
    Floats result = Coded(sums[0], shares, &residuals_[tensor].back());
    for (float& value : result) value *= static_cast<float>(exchange.batch.scaling.postscale);
    return result;
  }

 private:
  Floats Coded(const Floats& values, const std::vector<size_t>& shares, Floats* residual) const {
    Floats coded(values.size());
    size_t begin = 0;
    for (size_t count : shares) {
      std::vector<char> wire(codec_.WireBytes(DType::kFloat32, count));
      codec_.Encode(DType::kFloat32, wire.data(), values.data() + begin, count,
                    codec_.form().feedback ? Feedback{residual->data() + begin, residual->data() + begin} : Feedback());
      codec_.Decode(DType::kFloat32, coded.data() + begin, wire.data(), count, 1.0);
      begin += count;
    }
    return coded;
  }

  const Codec& codec_;
  const std::vector<int> layout_;
  std::map<size_t, std::vector<Floats>> residuals_;  // by tensor: of each host, and of the sum of all
};

void CheckAgainstOracle(const Exchange& exchange, CodecOracle* oracle, int members) {
  const bool scatters = exchange.batch.operation == Operation::kReducescatter;
  for (size_t index = 0; index < exchange.batch.tensors.size(); ++index) {
    const BatchTensor& tensor = exchange.batch.tensors[index];
    std::vector<size_t> shares = {tensor.bytes / sizeof(float)};
    if (scatters) shares.clear();
    for (int member = 0; member < members && scatters; ++member)
      shares.push_back(Rows(tensor, member, 1) / sizeof(float));
    const Floats expected = oracle->Reduce(exchange, index, shares);
    size_t begin = 0;
    for (int member = 0; member < members; ++member) {
      const Floats found = FloatsOf(exchange.outputs[member][index]);
      RT_REQUIRE(std::equal(found.begin(), found.end(), expected.begin() + static_cast<ptrdiff_t>(begin)));
      if (scatters) begin += found.size();
    }
  }
}

std::vector<int> RandomLayout(Random* random) {
  static const std::vector<std::vector<int>> layouts = {{1},
                                                        {2},
                                                        {3},
                                                        {4},
                                                        {7},
                                                        {1, 1},
                                                        {2, 2},
                                                        {1, 3},
                                                        {1, 1, 1},
                                                        {3, 2, 2},
                                                        {1, 1, 1, 1},
                                                        {2, 1, 1, 2},
                                                        std::vector<int>(18, 1)};
  return layouts[Pick(random, static_cast<int64_t>(layouts.size()))];
}

// Of each host: none, or up to three with any number of hosts.
std::vector<std::string> RandomSites(Random* random, size_t hosts) {
  std::vector<std::string> sites;
  const int64_t most = 1 + Pick(random, 3);
  for (size_t host = 0; host < hosts; ++host)
    sites.push_back(std::string(1, static_cast<char>('a' + static_cast<int64_t>(Pick(random, most)))));
  if (Pick(random, 2) == 0) sites.clear();
  return sites;
}

RT_TEST(results_are_those_of_a_plain_loop_in_any_interleaving) {
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    const int before = check::Failures();
    Random random(seed);
    const std::vector<int> layout = RandomLayout(&random);
    Members members(layout, 1 + Pick(&random, 20000), RandomSites(&random, layout.size()));
    std::vector<Exchange> exchanges;
    for (int64_t count = 1 + Pick(&random, 4); count > 0; --count)
      exchanges.push_back(RandomExchange(&random, members.size(), kCollectives[Pick(&random, 5)], DType::kInt32));
    Perform(members, &exchanges, &random);
    for (const Exchange& exchange : exchanges) RT_CHECK(exchange.outputs == exchange.expected);
    if (check::Failures() == before) continue;
    std::fprintf(stderr, "seed %d\n", static_cast<int>(seed));
    return;
  }
}

RT_TEST(bits_do_not_depend_on_the_interleaving) {
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    Random random(seed);
    const std::vector<int> layout = RandomLayout(&random);
    const size_t chunk_bytes = 1 + Pick(&random, 20000);
    const std::vector<std::string> sites = RandomSites(&random, layout.size());
    Members first(layout, chunk_bytes, sites), second(layout, chunk_bytes, sites);
    std::vector<Exchange> once;
    for (Operation operation : {Operation::kAllreduce, Operation::kReducescatter})
      once.push_back(RandomExchange(&random, first.size(), operation, DType::kFloat32));
    std::vector<Exchange> again = once;
    Perform(first, &once, &random);
    Perform(second, &again, &random);
    for (size_t index = 0; index < once.size(); ++index) {
      RT_REQUIRE(once[index].outputs == again[index].outputs);
      if (once[index].batch.operation == Operation::kAllreduce)
        for (const std::vector<Bytes8>& output : once[index].outputs) RT_REQUIRE(output == once[index].outputs[0]);
    }
  }
}

// Hosts that are far apart exchange what they have in one step or two: as many bytes, the same bits.
RT_TEST(hosts_that_are_far_apart_get_the_bits_of_near_ones) {
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    Random random(seed);
    static const std::vector<std::vector<int>> layouts = {{1, 1}, {2, 2}, {1, 3}, {1, 1, 1}, {2, 1, 1, 2}};
    const std::vector<int>& layout = layouts[seed % layouts.size()];
    const size_t chunk_bytes = 40000 + Pick(&random, 200000);
    Members near(layout, chunk_bytes), far(layout, chunk_bytes);
    for (int member = 0; member < far.size(); ++member)
      far[member].group.round_trip = far[member].group.least_round_trip = 5000000;
    std::vector<Exchange> once = {RandomExchange(&random, near.size(), Operation::kAllreduce, DType::kFloat32)};
    AddFloats(&random, 30000 + static_cast<size_t>(Pick(&random, 30000)), &once[0]);
    if (seed > 20) once[0].batch.codec = &CodecFor(Compression::kFloat16, DType::kFloat32, 1);
    std::vector<Exchange> again = once;
    Perform(near, &once, &random);
    Perform(far, &again, &random);
    RT_REQUIRE(once[0].outputs == again[0].outputs);
    int64_t by_near = 0, by_far = 0;
    for (int member = 0; member < far.size(); ++member) {
      by_near += near[member].wire_bytes();
      by_far += far[member].wire_bytes();
    }
    RT_CHECK_EQ(by_far, by_near);
  }
}

RT_TEST(what_has_gone_ahead_travels_once_and_gives_the_same_bits) {
  for (int turn = 0; turn < 8; ++turn) {
    const int sent = turn % 4;
    Random random(11);
    Exchange exchange;
    if (turn >= 4) exchange.batch.codec = &CodecFor(Compression::kFloat16, DType::kFloat32, 1);
    exchange.batch.dtype = DType::kFloat32;
    exchange.batch.reduction = Reduction::kAverage;
    exchange.batch.scaling.prescale = 0.3;
    exchange.batch.scaling.divisor = 2;
    exchange.batch.joined.resize(2);
    exchange.inputs.resize(2);
    exchange.outputs.resize(2);
    AddFloats(&random, 301, &exchange);
    AddFloats(&random, 100, &exchange);
    std::vector<Exchange> once = {exchange}, again = {exchange};
    Members members({1, 1}, 0), others({1, 1}, 0);
    Perform(members, &once, &random);
    again[0].ahead.resize(2);
    for (int from : {0, 1}) {
      if ((sent >> from & 1) == 0) continue;
      Ahead& to = again[0].ahead[static_cast<size_t>(1 - from)];
      to.contribution =
          ContributionOf(BatchOf(&again[0], from, others[from].group.topology, nullptr), others[from].group);
      to.came = again[0].ahead[static_cast<size_t>(from)].sent = true;
    }
    Perform(others, &again, &random);
    RT_REQUIRE(once[0].outputs == again[0].outputs);
    for (int from : {0, 1})
      RT_CHECK_EQ(others[from].wire_bytes(), (sent >> from & 1) == 1 ? 0 : members[from].wire_bytes());
  }
}

// The interface for compression (kernels/codec.h): no part of the data plane may take the wire's form for a dtype, cut
// a block or lose what the codec keeps. Three times over, as residuals of one step count in the next.
RT_TEST(a_codec_of_any_form_gives_the_bits_of_a_plain_loop) {
  static const SixBits plain(false), feedback(true);
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    const int before = check::Failures();
    Random random(seed);
    const std::vector<int> layout = RandomLayout(&random);
    Members members(layout, 1 + Pick(&random, 40000));
    const Codec& codec = seed % 2 == 0 ? static_cast<const Codec&>(plain) : feedback;
    CodecOracle of_sums(codec, layout), of_rows(codec, layout);
    std::vector<Exchange> steps;
    for (Operation operation : {Operation::kAllreduce, Operation::kReducescatter}) {
      steps.push_back(RandomExchange(&random, members.size(), operation, DType::kFloat32));
      steps.back().batch.codec = &codec;
      steps.back().batch.reduction = Reduction::kAverage;
      steps.back().batch.scaling.divisor = members.size();
      steps.back().batch.scaling.postscale = 0.5;
    }
    for (int step = 0; step < 3; ++step) {
      Perform(members, &steps, &random);
      CheckAgainstOracle(steps[0], &of_sums, members.size());
      CheckAgainstOracle(steps[1], &of_rows, members.size());
    }
    if (check::Failures() == before) continue;
    std::fprintf(stderr, "seed %d\n", static_cast<int>(seed));
    return;
  }
}

// The law of error feedback: what has been delivered, and what is kept, is all that was to be sent.
RT_TEST(a_codec_with_feedback_loses_nothing_in_the_long_run) {
  static const SixBits codec(true);
  Random random(5);
  Members members({2, 2, 2}, 0);
  Exchange exchange = RandomExchange(&random, members.size(), Operation::kAllreduce, DType::kFloat32);
  constexpr size_t kCount = 5003;
  exchange.batch.codec = &codec;
  exchange.batch.tensors.resize(1);
  exchange.batch.tensors[0].bytes = kCount * sizeof(float);
  std::vector<double> delivered(kCount), sent(kCount);
  for (int step = 0; step < 100; ++step) {
    for (int member = 0; member < members.size(); ++member) {
      exchange.inputs[member].assign(1, RandomBytes(&random, DType::kFloat32, kCount * sizeof(float)));
      exchange.outputs[member].assign(1, Bytes8(kCount * sizeof(float)));
      const Floats values = FloatsOf(exchange.inputs[member][0]);
      for (size_t i = 0; i < kCount; ++i) sent[i] += static_cast<double>(values[i]);
    }
    std::vector<Exchange> one = {exchange};
    Perform(members, &one, &random);
    const Floats result = FloatsOf(one[0].outputs[0][0]);
    for (size_t i = 0; i < kCount; ++i) delivered[i] += static_cast<double>(result[i]);
  }
  for (int member = 0; member < members.size(); ++member) {
    Residual* kept = members[member].residuals.Of(0, "allreduce", 0, kCount);
    for (size_t i = 0; i < kCount; ++i)
      delivered[i] +=
          static_cast<double>(kept->Sent(i, 1).before[0]) + static_cast<double>(kept->Finished(i, 1).before[0]);
  }
  // Within what adding 100 float32 numbers of a few thousand rounds; one step of this codec loses up to 50.
  for (size_t i = 0; i < kCount; ++i) RT_REQUIRE(std::fabs(delivered[i] - sent[i]) < 0.2);
}

RT_TEST(residuals_belong_to_a_name_a_place_and_a_size) {
  Residuals residuals;
  const auto lost = [&](Residual* residual, float value) {
    residual->Sent(3, 1).after[0] = value;
    residual->Turn();
  };
  const auto kept = [&](int set, const char* name, size_t place, size_t elements) {
    return residuals.Of(set, name, place, elements)->Sent(3, 1).before[0];
  };
  lost(residuals.Of(0, "fc1.weight", 0, 8), 1.5f);
  RT_CHECK_EQ(kept(0, "fc1.weight", 0, 8), 1.5f);
  RT_CHECK_EQ(kept(0, "fc1.weight", 1, 8), 0.0f);
  RT_CHECK_EQ(kept(0, "fc1.bias", 0, 8), 0.0f);
  RT_CHECK_EQ(kept(1, "fc1.weight", 0, 8), 0.0f);
  RT_CHECK_EQ(kept(0, "fc1.weight", 0, 9), 0.0f);
  RT_CHECK_EQ(kept(0, "fc1.weight", 0, 8), 0.0f);  // it was another tensor in between
  lost(residuals.Of(0, "fc1.weight", 0, 8), 2.5f);
  lost(residuals.Of(1, "fc1.weight", 0, 8), 3.5f);
  residuals.Forget(0);
  RT_CHECK_EQ(kept(0, "fc1.weight", 0, 8), 0.0f);
  RT_CHECK_EQ(kept(1, "fc1.weight", 0, 8), 3.5f);
}

RT_TEST(residuals_of_names_that_came_once_are_forgotten_when_they_are_many) {
  Residuals residuals(1000);  // bytes, of seven residuals of eight elements
  const auto name = [](int step) { return "loss." + std::to_string(step); };
  Residual* const under_way = residuals.Of(0, "under way", 0, 8);
  for (int step = 0; step < 100; ++step) {
    for (const std::string& each : {std::string("fc1.weight"), name(step)}) {
      Residual* residual = residuals.Of(0, each, 0, 8);
      if (each == "fc1.weight") RT_CHECK_EQ(residual->Sent(0, 1).before[0], static_cast<float>(step));
      residual->Sent(0, 1).after[0] = static_cast<float>(step + 1);
      residuals.Turn(residual, 1.0, true);
    }
    RT_CHECK_EQ(residuals.HasForgotten(), step == 6);
  }
  int kept = 0;
  for (int step = 0; step < 100; ++step) kept += residuals.Find(0, name(step), 0, 8) != nullptr ? 1 : 0;
  RT_CHECK(kept > 4 && kept < 8);
  RT_CHECK(residuals.Find(0, name(99), 0, 8) != nullptr);
  RT_CHECK(residuals.Find(0, "under way", 0, 8) == under_way);
  const float loaded[8] = {7, 7, 7, 7, 7, 7, 7, 7};
  residuals.Of(0, "loaded", 0, 8)->Load(loaded, loaded);  // and not taken so far
  for (int step = 0; step < 20; ++step) residuals.Turn(residuals.Of(1, name(step), 0, 8), 1.0, true);
  RT_CHECK_EQ(residuals.Of(0, "loaded", 0, 8)->Sent(0, 1).before[0], 7.0f);
  for (int turn = 0; turn < 2; ++turn) {  // one that was forgotten, and comes again, stays
    Residual* residual = residuals.Of(0, name(3), 0, 8);
    RT_CHECK_EQ(residual->Sent(0, 1).before[0], static_cast<float>(turn));
    residual->Sent(0, 1).after[0] = 1;
    residuals.Turn(residual, 1.0, true);
    for (int step = 100; step < 200; ++step) residuals.Turn(residuals.Of(0, name(step), turn, 8), 1.0, true);
  }
}

RT_TEST(what_the_last_operation_of_a_name_has_lost_can_be_taken_back_once) {
  Residuals residuals;
  const auto lose = [&](const char* name, float value) {
    Residual* residual = residuals.Of(0, name, 0, 1);
    residual->Sent(0, 1).after[0] = residual->Finished(0, 1).after[0] = value;
    residual->Turn();
  };
  const auto kept = [&](const char* name) {
    Residual* residual = residuals.Of(0, name, 0, 1);
    RT_CHECK_EQ(residual->Sent(0, 1).before[0], residual->Finished(0, 1).before[0]);
    return residual->Sent(0, 1).before[0];
  };
  for (float value : {1.0f, 2.0f})
    for (const char* name : {"a.x", "a.y", "b.x"}) lose(name, value);
  residuals.TakeBack(0, "a.");
  RT_CHECK(kept("a.x") == 1 && kept("a.y") == 1 && kept("b.x") == 2);
  residuals.TakeBack(0, "");
  RT_CHECK(kept("a.x") == 1 && kept("a.y") == 1 && kept("b.x") == 1);
  lose("a.x", 3);
  RT_CHECK_EQ(kept("a.x"), 3.0f);
  residuals.TakeBack(1, "a.");
  RT_CHECK_EQ(kept("a.x"), 3.0f);
  residuals.TakeBack(0, "a.x");
  RT_CHECK_EQ(kept("a.x"), 1.0f);
  lose("a.x", 4);
  residuals.Keep(0, "a");
  lose("a.y", 5);
  residuals.TakeBack(0, "a");
  RT_CHECK(kept("a.x") == 4 && kept("a.y") == 1);
}

// In the next world a loss is a part of the result, whoever rounded it, in both versions.
RT_TEST(what_was_lost_is_owed_in_the_next_world_until_it_is_paid) {
  Residuals first, second, third;
  Residual* residual = first.Of(0, "a.x", 0, 2);
  for (float value : {8.0f, 16.0f}) {
    residual->Sent(0, 1).after[0] = value;
    residual->Finished(1, 1).after[0] = value;
    first.Turn(residual, 4.0, true);
  }
  first.Of(1, "a.x", 0, 2);
  second.Inherit(first);
  RT_CHECK_EQ(second.turns(), 2);
  RT_CHECK(second.Find(1, "a.x", 0, 2) == nullptr && second.Find(0, "a.x", 0, 3) == nullptr);
  Residual* owing = second.Find(0, "a.x", 0, 2);
  RT_REQUIRE(owing != nullptr);
  RT_CHECK(owing->Debt()[0] == 4 && owing->Debt()[1] == 16 && owing->Sent(0, 1).before[0] == 0);
  second.TakeBack(0, "a.", 2);  // nothing came after it
  RT_CHECK(owing->Debt()[0] == 4);
  second.TakeBack(0, "a.", 1);
  RT_CHECK(owing->Debt()[0] == 2 && owing->Debt()[1] == 8);
  second.Turn(owing, 2.0, false);  // this rank contributed nothing
  RT_CHECK(owing->Debt()[0] == 2);
  owing->Sent(1, 1).after[0] = 6;
  second.Turn(owing, 2.0, true);
  RT_CHECK(owing->Debt() == nullptr);
  third.Inherit(second);  // before it is known whether the last operation counts
  owing = third.Find(0, "a.x", 0, 2);
  RT_CHECK(owing->Debt()[0] == 0 && owing->Debt()[1] == 3);
  third.TakeBack(0, "");
  RT_CHECK(owing->Debt()[0] == 2 && owing->Debt()[1] == 8);
}

// Tensors of one operation may be in several batches, one for each dtype and codec.
RT_TEST(an_observer_is_told_of_the_operation_that_a_tensor_belongs_to) {
  struct Observer : StageObserver {
    std::map<int, size_t> packed;
    void OnStage(Stage stage, int operation, int64_t, int64_t, size_t bytes) override {
      if (stage == Stage::kUnpack) packed[operation] += bytes;
    }
  };
  for (Operation operation : {Operation::kAllreduce, Operation::kAlltoall}) {
    Random random(1);
    Members members({1, 1}, 0);
    Exchange exchange = RandomExchange(&random, 2, operation, DType::kInt32);
    for (size_t tensor = 0; tensor < exchange.batch.tensors.size(); ++tensor)
      exchange.batch.tensors[tensor].operation = 5 + 3 * static_cast<int>(tensor);
    std::vector<Observer> observers(2);
    std::vector<std::unique_ptr<Task>> tasks;
    for (int member = 0; member < 2; ++member)
      tasks.push_back(MakeTask(BatchOf(&exchange, member, members[member].group.topology, &members[member].residuals),
                               &members[member].group, &observers[member]));
    bool moved;
    while (!tasks[0]->done() || !tasks[1]->done())
      for (auto& task : tasks)
        if (!task->done()) RT_REQUIRE_OK(task->Advance(&moved));
    for (const Observer& observer : observers)
      for (const auto& of_operation : observer.packed) RT_CHECK(of_operation.first >= 5 && of_operation.first % 3 == 2);
  }
}

// More peers than messages under way at once, and one that is slow: its messages wait while the batch behind, which
// sends to all hosts too, goes through its many chunks.
RT_TEST(an_alltoall_keeps_its_messages_from_those_of_the_batch_behind_it) {
  Random random(3);
  constexpr int kHosts = 12, kRows = 10000;
  Members members(std::vector<int>(kHosts, 1), 1);
  std::vector<Exchange> both(2);
  for (Exchange& exchange : both) {
    exchange.inputs.resize(kHosts);
    exchange.outputs.resize(kHosts);
    exchange.batch.joined.resize(kHosts);
    exchange.batch.tensors.resize(1);
  }
  Batch& rows = both[0].batch;
  rows.operation = Operation::kAlltoall;
  rows.tensors[0].row_bytes = sizeof(int32_t);
  rows.tensors[0].rows.assign(kHosts * kHosts, kRows);
  Batch& halves = both[1].batch;
  halves.dtype = DType::kFloat16;
  halves.tensors[0].bytes = 3 * Group::kTags * members[0].group.geometry.chunk_bytes;
  for (int member = 0; member < kHosts; ++member) {
    both[0].inputs[member].assign(1, RandomBytes(&random, DType::kInt32, kHosts * kRows * sizeof(int32_t)));
    both[0].outputs[member].assign(1, Bytes8(kHosts * kRows * sizeof(int32_t)));
    both[1].inputs[member].assign(1, Bytes8(halves.tensors[0].bytes));
    both[1].outputs[member].assign(1, Bytes8(halves.tensors[0].bytes, 1));
  }
  Perform(members, &both, &random);
  for (int to = 0; to < kHosts; ++to)
    for (int from = 0; from < kHosts; ++from) {
      const size_t bytes = kRows * sizeof(int32_t);
      RT_REQUIRE(std::equal(both[0].outputs[to][0].begin() + from * bytes,
                            both[0].outputs[to][0].begin() + (from + 1) * bytes,
                            both[0].inputs[from][0].begin() + to * bytes));
    }
  for (const std::vector<Bytes8>& output : both[1].outputs) RT_REQUIRE(output == both[1].inputs[0]);  // zeros
}

// An allreduce of zeros.
Exchange OfOneTensor(Random* random, int members, DType dtype, int64_t bytes) {
  Exchange exchange = RandomExchange(random, members, Operation::kAllreduce, dtype);
  exchange.batch.tensors.resize(1);
  exchange.batch.tensors[0].bytes = bytes;
  for (auto* tensors : {&exchange.inputs, &exchange.outputs})
    for (std::vector<Bytes8>& of_member : *tensors) of_member.assign(1, Bytes8(bytes));
  return exchange;
}

// Patarasuk and Yuan (2009): no allreduce sends less than 2 (H - 1) / H of the bytes from each host.
RT_TEST(an_allreduce_sends_the_least_bytes_there_are) {
  for (const std::vector<int>& layout : std::vector<std::vector<int>>{{1, 1}, {2, 2}, {1, 1, 1, 1}, {2, 2, 2}}) {
    Random random(7);
    Members members(layout, 0);
    const int64_t hosts = static_cast<int64_t>(layout.size()),
                  bytes = 12 * 4096 * static_cast<int64_t>(sizeof(int32_t));
    std::vector<Exchange> one = {OfOneTensor(&random, members.size(), DType::kInt32, bytes)};
    Perform(members, &one, &random);
    int64_t sent = 0;
    for (int member = 0; member < members.size(); ++member) sent += members[member].wire_bytes();
    RT_CHECK_EQ(sent, 2 * (hosts - 1) * bytes);
  }
}

// Hosts at two or three sites, equally many or not: lines carry what each site has, once each way.
RT_TEST(sums_cross_a_line_once) {
  for (DType dtype : {DType::kInt32, DType::kFloat16})
    for (const char* text : {"abab", "abcabc", "aaab", "babba", "abacaab"}) {
      const std::string layout = text;
      Random random(7);
      const int hosts = static_cast<int>(layout.size());
      const auto sites = static_cast<int>(std::set<char>(layout.begin(), layout.end()).size());
      std::vector<std::string> site_of_host;
      for (char site : layout) site_of_host.push_back(std::string(1, site));
      Members members(std::vector<int>(hosts, 1), 0, site_of_host);
      const int64_t bytes = int64_t{hosts} * 4096 * 4;
      std::vector<Exchange> one = {OfOneTensor(&random, members.size(), dtype, bytes)};
      Perform(members, &one, &random);
      int64_t crossed = 0;
      for (int member = 0; member < members.size(); ++member)
        for (const auto& [to, sent] : members[member].transport->sent())
          if (layout[to] != layout[member]) crossed += sent;
      // Of 16-bit floats each host's own contribution goes to the part's host; then the finished parts cross.
      int64_t contributed = 0;
      for (char site : layout)
        contributed += std::count_if(layout.begin(), layout.end(), [&](char c) { return c != site; });
      const int64_t reduced = dtype == DType::kFloat16 ? contributed * bytes / hosts : (sites - 1) * bytes;
      RT_CHECK_EQ(crossed, reduced + (sites - 1) * bytes);
    }
}

// A small tensor takes fewer steps between hosts, unless it is fused with a large one, which goes around the ring.
void RequireSameBitsAloneAndFused(const std::vector<int>& layout, const std::vector<std::string>& sites, DType dtype,
                                  size_t count) {
  Random random(3);
  Members first(layout, 0, sites), second(layout, 0, sites);
  Exchange alone;
  alone.batch.dtype = dtype;
  alone.batch.reduction = Reduction::kAverage;
  alone.batch.scaling.divisor = 5;
  alone.batch.joined.resize(first.size());
  alone.inputs.resize(first.size());
  alone.outputs.resize(first.size());
  AddFloats(&random, count, &alone);
  Exchange fused = alone;
  AddFloats(&random, 200000, &fused);
  std::vector<Exchange> one = {alone}, other = {fused};
  Perform(first, &one, &random);
  Perform(second, &other, &random);
  for (int member = 0; member < first.size(); ++member)
    RT_REQUIRE(one[0].outputs[member][0] == one[0].outputs[0][0] &&
               one[0].outputs[member][0] == other[0].outputs[member][0]);
}

RT_TEST(bits_between_sites_do_not_depend_on_what_is_fused) {
  for (const std::vector<std::string>& sites : std::vector<std::vector<std::string>>{{"a", "a", "b", "b"},
                                                                                     {"a", "b", "b", "a"},
                                                                                     {"a", "b", "c", "d"},
                                                                                     {"a", "b", "b", "b"},
                                                                                     {"a", "b", "c", "c"}})
    for (DType dtype : {DType::kFloat32, DType::kBFloat16})
      RequireSameBitsAloneAndFused({1, 2, 1, 1}, sites, dtype, 301);
}

RT_TEST(bits_do_not_depend_on_the_steps_between_hosts) {
  for (int hosts : {3, 4, 7, 16, 17, 20, 32, 33})
    for (size_t count : {1, 40, 301, 9001})
      for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
        std::vector<int> layout(static_cast<size_t>(hosts), 1);
        layout[1] = 2;
        RequireSameBitsAloneAndFused(layout, {}, dtype, count);
      }
}

// Whether the result slots of a member have been written in an allreduce of a tensor of three blocks and a bit.
bool SlotsAreWritten(const std::vector<int>& layout, int member) {
  Random random(7);
  Members members(layout, 0);
  Exchange exchange = RandomExchange(&random, members.size(), Operation::kAllreduce, DType::kInt32);
  exchange.batch.tensors.resize(1);
  const size_t bytes = exchange.batch.tensors[0].bytes = (size_t{3} << 20) + 4000;
  for (auto* tensors : {&exchange.inputs, &exchange.outputs})
    for (std::vector<Bytes8>& of_member : *tensors) of_member.assign(1, RandomBytes(&random, DType::kFloat32, bytes));
  for (std::vector<Bytes8>& of_member : exchange.expected) of_member.assign(1, SumOf(exchange, 0, 0, bytes));
  std::vector<Exchange> one = {exchange};
  Perform(members, &one, &random);
  RT_CHECK(one[0].outputs == one[0].expected);
  const Group& group = members[member].group;
  for (uint64_t chunk = 0; chunk < static_cast<uint64_t>(group.geometry.result_slots); ++chunk) {
    const char* slot = group.window.result(group.topology.my_local(), chunk);
    if (std::any_of(slot, slot + group.geometry.result_bytes, [](char byte) { return byte != 0; })) return true;
  }
  return false;
}

RT_TEST(a_large_tensor_travels_from_where_it_lies) {
  RT_CHECK(!SlotsAreWritten({1, 1}, 0));
  RT_CHECK(!SlotsAreWritten({1, 1, 1}, 2));
  RT_CHECK(SlotsAreWritten({2, 1}, 0));
}

RT_TEST(a_compressed_allreduce_sends_what_its_codec_says) {
  static const SixBits codec(false);
  Random random(7);
  Members members({1, 1}, 0);
  Exchange exchange = RandomExchange(&random, members.size(), Operation::kAllreduce, DType::kFloat32);
  constexpr size_t kCount = 4096;
  exchange.batch.codec = &codec;
  exchange.batch.tensors.resize(1);
  exchange.batch.tensors[0].bytes = kCount * sizeof(float);
  for (auto* tensors : {&exchange.inputs, &exchange.outputs})
    for (std::vector<Bytes8>& of_member : *tensors) of_member.assign(1, Bytes8(kCount * sizeof(float)));
  std::vector<Exchange> one = {exchange};
  Perform(members, &one, &random);
  // Each host sends the other's half, and its own when it is finished.
  RT_CHECK_EQ(members[0].wire_bytes(), static_cast<int64_t>(2 * codec.WireBytes(DType::kFloat32, kCount / 2)));
}

}  // namespace
}  // namespace ringtrain
