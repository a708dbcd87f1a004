// What agreement on a step costs by the number of ranks: messages, bytes and microseconds, by the product's own
// protocol on a network of which everything is stated.
//
//   simulate_scale [--ranks 8,64,...] [--host N] [--tensors N] [--between-us F] [--within-us F] [--frame-between-us F]
//                  [--delays FILE] [--frame-within-us F] [--gbit F] [--without-code] [--schedule auto|off]
//                  [--fanout N] [--json]
//
// The model. A frame from one host to another arrives --between-us after it has left, one within a host --within-us
// after. --delays adds to each frame between hosts a delay in microseconds that is drawn from the lines of a file, such
// as `python -m benchmarks delays` writes; frames of a pair keep their order. Each costs --frame-between-us or
// --frame-within-us of processor time where it is sent and where it is taken, one after the other, and a host's link
// carries --gbit each way. A rank takes what lies in its mail 64 frames at a time, as rank_loop.cc does. The time that
// the protocol's code takes is measured while it runs here and passes in the simulated world too, unless
// --without-code, which makes a run reproducible. Tensors take no time: only agreement is looked at. With --schedule
// auto the steady steps run by a schedule: what a rank promises is seen --within-us later by those of its host whom it
// rings, without a frame.
//
// The steps, on a world that has just begun: `first` is one in which nothing is known, `steady` one like those before
// it (the median of some), `changed` one in which one tensor has another shape on every rank. All ranks submit at one
// moment; a step ends when the last rank starts the last of its batches.
#include <time.h>

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <memory>
#include <queue>
#include <random>
#include <sstream>
#include <string>
#include <unordered_map>
#include <vector>

#include "world/protocol.h"

namespace ringtrain {
namespace simulation {
namespace {

constexpr double kMicrosecond = 1000;
constexpr double kSoon = 1e8;  // timers beyond are those of stalls
constexpr int kMaxFrames = 64;
constexpr int kTimer = -2;       // in the place of a sender
constexpr int kFloats = 160000;  // of a tensor: 160 of them have the bytes of ResNet-50's gradients
constexpr int kWarmUp = 6;       // steps between the first and those that count as steady
constexpr int kSteady = 9;       // of which the median counts: with drawn delays no two are alike

struct Model {
  double between_us = 20, within_us = 1, frame_between_us = 1, frame_within_us = 0.2, gbit = 10;
  int fanout = Promises::kFanout;
  bool code = true;
  std::vector<double> delays_us;  // drawn from for each frame between hosts, on top
};

// Of this thread, in nanoseconds: whatever else the machine does is not charged.
double ProcessorTime() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) * 1e9 + static_cast<double>(time.tv_nsec);
}

struct Traffic {
  int64_t frames = 0, bytes = 0;
};

struct Cost {
  Traffic all, between_hosts, busiest;   // busiest: of the rank that sends and takes most frames
  double microseconds = 0, code_us = 0;  // code_us: of the protocol on the rank where it takes longest
};

class Network {
 public:
  Network(int ranks, int per_host, const Options& options, const Model& model);

  Cost RunStep(const std::vector<Request>& requests);

 private:
  struct Arrival {
    double at;
    int64_t number;  // equal times keep the order in which they were made
    int to, from;    // from: -1, the rank is called because time has passed
    std::string bytes;
    bool operator<(const Arrival& that) const { return at != that.at ? at > that.at : number > that.number; }
  };
  struct Rank {
    std::unique_ptr<Protocol> protocol;
    std::deque<std::pair<int, std::string>> mail;
    std::vector<Request> news;
    double busy_until = 0, code = 0;
    bool called = false;
    int started = 0;
    PromiseSign promise;
    Traffic traffic;
  };

  void Call(int rank, double at);
  void Step(int number);
  void Follow(int number, RankEffects* effects, std::vector<int>* finished);
  void Send(int from, int to, const Frame& frame);
  void LookAtPromises(int number, RankEffects* effects);
  double Delay() { return model_.delays_us.empty() ? 0 : model_.delays_us[random_() % model_.delays_us.size()]; }
  bool Share(int one, int other) const { return world_.host_of[one] == world_.host_of[other]; }
  double FrameCost(int one, int other) const {
    return (Share(one, other) ? model_.frame_within_us : model_.frame_between_us) * kMicrosecond;
  }
  template <typename What>
  void Charge(int number, What what);
  Nanoseconds clock() const { return static_cast<Nanoseconds>(now_); }

  const Options& options_;
  const Model model_;
  World world_;  // one for all ranks: its rank is the one that moves at the moment
  std::vector<Rank> ranks_;
  std::vector<double> link_out_, link_in_;              // by host: until when it is busy
  std::unordered_map<int64_t, double> last_of_a_pair_;  // when it arrives
  std::mt19937_64 random_{1};
  std::priority_queue<Arrival> heap_;
  int64_t number_ = 0;
  double now_ = 0, last_start_ = 0;
  size_t expected_ = 0;
  Cost cost_;
};

Network::Network(int ranks, int per_host, const Options& options, const Model& model)
    : options_(options), model_(model), ranks_(static_cast<size_t>(ranks)) {
  std::vector<std::string> keys;
  for (int rank = 0; rank < ranks; ++rank) keys.push_back(std::to_string(rank / per_host));
  world_.size = ranks;
  world_.host_names = keys;
  GroupByHost(keys, &world_);
  link_out_.resize(world_.hosts.size());
  link_in_.resize(world_.hosts.size());
  for (int rank = 0; rank < ranks; ++rank) {
    world_.rank = rank;
    Rank& mine = ranks_[static_cast<size_t>(rank)];
    mine.protocol = std::make_unique<Protocol>(world_, options_, model_.fanout);
    RankEffects effects;
    mine.protocol->Begin(0, &effects);
  }
}

template <typename What>
void Network::Charge(int number, What what) {
  const double before = ProcessorTime();
  what();
  const double took = ProcessorTime() - before;
  ranks_[static_cast<size_t>(number)].code += took;
  if (model_.code) now_ += took;
}

void Network::Call(int rank, double at) {
  Rank& called = ranks_[static_cast<size_t>(rank)];
  if (std::exchange(called.called, true)) return;
  heap_.push({std::max(at, called.busy_until), number_++, rank, -1, {}});
}

Cost Network::RunStep(const std::vector<Request>& requests) {
  cost_ = Cost();
  expected_ = requests.size();
  const double begin = now_ = now_ + 1000 * kMicrosecond;
  for (Rank& rank : ranks_) {
    rank.news = requests;
    rank.traffic = Traffic();
    rank.started = 0;
    rank.code = 0;
  }
  for (int rank = 0; rank < world_.size; ++rank) Call(rank, begin);
  while (!heap_.empty()) {
    Arrival arrival = heap_.top();
    heap_.pop();
    now_ = arrival.at;
    Rank& rank = ranks_[static_cast<size_t>(arrival.to)];
    if (arrival.from < 0) {
      rank.called = rank.called && arrival.from == kTimer;
      now_ = std::max(now_, rank.busy_until);
      Step(arrival.to);
      continue;
    }
    rank.mail.emplace_back(arrival.from, std::move(arrival.bytes));
    Call(arrival.to, now_);
  }
  for (const Rank& rank : ranks_) {
    if (rank.started != static_cast<int>(expected_)) {
      std::fprintf(stderr, "simulate_scale: a rank has started %d of %zu operations\n", rank.started, expected_);
      std::exit(1);
    }
    if (rank.traffic.frames > cost_.busiest.frames) cost_.busiest = rank.traffic;
    cost_.code_us = std::max(cost_.code_us, rank.code / kMicrosecond);
  }
  cost_.microseconds = (last_start_ - begin) / kMicrosecond;
  now_ = std::max(now_, last_start_);
  return cost_;
}

// As RankLoop::Step: what has been submitted, the mail, and what follows from both.
void Network::Step(int number) {
  world_.rank = number;
  Rank& rank = ranks_[static_cast<size_t>(number)];
  RankEffects effects;
  std::vector<int> finished;
  Charge(number, [&] {
    for (const Request& request : std::exchange(rank.news, {})) rank.protocol->Submitted(clock(), 0, request, &effects);
  });
  LookAtPromises(number, &effects);
  Follow(number, &effects, &finished);
  for (int count = 0; count < kMaxFrames && !rank.mail.empty(); ++count) {
    const auto [from, bytes] = std::move(rank.mail.front());
    rank.mail.pop_front();
    now_ += FrameCost(number, from);
    ++rank.traffic.frames;
    rank.traffic.bytes += static_cast<int64_t>(bytes.size());
    Charge(number, [&, sender = from, &text = bytes] {
      Frame frame;
      if (!Frame::Decode(text, &frame)) std::abort();
      rank.protocol->Arrived(clock(), sender, std::move(frame), &effects);
    });
    Follow(number, &effects, &finished);
  }
  Charge(number, [&] { rank.protocol->Tick(clock(), &effects); });
  Follow(number, &effects, &finished);
  while (!finished.empty()) {
    for (int set : std::exchange(finished, {}))
      Charge(number, [&, done = set] { rank.protocol->BatchFinished(clock(), done, &effects); });
    Charge(number, [&] { rank.protocol->Tick(clock(), &effects); });
    Follow(number, &effects, &finished);
  }
  rank.busy_until = now_;
  const auto timer = static_cast<double>(rank.protocol->next_stall());
  if (timer < now_ + kSoon) heap_.push({std::max(timer, now_) + 1, number_++, number, kTimer, {}});
  if (!rank.mail.empty()) Call(number, now_);
}

void Network::LookAtPromises(int number, RankEffects* effects) {
  Charge(number, [&] {
    Protocol& protocol = *ranks_[static_cast<size_t>(number)].protocol;
    std::vector<PromiseSign> signs;
    protocol.ForEachWatched([&](int, const std::vector<int>& ranks) {
      for (int rank : ranks) signs.push_back(ranks_[static_cast<size_t>(rank)].promise);
    });
    if (!signs.empty()) protocol.Seen(clock(), 0, std::move(signs), effects);
  });
}

// What follows from one of them comes behind the others.
void Network::Follow(int number, RankEffects* effects, std::vector<int>* finished) {
  for (size_t place = 0; place < effects->size(); ++place) {
    RankEffect effect = std::move((*effects)[place]);
    if (auto* promise = std::get_if<rank_effect::Promise>(&effect)) {
      ranks_[static_cast<size_t>(number)].promise = promise->sign;
      LookAtPromises(number, effects);
    }
    if (auto* wake = std::get_if<rank_effect::Wake>(&effect)) Call(wake->rank, now_ + model_.within_us * kMicrosecond);
    if (auto* send = std::get_if<rank_effect::Send>(&effect)) Send(number, send->rank, send->frame);
    if (auto* start = std::get_if<rank_effect::Start>(&effect)) {
      ranks_[static_cast<size_t>(number)].started += static_cast<int>(start->batch.responses.size());
      finished->push_back(start->process_set);
      last_start_ = std::max(last_start_, now_);
    }
    if (std::holds_alternative<rank_effect::Fail>(effect) || std::holds_alternative<rank_effect::NoteCause>(effect))
      std::abort();
  }
  effects->clear();
}

void Network::Send(int from, int to, const Frame& frame) {
  std::string bytes;
  Charge(from, [&] { bytes = frame.Encode(); });
  now_ += FrameCost(from, to);
  const auto size = static_cast<int64_t>(bytes.size());
  Rank& sender = ranks_[static_cast<size_t>(from)];
  for (Traffic* traffic : {&sender.traffic, &cost_.all, Share(from, to) ? nullptr : &cost_.between_hosts}) {
    if (traffic == nullptr) continue;
    ++traffic->frames;
    traffic->bytes += size;
  }
  double at = now_ + model_.within_us * kMicrosecond;
  if (!Share(from, to)) {
    const double on_link = static_cast<double>(size) * 8 / model_.gbit;
    double& out = link_out_[static_cast<size_t>(world_.host_of[from])];
    double& in = link_in_[static_cast<size_t>(world_.host_of[to])];
    out = std::max(out, now_) + on_link;
    in = std::max(out + model_.between_us * kMicrosecond, in + on_link);
    double& last = last_of_a_pair_[static_cast<int64_t>(from) * world_.size + to];
    last = at = std::max(in + Delay() * kMicrosecond, last);
  }
  heap_.push({at, number_++, to, from, std::move(bytes)});
}

// ---- the program ----

struct Arguments {
  std::vector<int> ranks = {8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 16384};
  int per_host = 8, tensors = 160;
  Model model;
  Options options;
  bool json = false;
};

bool ParseNumber(const std::string& name, const char* text, Arguments* arguments) {
  char* end;
  const double value = std::strtod(text, &end);
  if (*end != 0 || value <= 0) return false;
  Model& model = arguments->model;
  if (name == "--host")
    arguments->per_host = static_cast<int>(value);
  else if (name == "--tensors")
    arguments->tensors = static_cast<int>(value);
  else if (name == "--between-us")
    model.between_us = value;
  else if (name == "--within-us")
    model.within_us = value;
  else if (name == "--frame-between-us")
    model.frame_between_us = value;
  else if (name == "--frame-within-us")
    model.frame_within_us = value;
  else if (name == "--gbit")
    model.gbit = value;
  else
    return false;
  return true;
}

bool ParseRanks(const char* text, std::vector<int>* ranks) {
  ranks->clear();
  std::istringstream list(text);
  for (std::string number; std::getline(list, number, ',');) ranks->push_back(std::atoi(number.c_str()));
  return !ranks->empty() && *std::min_element(ranks->begin(), ranks->end()) > 0 &&
         *std::max_element(ranks->begin(), ranks->end()) <= 16384;
}

// One a line; those that begin with # say where they come from.
bool ReadDelays(const char* path, std::vector<double>* delays) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.empty() || line[0] == '#') continue;
    char* end;
    delays->push_back(std::strtod(line.c_str(), &end));
    if (*end != 0 || delays->back() < 0) return false;
  }
  return !delays->empty();
}

void SetDefault(const char* text, int64_t* number) { *number = std::atoll(text); }
void SetDefault(const char* text, double* number) { *number = std::atof(text); }
void SetDefault(const char* text, std::string* value) { *value = text; }

// Of those that the protocol reads, as tables/options.def has them.
void SetDefaults(Options* options) {
#define RT_OPTION(name, type, initial, lowest, highest, agrees, horovod, sentence) SetDefault(initial, &options->name);
#include "tables/options.def"
#undef RT_OPTION
}

// The first argument that is not understood, or nullptr.
const char* Parse(int argc, char** argv, Arguments* arguments) {
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--json") {
      arguments->json = true;
    } else if (name == "--without-code") {
      arguments->model.code = false;
    } else if (++i == argc) {
      return argv[i - 1];
    } else if (name == "--schedule") {
      arguments->options.schedule = argv[i];
    } else if (name == "--fanout") {
      arguments->model.fanout = std::atoi(argv[i]);
    } else if (name == "--delays") {
      if (!ReadDelays(argv[i], &arguments->model.delays_us)) return argv[i];
    } else if (name == "--ranks") {
      if (!ParseRanks(argv[i], &arguments->ranks)) return argv[i];
    } else if (!ParseNumber(name, argv[i], arguments)) {
      return argv[i - 1];
    }
  }
  return nullptr;
}

std::vector<Request> Requests(int count) {
  std::vector<Request> requests;
  for (int number = 0; number < count; ++number) {
    char name[40];
    std::snprintf(name, sizeof name, "gradient.layer%03d.weight", number);
    Request request;
    request.name = name;
    request.reduction = Reduction::kAverage;
    request.tensors = {{DType::kFloat32, {kFloats}}};
    requests.push_back(request);
  }
  return requests;
}

void Print(const Arguments& arguments, int ranks, const char* step, const Cost& cost) {
  if (!arguments.json) {
    std::printf("%6d %8s %12" PRId64 " %12" PRId64 " %14" PRId64 " %14" PRId64 " %12.0f %12.0f\n", ranks, step,
                cost.all.frames, cost.between_hosts.frames, cost.all.bytes, cost.busiest.frames, cost.microseconds,
                cost.code_us);
  } else {
    std::printf("{\"ranks\": %d, \"step\": \"%s\", \"messages\": %" PRId64 ", \"messages_between_hosts\": %" PRId64
                ", \"bytes\": %" PRId64 ", \"busiest_rank_messages\": %" PRId64 ", \"busiest_rank_bytes\": %" PRId64
                ", \"microseconds\": %.1f, \"code_microseconds\": %.1f}\n",
                ranks, step, cost.all.frames, cost.between_hosts.frames, cost.all.bytes, cost.busiest.frames,
                cost.busiest.bytes, cost.microseconds, cost.code_us);
  }
  std::fflush(stdout);
}

int Main(int argc, char** argv) {
  Arguments arguments;
  SetDefaults(&arguments.options);
  if (const char* wrong = Parse(argc, argv, &arguments)) {
    std::fprintf(stderr,
                 "simulate_scale: '%s' is not understood; the head of tests/simulation/scale/scale.cc lists the "
                 "options\n",
                 wrong);
    return 2;
  }
  if (!arguments.json)
    std::printf("%6s %8s %12s %12s %14s %14s %12s %12s\n", "ranks", "step", "messages", "across hosts", "bytes",
                "busiest rank's", "microseconds", "code of one");
  for (int ranks : arguments.ranks) {
    Network network(ranks, arguments.per_host, arguments.options, arguments.model);
    std::vector<Request> requests = Requests(arguments.tensors);
    Print(arguments, ranks, "first", network.RunStep(requests));
    for (int step = 0; step < kWarmUp; ++step) network.RunStep(requests);
    std::vector<Cost> steady;
    for (int step = 0; step < kSteady; ++step) steady.push_back(network.RunStep(requests));
    std::sort(steady.begin(), steady.end(),
              [](const Cost& one, const Cost& other) { return one.microseconds < other.microseconds; });
    Print(arguments, ranks, "steady", steady[kSteady / 2]);
    requests[0].tensors[0].shape[0] += 1;
    Print(arguments, ranks, "changed", network.RunStep(requests));
  }
  return 0;
}

}  // namespace
}  // namespace simulation
}  // namespace ringtrain

int main(int argc, char** argv) { return ringtrain::simulation::Main(argc, argv); }
