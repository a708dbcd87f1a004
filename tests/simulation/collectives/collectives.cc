// What an allreduce between hosts costs by their number: microseconds and messages, by the product's own way of a chunk
// (native/collectives/ring.cc) on a network of which everything is stated.
//
//   simulate_collectives [--hosts 4,16,...] [--bytes 64,1024,...] [--latency-us F] [--message-us F] [--gbit F]
//                        [--rack N] [--oversubscribed F] [--json]
//
// The model. Each host is one rank. A message costs --message-us of processor time where it is sent and where it is
// taken, one after the other; a host's link carries --gbit each way; the last byte arrives --latency-us after it has
// left. Racks have --rack hosts, and to the others a link each way of the sum of their hosts' divided by
// --oversubscribed. Additions and copies take no time. All hosts begin at one moment; an allreduce ends when the last
// host has the sums, which are checked.
//
// The ways: `ring`; `chosen`, what RingPass::Choose takes of a batch of this size; and, by a formula, `tree`: two
// binary trees of half of the tensor each (Sanders, Speck and Traeff, 2009), in the pieces that are best.
#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <numeric>
#include <queue>
#include <sstream>
#include <string>
#include <vector>

#include "collectives/ring.h"
#include "collectives/partition.h"

namespace ringtrain {
namespace simulation {
namespace {

constexpr int kOfALargeBatch = 1 << 20;  // chunks: a batch that goes around the ring

struct Model {
  double latency_us = 20, message_us = 3, gbit = 100, oversubscribed = 2;
  int rack = 32;

  double OnLink(size_t bytes) const { return static_cast<double>(bytes) * 8e-3 / gbit; }
  double UpTheRack(size_t bytes) const { return OnLink(bytes) * oversubscribed / rack; }
};

// Messages between hosts, in microseconds of the model.
class Network {
 public:
  Network(int hosts, const Model& model)
      : model_(model),
        now_(Places(hosts)),
        out_(Places(hosts)),
        in_(Places(hosts)),
        up_(Places(hosts)),
        down_(Places(hosts)),
        sent_(Places(hosts)) {}

  struct Message {
    double arrives;
    std::vector<char> bytes;
  };
  struct Wakeup {
    double at;
    int64_t number;  // equal times keep the order in which they were made
    int host;
    bool operator<(const Wakeup& that) const { return at != that.at ? at > that.at : number > that.number; }
  };

  void Send(int from, int to, const void* data, size_t bytes) {
    double& now = now_[Place(from)];
    now += model_.message_us;
    ++sent_[Place(from)];
    double left = out_[Place(from)] = std::max(out_[Place(from)], now) + model_.OnLink(bytes);
    const int rack = from / model_.rack, other = to / model_.rack;
    if (rack != other) {
      left = up_[Place(rack)] = std::max(up_[Place(rack)] + model_.UpTheRack(bytes), left);
      left = down_[Place(other)] = std::max(down_[Place(other)] + model_.UpTheRack(bytes), left);
    }
    left = in_[Place(to)] = std::max(in_[Place(to)] + model_.OnLink(bytes), left);
    const char* const begin = static_cast<const char*>(data);
    queues_[{from, to}].push_back({left + model_.latency_us, {begin, begin + bytes}});
    Wake(to, left + model_.latency_us);
  }

  // Takes the next message of a pair into `data`; false if it has not arrived.
  bool Take(int from, int to, void* data, size_t bytes) {
    std::deque<Message>& queue = queues_[{from, to}];
    double& now = now_[Place(to)];
    if (queue.empty() || queue.front().arrives > now) return false;
    if (queue.front().bytes.size() != bytes) std::abort();
    std::memcpy(data, queue.front().bytes.data(), bytes);
    queue.pop_front();
    now += model_.message_us;
    return true;
  }

  void Wake(int host, double at) { wakeups_.push({at, number_++, host}); }
  bool Next(int* host) {
    if (wakeups_.empty()) return false;
    *host = wakeups_.top().host;
    now_[Place(*host)] = std::max(now_[Place(*host)], wakeups_.top().at);
    wakeups_.pop();
    return true;
  }

  double end() const { return *std::max_element(now_.begin(), now_.end()); }
  int64_t most_sent() const { return *std::max_element(sent_.begin(), sent_.end()); }

 private:
  static size_t Places(int hosts) { return static_cast<size_t>(hosts); }
  static size_t Place(int host) { return static_cast<size_t>(host); }

  const Model& model_;
  std::vector<double> now_, out_, in_;  // by host
  std::vector<double> up_, down_;       // by rack
  std::vector<int64_t> sent_;
  std::map<std::pair<int, int>, std::deque<Message>> queues_;
  std::priority_queue<Wakeup> wakeups_;
  int64_t number_ = 0;
};

class ModelWire : public Wire {
 public:
  ModelWire(Network* network, int host, int hosts) : network_(network), host_(host), hosts_(hosts) {}

  int rank() const override { return host_; }
  int size() const override { return hosts_; }
  Status SendFrame(int, const std::string&) override { std::abort(); }
  Status ReceiveFrame(int*, std::string*, bool*) override { std::abort(); }
  Status StartSend(int to, int, const void* data, size_t bytes, Ticket* ticket) override {
    network_->Send(host_, to, data, bytes);
    *ticket = -1;
    return {};
  }
  Status StartReceive(int from, int, void* data, size_t bytes, Ticket* ticket) override {
    *ticket = static_cast<Ticket>(receives_.size());
    receives_.push_back({from, data, bytes});
    pending_[from].push_back(*ticket);
    return {};
  }
  // Messages of a pair match in order, whichever is asked for first.
  Status Test(Ticket ticket, bool* complete) override {
    *complete = ticket < 0 || Complete(receives_[static_cast<size_t>(ticket)], ticket);
    return {};
  }
  void Abandon() override {}
  bool TakeLostPeer(LostPeer*) override { return false; }
  void Close(bool, double) override {}
  std::string Describe() const override { return "a model"; }

 private:
  struct Receive {
    int from;
    void* data;
    size_t bytes;
    bool complete = false;
  };

  bool Complete(const Receive& asked, Ticket ticket) {
    std::deque<Ticket>& pending = pending_[asked.from];
    while (!asked.complete && !pending.empty() && pending.front() <= ticket) {
      Receive& next = receives_[static_cast<size_t>(pending.front())];
      if (!network_->Take(next.from, host_, next.data, next.bytes)) break;
      next.complete = true;
      pending.pop_front();
    }
    return asked.complete;
  }

  Network* const network_;
  const int host_, hosts_;
  std::deque<Receive> receives_;
  std::map<int, std::deque<Ticket>> pending_;
};

struct Host {
  std::unique_ptr<ModelWire> wire;
  Counters counters;
  Group group;
  std::vector<float> slot;
  Chunk chunk;
  std::unique_ptr<RingPass> pass;
};

struct Cost {
  double microseconds;
  int64_t messages;  // that one host sends
};

// Of one allreduce of a chunk.
Cost Allreduce(int hosts, size_t floats, int chunks, const Model& model) {
  Network network(hosts, model);
  std::vector<int> all(static_cast<size_t>(hosts));
  std::iota(all.begin(), all.end(), 0);
  Batch batch;
  batch.dtype = DType::kFloat32;
  batch.tensors.resize(1);
  batch.tensors[0].bytes = floats * sizeof(float);
  std::vector<Host> members(all.size());
  for (int host : all) {
    Host& member = members[static_cast<size_t>(host)];
    member.wire = std::make_unique<ModelWire>(&network, host, hosts);
    member.group.topology = MakeTopology(all, host, all);
    member.group.geometry = MakeGeometry(member.group.topology, 4 * floats * sizeof(float), size_t{1} << 40);
    member.group.wire = member.wire.get();
    member.group.counters = &member.counters;
    member.slot.assign(floats + 16, static_cast<float>(host));
    Partition(batch, member.group.topology, member.group.geometry).Fill(0, &member.chunk);
    member.pass = std::make_unique<RingPass>(&member.group, all, batch, chunks);
    member.pass->Start(reinterpret_cast<char*>(member.slot.data()), member.chunk, 0, 0, nullptr);
    network.Wake(host, 0);
  }
  for (int host; network.Next(&host);) {
    for (bool moved = true; moved && !members[static_cast<size_t>(host)].pass->done();) {
      moved = false;
      if (!members[static_cast<size_t>(host)].pass->Advance(&moved).ok()) std::abort();
    }
  }
  const auto sum = static_cast<float>(static_cast<int64_t>(hosts) * (hosts - 1) / 2);
  for (const Host& member : members)
    if (!member.pass->done() || std::count(member.slot.begin(), member.slot.begin() + static_cast<ptrdiff_t>(floats),
                                           sum) != static_cast<ptrdiff_t>(floats)) {
      std::fprintf(stderr, "simulate_collectives: a host of %d has no sum of %zu floats\n", hosts, floats);
      std::exit(1);
    }
  return {network.end(), network.most_sent()};
}

// A piece of each half goes up one tree and down again, and each link carries both trees' pieces.
double OfTree(int hosts, size_t bytes, const Model& model) {
  const double depth = std::ceil(std::log2(hosts));
  double best = HUGE_VAL;
  for (double pieces = 1; pieces <= 1024; pieces *= 2) {
    const double step = model.OnLink(bytes) / (2 * pieces) + 2 * model.message_us;
    best = std::min(best, 2 * depth * (model.latency_us + step) + 2 * (pieces - 1) * 2 * step);
  }
  return best;
}

// ---- the program ----

struct Arguments {
  std::vector<int64_t> hosts = {4, 8, 16, 32, 64, 256, 1024}, bytes = {64, 1024, 16384, 262144, 1048576};
  Model model;
  bool json = false;
};

std::vector<int64_t> Numbers(const char* text) {
  std::vector<int64_t> numbers;
  std::istringstream list(text);
  for (std::string number; std::getline(list, number, ',');) numbers.push_back(std::atoll(number.c_str()));
  return numbers;
}

bool Parse(int argc, char** argv, Arguments* arguments) {
  Model& model = arguments->model;
  const std::map<std::string, double*> numbers = {{"--latency-us", &model.latency_us},
                                                  {"--message-us", &model.message_us},
                                                  {"--gbit", &model.gbit},
                                                  {"--oversubscribed", &model.oversubscribed}};
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--json") {
      arguments->json = true;
    } else if (++i == argc) {
      return false;
    } else if (name == "--hosts") {
      arguments->hosts = Numbers(argv[i]);
    } else if (name == "--bytes") {
      arguments->bytes = Numbers(argv[i]);
    } else if (name == "--rack") {
      model.rack = std::atoi(argv[i]);
    } else if (const auto found = numbers.find(name); found != numbers.end()) {
      *found->second = std::atof(argv[i]);
    } else {
      return false;
    }
  }
  const auto sensible = [](int64_t number) { return number > 0; };
  return !arguments->hosts.empty() && !arguments->bytes.empty() && model.rack > 0 &&
         std::all_of(arguments->hosts.begin(), arguments->hosts.end(), [](int64_t hosts) { return hosts > 1; }) &&
         std::all_of(arguments->bytes.begin(), arguments->bytes.end(), sensible) &&
         std::all_of(numbers.begin(), numbers.end(), [](const auto& number) { return *number.second > 0; });
}

void Print(bool json, int64_t hosts, int64_t bytes, const char* way, double microseconds, int64_t messages) {
  if (json)
    std::printf("{\"hosts\": %" PRId64 ", \"bytes\": %" PRId64
                ", \"way\": \"%s\", \"microseconds\": %.1f, \"messages\": %" PRId64 "}\n",
                hosts, bytes, way, microseconds, messages);
  else
    std::printf("%6" PRId64 " %10" PRId64 " %8s %14.0f %10" PRId64 "\n", hosts, bytes, way, microseconds, messages);
  std::fflush(stdout);
}

int Main(int argc, char** argv) {
  Arguments arguments;
  if (!Parse(argc, argv, &arguments)) {
    std::fprintf(stderr, "simulate_collectives: see the head of tests/simulation/collectives/collectives.cc\n");
    return 2;
  }
  if (!arguments.json) std::printf("%6s %10s %8s %14s %10s\n", "hosts", "bytes", "way", "microseconds", "messages");
  for (int64_t hosts : arguments.hosts)
    for (int64_t bytes : arguments.bytes) {
      const size_t floats = (static_cast<size_t>(bytes) + sizeof(float) - 1) / sizeof(float);
      const Cost ring = Allreduce(static_cast<int>(hosts), floats, kOfALargeBatch, arguments.model);
      const Cost chosen = Allreduce(static_cast<int>(hosts), floats, 1, arguments.model);
      Print(arguments.json, hosts, bytes, "ring", ring.microseconds, ring.messages);
      Print(arguments.json, hosts, bytes, "chosen", chosen.microseconds, chosen.messages);
      Print(arguments.json, hosts, bytes, "tree",
            OfTree(static_cast<int>(hosts), static_cast<size_t>(bytes), arguments.model), 0);
    }
  return 0;
}

}  // namespace
}  // namespace simulation
}  // namespace ringtrain

int main(int argc, char** argv) { return ringtrain::simulation::Main(argc, argv); }
