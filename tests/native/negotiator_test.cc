// The negotiator in a deterministic simulation: N of them joined by a queue for each pair of ranks, in an order that a
// seeded random number generator draws. Frames travel as bytes, so that their encoding takes part. Failures print the
// seed.
#include "agree/negotiator.h"

#include <deque>
#include <map>
#include <numeric>
#include <random>
#include <set>

#include "check.h"

namespace ringtrain {
namespace {

Request Allreduce(const std::string& name, int64_t elements = 4) {
  Request request;
  request.name = name;
  request.tensors = {{DType::kFloat32, {elements}}};
  return request;
}

Request Named(Operation operation, const std::string& name) {
  Request request;
  request.name = name;
  request.operation = operation;
  return request;
}

std::string Show(const Response& response) {
  Encoder encoder;
  Encode(response, &encoder);
  return encoder.Take();
}

// What one rank was told, in its order.
struct Outcome {
  std::string name;
  bool executed;
  Status status;      // of a failure
  Response response;  // of an execution
  std::vector<bool> joined;
  std::vector<int> missing = {};  // of a failure
};

class Simulation {
 public:
  Simulation(int size, uint64_t seed, NegotiatorOptions options = {})
      : random(seed), queues_(size * size), nodes_(size), promises_(size) {
    options.members.clear();
    for (int rank = 0; rank < size; ++rank) options.members.push_back(10 + rank);  // global ranks are not members
    for (int rank = 0; rank < size; ++rank) {
      options.me = rank;
      nodes_[rank].negotiator = std::make_unique<Negotiator>(options);
    }
    threshold_ = options.fusion_threshold_bytes;
  }

  int size() const { return static_cast<int>(nodes_.size()); }
  size_t Below(size_t bound) { return std::uniform_int_distribution<size_t>(0, bound - 1)(random); }

  void Feed(int rank, const Event& event) {
    Effects effects;
    nodes_[rank].negotiator->OnEvent(now, event, &effects);
    for (Effect& effect : effects) std::visit([&](auto& what) { On(rank, what); }, effect);
    if (std::exchange(nodes_[rank].looks, false)) Feed(rank, event::Seen{promises_});
  }
  void Tick(int rank) {
    if (nodes_[rank].negotiator->watches()) Feed(rank, event::Seen{promises_});
    Feed(rank, event::Tick{});
  }

  void Submit(int rank, const Request& request) {
    RT_CHECK(nodes_[rank].in_flight.insert(request.name).second);
    ++nodes_[rank].undecided[request.name];
    if (request.operation == Operation::kJoin) nodes_[rank].joined = true;
    Feed(rank, event::Submitted{request});
  }
  void Refuse(int rank, const std::string& name, const std::string& text) {
    Feed(rank, event::Refused{{name, StatusCode::kInvalidArgument, text}});
  }
  void LongPhase(int rank, Nanoseconds duration) { Feed(rank, event::LongPhase{duration}); }
  // The goodbye reaches every other rank in its queue, as the coordinator sends it.
  void Leave(int rank, bool gone = false) {
    Tick(rank);
    Feed(rank, event::Left{rank, gone});
    for (int other = 0; other < size(); ++other)
      if (other != rank) Queue(rank, other).push_back(gone ? "gone" : "");
  }

  bool InFlight(int rank, const std::string& name) const { return nodes_[rank].in_flight.count(name) > 0; }
  bool Idle(int rank) const { return nodes_[rank].in_flight.empty(); }
  const std::vector<Outcome>& outcomes(int rank) const { return nodes_[rank].outcomes; }
  const std::vector<std::string>& warnings(int rank) const { return nodes_[rank].warnings; }
  Negotiator& negotiator(int rank) { return *nodes_[rank].negotiator; }

  // Delivers a frame, ends a batch or ticks a rank. False if only ticks are left to do.
  bool Move() {
    std::vector<std::pair<int, int>> moves;  // (from, to) of a queue, or (-1, rank) of a batch
    for (int from = 0; from < size(); ++from)
      for (int to = 0; to < size(); ++to)
        if (!Queue(from, to).empty()) moves.emplace_back(from, to);
    for (int rank = 0; rank < size(); ++rank)
      if (!nodes_[rank].running.empty()) moves.emplace_back(-1, rank);
    if (moves.empty()) return false;
    const auto [from, rank] = moves[Below(moves.size())];
    if (from < 0)
      FinishBatch(rank);
    else
      Deliver(from, rank);
    if (Below(3) > 0) Tick(rank);
    return true;
  }

  // Until nothing moves any more.
  void Settle() {
    for (;;) {
      while (Move()) {
      }
      const int64_t before = frames_sent;
      for (int rank = 0; rank < size(); ++rank) Tick(rank);
      bool running = false;
      for (Node& node : nodes_) running |= !node.running.empty();
      if (frames_sent == before && !running) return;
    }
  }

  void PassTime(Nanoseconds time) {
    now += time;
    Settle();
  }

  std::mt19937_64 random;
  Nanoseconds now = kSecond;
  int64_t frames_sent = 0, resends = 0, hits = 0, misses = 0, rings = 0, scheduled = 0;
  size_t largest_batch = 0;  // operations
  size_t largest_frame = 0;  // bytes

 private:
  struct Node {
    std::unique_ptr<Negotiator> negotiator;
    std::set<std::string> in_flight;
    std::map<std::string, int> undecided;          // submissions that the coordinator has not counted in
    std::deque<std::vector<std::string>> running;  // names of each batch under way
    std::vector<Outcome> outcomes;
    std::vector<std::string> warnings;
    bool joined = false, looks = false;
    int64_t batches = 0;
  };

  std::deque<std::string>& Queue(int from, int to) { return queues_[from * size() + to]; }

  void Deliver(int from, int to) {
    std::string bytes = std::move(Queue(from, to).front());
    Queue(from, to).pop_front();
    if (bytes.empty() || bytes == "gone") return Feed(to, event::Left{from, !bytes.empty()});
    Frame frame;
    RT_REQUIRE(Frame::Decode(bytes, &frame));
    Feed(to, event::Arrived{from, std::move(frame)});
  }

  void FinishBatch(int rank) {
    Node& node = nodes_[rank];
    for (const std::string& name : node.running.front()) node.in_flight.erase(name);
    node.running.pop_front();
    Feed(rank, event::BatchFinished{});
  }

  void On(int rank, effect::Send& send) {
    ++frames_sent;
    if (send.frame.type == FrameType::kResend) ++resends;
    Queue(rank, send.member).push_back(send.frame.Encode());
    largest_frame = std::max(largest_frame, Queue(rank, send.member).back().size());
  }
  void On(int rank, effect::Promise& promise) {
    promises_[rank] = promise.sign;
    nodes_[rank].looks = true;
  }
  void On(int, effect::Ring&) { ++rings; }
  void On(int rank, effect::Execute& execute) {
    Node& node = nodes_[rank];
    scheduled += execute.scheduled;
    RT_CHECK_EQ(execute.joined.size(), static_cast<size_t>(size()));
    largest_batch = std::max(largest_batch, execute.responses.size());
    size_t bytes = 0;
    node.running.emplace_back();
    const bool first = ++node.batches > batches_;
    batches_ = std::max(batches_, node.batches);
    for (const Response& response : execute.responses) {
      bytes += response.request.bytes();
      if (first) CheckContributors(response, execute.joined);
      if (response.request.operation == Operation::kJoin) node.joined = false;
      if (!execute.joined[rank]) RT_CHECK(InFlight(rank, response.request.name));
      node.running.back().push_back(response.request.name);
      node.outcomes.push_back({response.request.name, true, {}, response, execute.joined});
    }
    RT_CHECK(execute.responses.size() == 1 || bytes <= threshold_);
  }
  // When the first member starts it, every member either waits for the operation, or has joined and is listed.
  void CheckContributors(const Response& response, const std::vector<bool>& joined) {
    for (int member = 0; member < size(); ++member) {
      RT_CHECK_EQ(nodes_[member].undecided[response.request.name], joined[member] ? 0 : 1);
      if (!joined[member]) --nodes_[member].undecided[response.request.name];
      if (joined[member]) RT_CHECK(nodes_[member].joined);
    }
  }
  void On(int rank, effect::Fail& fail) {
    RT_CHECK(!fail.status.ok());
    RT_CHECK_EQ(nodes_[rank].in_flight.erase(fail.name), size_t{1});  // one verdict for each submission
    --nodes_[rank].undecided[fail.name];
    nodes_[rank].outcomes.push_back({fail.name, false, fail.status, {}, {}, fail.missing});
  }
  void On(int rank, effect::Warn& warn) { nodes_[rank].warnings.push_back(warn.text); }
  void On(int, effect::Abort& abort) { RT_CHECK_EQ(abort.cause, std::string()); }
  void On(int, effect::Count& count) {
    hits += count.hits;
    misses += count.misses;
  }

  std::vector<std::deque<std::string>> queues_;  // [from * size + to]
  std::vector<Node> nodes_;
  std::vector<PromiseSign> promises_;  // of all, who are on one host
  size_t threshold_;
  int64_t batches_ = 0;  // that the first of the ranks has started
};

// All ranks were told the same executions in the same order.
void CheckSameOrder(const Simulation& simulation) {
  auto order = [&](int rank) {
    std::string text;
    for (const Outcome& outcome : simulation.outcomes(rank))
      if (outcome.executed) text += Show(outcome.response) + std::string(outcome.joined.begin(), outcome.joined.end());
    return text;
  };
  for (int rank = 1; rank < simulation.size(); ++rank) RT_CHECK(order(rank) == order(0));
}

Status FailureOf(const Simulation& simulation, int rank, const std::string& name) {
  const auto& outcomes = simulation.outcomes(rank);
  for (auto outcome = outcomes.rbegin(); outcome != outcomes.rend(); ++outcome)
    if (outcome->name == name && !outcome->executed) return outcome->status;
  return {};
}

int Executions(const Simulation& simulation, int rank, const std::string& name) {
  int count = 0;
  for (const Outcome& outcome : simulation.outcomes(rank)) count += outcome.executed && outcome.name == name;
  return count;
}

// One action of a rank's program: a submission, or a refusal where `refusal` is not empty.
struct Action {
  Request request;
  std::string refusal;
};

// Runs each rank's actions in its order, as early as names allow, mixed at random with what else happens.
void RunPrograms(Simulation* simulation, std::vector<std::deque<Action>> programs) {
  for (bool waited = false;;) {
    std::vector<int> able;
    for (int rank = 0; rank < simulation->size(); ++rank)
      if (!programs[rank].empty() && !simulation->InFlight(rank, programs[rank].front().request.name))
        able.push_back(rank);
    if (!able.empty() && simulation->Below(2) == 0) {
      waited = false;
      const int rank = able[simulation->Below(able.size())];
      const Action action = std::move(programs[rank].front());
      programs[rank].pop_front();
      if (action.refusal.empty())
        simulation->Submit(rank, action.request);
      else
        simulation->Refuse(rank, action.request.name, action.refusal);
      if (simulation->Below(3) == 0) simulation->Tick(rank);
    } else if (!simulation->Move()) {
      for (int rank = 0; rank < simulation->size(); ++rank) simulation->Tick(rank);
      if (!able.empty() || simulation->Move()) continue;
      if (waited) break;
      waited = true;
      simulation->PassTime(kSecond);  // a schedule that does not fit what is submitted ends
    }
  }
  for (int rank = 0; rank < simulation->size(); ++rank) {
    RT_CHECK_EQ(programs[rank].size(), size_t{0});
    RT_CHECK(simulation->Idle(rank));
    RT_CHECK(!simulation->negotiator(rank).pending());
  }
}

// A model's parameters: sizes, types and operations of all kinds, the same on all ranks but for the rows of gathers.
Request RandomRequest(Simulation* simulation, int index) {
  Request request = Allreduce("layer" + std::to_string(index), static_cast<int64_t>(simulation->Below(20)));
  switch (simulation->Below(6)) {
    case 0:
      request.operation = Operation::kAllgather;
      request.tensors[0].shape = {1, 3};
      break;
    case 1:
      request.operation = Operation::kBroadcast;
      request.root = 10;
      break;
    case 2:
      request.tensors.push_back({DType::kFloat32, {7}});  // a group
      break;
    case 3:
      request.reduction = Reduction::kMax;
      break;
    default:
      break;
  }
  return request;
}

constexpr int kSizes[] = {1, 2, 3, 4, 7, 16};

// Several steps with some of the same names, in another order on each rank.
void RunSteps(int size, uint64_t seed, size_t capacity, size_t threshold, int64_t* resends) {
  NegotiatorOptions options;
  options.cache_capacity = capacity;
  options.fusion_threshold_bytes = threshold;
  Simulation simulation(size, seed, options);
  const int names = 1 + static_cast<int>(simulation.Below(9)), steps = 6;
  std::vector<Request> model;
  for (int index = 0; index < names; ++index) model.push_back(RandomRequest(&simulation, index));
  std::map<std::string, int> executions;
  for (int step = 0; step < steps; ++step) {
    if (step == 2 && simulation.Below(3) == 0) model[0].tensors[0].shape.push_back(2);  // changes everywhere
    std::vector<Request> chosen;
    for (const Request& request : model)
      if (simulation.Below(3) > 0) chosen.push_back(request);
    for (const Request& request : chosen) executions[request.name] += step == steps - 1 ? 2 : 1;
    std::vector<std::deque<Action>> programs(size);
    for (int rank = 0; rank < size; ++rank) {
      std::vector<Request> mine = chosen;
      std::shuffle(mine.begin(), mine.end(), simulation.random);
      for (Request& request : mine) {
        if (request.operation == Operation::kAllgather) request.tensors[0].shape[0] = rank;
        programs[rank].push_back({request, ""});
      }
    }
    if (step == steps - 1)  // runs into one more
      for (auto& program : programs) {
        const std::deque<Action> again = program;
        program.insert(program.end(), again.begin(), again.end());
      }
    RunPrograms(&simulation, std::move(programs));
  }
  CheckSameOrder(simulation);
  for (int rank = 0; rank < size; ++rank)
    for (const Request& request : model)
      RT_CHECK_EQ(Executions(simulation, rank, request.name), executions[request.name]);
  if (capacity == 0) RT_CHECK_EQ(simulation.hits, int64_t{0});
  *resends += simulation.resends;
}

RT_TEST(members_execute_the_same_batches_in_the_same_order) {
  int64_t resends = 0;
  for (int size : kSizes)
    for (size_t capacity : {0, 1, 2, 5, 1024})
      for (size_t threshold : {0, 100, 1 << 20})
        for (uint64_t seed = 1; seed <= (size < 16 ? 12 : 2); ++seed) {
          const int before = check::Failures();
          RunSteps(size, seed, capacity, threshold, &resends);
          if (check::Failures() == before) continue;
          std::fprintf(stderr, "size %d seed %d capacity %d threshold %d\n", size, static_cast<int>(seed),
                       static_cast<int>(capacity), static_cast<int>(threshold));
          return;
        }
  RT_CHECK(resends > 0);  // else the simulation has lost its sharpness
}

RT_TEST(after_warm_up_only_ids_travel) {
  Simulation simulation(4, 7);
  const int names = 50;
  for (int step = 0; step < 3; ++step) {
    const int64_t misses = simulation.misses;
    for (int rank = 0; rank < 4; ++rank)
      for (int index = 0; index < names; ++index)
        simulation.Submit(rank, Allreduce(std::to_string((index * 7 + rank) % names)));
    simulation.Settle();
    RT_CHECK_EQ(simulation.misses - misses, int64_t{step == 0 ? 4 * names : 0});
  }
  RT_CHECK_EQ(simulation.hits, int64_t{2 * 4 * names});
}

RT_TEST(uncacheable_requests_stay_out_of_the_cache) {
  Simulation simulation(2, 1);
  Request request = Allreduce("once");
  request.cacheable = false;
  for (int step = 0; step < 2; ++step) {
    for (int rank = 0; rank < 2; ++rank) simulation.Submit(rank, request);
    simulation.Settle();
  }
  RT_CHECK_EQ(simulation.hits, int64_t{0});
}

RT_TEST(changed_request_is_matched_again) {
  Simulation simulation(2, 1);
  for (int64_t elements : {4, 4, 5, 5})
    for (int rank = 1; rank >= 0; --rank) {
      simulation.Submit(rank, Allreduce("x", elements));
      if (rank == 0) simulation.Settle();
    }
  RT_CHECK_EQ(Executions(simulation, 1, "x"), 4);
  RT_CHECK_EQ(simulation.outcomes(1)[3].response.request.tensors[0].shape[0], int64_t{5});
  RT_CHECK_EQ(simulation.hits, int64_t{4});
  // One rank says it with an id, the other in full.
  simulation.Submit(0, Allreduce("x", 5));
  simulation.Submit(1, Allreduce("x", 6));
  simulation.Settle();
  RT_CHECK_EQ(
      FailureOf(simulation, 0, "x").message(),
      std::string(
          "allreduce 'x': shape must be the same on all ranks, but is [5] on rank 10 and [6] on rank 11. Pad or slice "
          "to one shape; allgather and alltoall take rows of any number, but of one shape."));
}

// What others have for each other would make frames grow with the square of the ranks.
RT_TEST(each_hears_of_an_alltoall_what_concerns_itself) {
  constexpr int kRanks = 24;
  for (uint64_t seed = 1; seed < 4; ++seed) {
    Simulation simulation(kRanks, seed);
    // Rank 3 has the same in the last two rounds, and says so by an id where the others have something new.
    const auto rows = [](int round, int from, int to) {
      return int64_t{(from == 3 ? std::min(round, 1) : round) * 7 + from * 5 + to} % 30;
    };
    for (int round = 0; round < 3; ++round) {
      for (int rank = 0; rank < kRanks; ++rank) {
        Request request = Named(Operation::kAlltoall, "x");
        for (int to = 0; to < kRanks; ++to) request.splits.push_back(rows(round, rank, to));
        request.tensors = {{DType::kInt8, {std::accumulate(request.splits.begin(), request.splits.end(), int64_t{0})}}};
        simulation.Submit(rank, request);
      }
      simulation.Settle();
      for (int rank = 0; rank < kRanks; ++rank) {
        RT_REQUIRE_EQ(simulation.outcomes(rank).size(), static_cast<size_t>(round) + 1);
        const Response& response = simulation.outcomes(rank).back().response;
        RT_REQUIRE_EQ(response.rows.size(), size_t{kRanks + 1});
        for (int other = 0; other < kRanks; ++other) {
          RT_CHECK_EQ(response.request.splits[other], rows(round, rank, other));
          RT_CHECK_EQ(response.rows[other], rows(round, other, rank));
        }
      }
    }
    RT_CHECK_EQ(simulation.hits, int64_t{1});
    RT_CHECK(simulation.largest_frame < 4 * kRanks);
  }
}

// With room for two names, a batch may hold a new name, which evicts, and the cached one that it evicts.
RT_TEST(batch_survives_the_eviction_that_it_causes) {
  for (uint64_t seed = 1; seed < 20; ++seed) {
    NegotiatorOptions options;
    options.cache_capacity = 2;
    Simulation simulation(2, seed, options);
    for (const auto& names :
         {std::vector<std::string>{"a", "b"}, {"c", "a", "b"}, {"b", "d", "a"}, {"e", "c", "d", "a"}})
      for (int rank : {0, 1}) {
        for (const std::string& name : names) simulation.Submit(rank, Allreduce(name));
        if (rank == 1) simulation.Settle();
      }
    for (int rank : {0, 1}) RT_CHECK_EQ(Executions(simulation, rank, "a"), 4);
    CheckSameOrder(simulation);
  }
}

RT_TEST(nothing_is_sent_while_nothing_is_pending) {
  Simulation simulation(4, 3);
  for (int rank = 0; rank < 4; ++rank) simulation.Submit(rank, Allreduce("x"));
  simulation.Settle();
  const int64_t before = simulation.frames_sent;
  for (int second = 0; second < 1000; ++second) {
    simulation.now += kSecond;
    for (int rank = 0; rank < 4; ++rank) {
      simulation.Tick(rank);
      RT_CHECK_EQ(simulation.negotiator(rank).next_timer(), kNever);
    }
  }
  RT_CHECK_EQ(simulation.frames_sent, before);
}

RT_TEST(waiting_for_a_place_lets_operations_fuse) {
  Simulation simulation(1, 1);
  for (int index = 0; index < 3; ++index) {
    simulation.Submit(0, Allreduce("warm" + std::to_string(index)));
    simulation.Tick(0);
  }
  // Two batches are under way, so the third waits and is joined by what follows.
  RT_CHECK_EQ(simulation.outcomes(0).size(), size_t{2});
  for (int index = 0; index < 30; ++index) {
    simulation.Submit(0, Allreduce(std::to_string(index)));
    simulation.Tick(0);
  }
  RT_CHECK_EQ(simulation.outcomes(0).size(), size_t{2});
  simulation.Settle();
  RT_CHECK_EQ(simulation.largest_batch, size_t{31});
}

RT_TEST(duplicate_arrival_counts_once) {
  Simulation simulation(3, 1);
  Frame ready;
  ready.requests = {Allreduce("x"), Allreduce("x")};
  simulation.Feed(0, event::Arrived{1, ready});
  simulation.Feed(0, event::Arrived{1, ready});
  simulation.Submit(0, Allreduce("x"));
  simulation.Settle();
  RT_CHECK_EQ(simulation.outcomes(0).size(), size_t{0});
}

// ---- join ----

RT_TEST(last_joiner_is_returned_to_all) {
  Simulation simulation(3, 5);
  for (int round = 0; round < 2; ++round) {
    for (int rank : {2, 0, 1}) {
      simulation.Submit(rank, Named(Operation::kJoin, "join" + std::to_string(round)));
      simulation.Settle();
    }
    for (int rank = 0; rank < 3; ++rank) RT_CHECK_EQ(simulation.outcomes(rank).back().response.result, 11);
  }
}

// Ranks run out of data after different numbers of steps. Simulation::CheckContributors checks who is listed as joined.
RT_TEST(joined_ranks_are_listed_and_needed_no_more) {
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    const int before = check::Failures();
    const int size = kSizes[1 + seed % 4];
    NegotiatorOptions options;
    options.cache_capacity = seed % 3;
    Simulation simulation(size, seed, options);
    std::vector<int> steps(size);
    for (int epoch = 0; epoch < 2; ++epoch) {
      std::vector<std::deque<Action>> programs(size);
      int most = 0;
      for (int rank = 0; rank < size; ++rank) {
        const int mine = static_cast<int>(simulation.Below(4));
        most = std::max(most, mine);
        for (int step = 0; step < mine; ++step)
          for (int name = 0; name < 3; ++name)
            programs[rank].push_back({Allreduce("w" + std::to_string((name + rank) % 3)), ""});
        // Submitted when the names before are done, as the caller of join() has waited for them.
        programs[rank].push_back({Named(Operation::kJoin, "join"), ""});
      }
      for (int& total : steps) total += most;
      // The program of a joined rank goes on only when the join is done, because the next epoch's starts after this.
      RunPrograms(&simulation, std::move(programs));
    }
    CheckSameOrder(simulation);
    for (int rank = 0; rank < size; ++rank) {
      RT_CHECK_EQ(Executions(simulation, rank, "join"), 2);
      RT_CHECK_EQ(Executions(simulation, rank, "w0"), steps[rank]);
    }
    if (check::Failures() == before) continue;
    std::fprintf(stderr, "size %d seed %d\n", size, static_cast<int>(seed));
    return;
  }
}

// Rank 1 joins instead of submitting the "x" that rank 2 refuses, but the refusal arrives first. Found by the
// simulator.
RT_TEST(refusal_of_what_a_joined_rank_left_out_does_not_wait_for_it) {
  Simulation simulation(3, 1);
  simulation.Refuse(2, "x", "x is no good");
  simulation.Settle();
  for (int rank : {1, 0, 2}) simulation.Submit(rank, Named(Operation::kJoin, "join"));
  simulation.Settle();
  for (int rank : {0, 1, 2}) simulation.Submit(rank, Allreduce("x"));
  simulation.Settle();
  for (int rank : {0, 1, 2}) RT_CHECK_EQ(Executions(simulation, rank, "x"), 1);
}

RT_TEST(joined_root_cannot_broadcast) {
  Simulation simulation(2, 1);
  simulation.Submit(1, Named(Operation::kJoin, "join"));
  simulation.Settle();
  Request broadcast = Named(Operation::kBroadcast, "b");
  broadcast.root = 11;
  simulation.Submit(0, broadcast);
  simulation.Settle();
  RT_CHECK_EQ(FailureOf(simulation, 0, "b").message(),
              std::string("broadcast 'b': root 11 has joined and has nothing to send. Choose "
                          "a root that still takes part."));
}

RT_TEST(join_fails_when_a_rank_leaves_without_it) {
  for (int leaver : {0, 1}) {
    Simulation simulation(3, 1);
    for (int rank = 0; rank < 3; ++rank)
      if (rank != leaver) simulation.Submit(rank, Named(Operation::kJoin, "join"));
    simulation.Settle();
    simulation.Leave(leaver);
    simulation.Settle();
    for (int rank = 0; rank < 3; ++rank)
      if (rank != leaver) RT_CHECK_EQ(FailureOf(simulation, rank, "join").code(), StatusCode::kClosed);
  }
}

// ---- refusals ----

RT_TEST(refusal_reaches_peers_early_and_late) {
  Simulation simulation(3, 1);
  simulation.Submit(0, Allreduce("x"));  // before the refusal
  simulation.Settle();
  simulation.Refuse(1, "x", "x is no good");
  simulation.Submit(1, Allreduce("x"));  // the refusing rank tries again at once
  simulation.Settle();
  RT_CHECK_EQ(FailureOf(simulation, 0, "x").message(), std::string("x is no good"));
  simulation.Submit(0, Allreduce("x"));
  simulation.Settle();
  simulation.Submit(2, Allreduce("x"));  // after it
  simulation.Settle();
  RT_CHECK_EQ(FailureOf(simulation, 2, "x").message(), std::string("x is no good"));
  simulation.Submit(2, Allreduce("x"));
  simulation.Settle();
  for (int rank = 0; rank < 3; ++rank) RT_CHECK_EQ(Executions(simulation, rank, "x"), 1);
}

RT_TEST(refused_by_all_leaves_nothing_behind) {
  Simulation simulation(4, 1);
  for (int rank = 0; rank < 4; ++rank) simulation.Refuse(rank, "x", "root 99");
  simulation.Settle();
  for (int rank = 0; rank < 4; ++rank) simulation.Submit(rank, Allreduce("x"));
  simulation.Settle();
  for (int rank = 0; rank < 4; ++rank) RT_CHECK_EQ(Executions(simulation, rank, "x"), 1);
}

// Every rank takes part in every round of every name, by a submission or by a refusal. A round that any rank refused
// fails on all others with one text, the others execute. Returns how many batches ran by a schedule.
int64_t RunRounds(uint64_t seeds, int rounds, size_t one_refused_in, bool schedules) {
  int64_t scheduled = 0;
  for (uint64_t seed = 1; seed <= seeds; ++seed) {
    const int before = check::Failures();
    const int size = kSizes[1 + seed % 4];
    NegotiatorOptions options;
    options.cache_capacity = schedules ? 1024 : seed % 4;
    options.schedules = schedules;
    Simulation simulation(size, seed, options);
    std::vector<std::deque<Action>> programs(size);
    std::map<std::string, std::vector<bool>> refused;  // by name and round
    for (int round = 0; round < rounds; ++round)
      for (const std::string name : {"x", "y"}) {
        const bool refuse = simulation.Below(one_refused_in) == 0;
        bool any = false;
        for (int rank = 0; rank < size; ++rank) {
          const bool refuses = refuse && simulation.Below(2) == 0;
          any |= refuses;
          programs[rank].push_back(
              {Allreduce(name), refuses ? std::to_string(round) + " by " + std::to_string(rank) : ""});
        }
        refused[name].push_back(any);
      }
    std::vector<std::map<std::string, std::vector<bool>>> submits(size);
    for (int rank = 0; rank < size; ++rank)
      for (const Action& action : programs[rank]) submits[rank][action.request.name].push_back(action.refusal.empty());
    RunPrograms(&simulation, std::move(programs));
    CheckSameOrder(simulation);
    for (const std::string name : {"x", "y"}) {
      std::vector<std::set<std::string>> texts(rounds);
      for (int rank = 0; rank < size; ++rank) {
        std::vector<Outcome> told;
        for (const Outcome& outcome : simulation.outcomes(rank))
          if (outcome.name == name) told.push_back(outcome);
        size_t next = 0;
        for (int round = 0; round < rounds; ++round) {
          if (!submits[rank][name][round]) continue;
          if (next >= told.size()) break;
          const Outcome& outcome = told[next++];
          RT_CHECK_EQ(outcome.executed, !refused[name][round]);
          if (!outcome.executed) texts[round].insert(outcome.status.message());
        }
        RT_CHECK_EQ(next, told.size());
      }
      for (int round = 0; round < rounds; ++round) {
        RT_CHECK(texts[round].size() <= 1);
        for (const std::string& text : texts[round]) RT_CHECK_EQ(text.find(std::to_string(round) + " "), size_t{0});
      }
    }
    scheduled += simulation.scheduled;
    if (check::Failures() == before) continue;
    std::fprintf(stderr, "size %d seed %d\n", size, static_cast<int>(seed));
    return 0;
  }
  return scheduled;
}

RT_TEST(rounds_with_and_without_refusals) { RunRounds(150, 6, 2, false); }

// Some of the refusals are on their way when the schedule begins.
RT_TEST(rounds_by_a_schedule_with_and_without_refusals) {
  RT_CHECK(RunRounds(check::Rounds(150), 40, 12, true) > 1000);
}

// ---- schedules ----

RT_TEST(a_loop_comes_to_run_without_frames) {
  NegotiatorOptions options;
  options.schedules = true;
  Simulation simulation(4, 3, options);
  const auto run = [&](int steps) {
    for (; steps > 0; --steps) {
      for (int rank = 0; rank < 4; ++rank)
        for (const char* name : {"a", "b"}) simulation.Submit(rank, Allreduce(name));
      simulation.Settle();
    }
  };
  run(6);
  const int64_t frames = simulation.frames_sent, rings = simulation.rings, scheduled = simulation.scheduled;
  run(10);
  RT_CHECK_EQ(simulation.frames_sent, frames);
  RT_CHECK(simulation.scheduled - scheduled >= 10 * 4);
  RT_CHECK_EQ((simulation.rings - rings) * 4,
              simulation.scheduled - scheduled);  // one for each batch: the last to promise
  for (int rank = 0; rank < 4; ++rank) RT_CHECK_EQ(Executions(simulation, rank, "b"), 16);
  RT_CHECK_EQ(simulation.hits + simulation.misses, int64_t{16 * 2 * 4});
  CheckSameOrder(simulation);
}

// A schedule that ends at once is tried again after twice the steps.
RT_TEST(a_refusal_that_was_heard_ends_no_schedule) {
  const auto steps_by_verdicts = [](bool refuses) {
    NegotiatorOptions options;
    options.schedules = true;
    Simulation simulation(3, 5, options);
    if (refuses) {
      simulation.Submit(0, Allreduce("odd"));
      simulation.Submit(2, Allreduce("odd"));
      simulation.Refuse(1, "odd", "not this one");
      simulation.Settle();
    }
    int steps = 0;
    for (; simulation.scheduled < 3 * 20 && steps < 200; ++steps) {
      for (const char* name : {"a", "b"})
        for (int rank = 0; rank < 3; ++rank) simulation.Submit(rank, Allreduce(name));
      simulation.Settle();
    }
    return steps;
  };
  RT_CHECK_EQ(steps_by_verdicts(true), steps_by_verdicts(false));
}

RT_TEST(what_a_schedule_ends_with_is_what_all_have_promised) {
  for (uint64_t seed = 1; seed <= 30; ++seed) {
    NegotiatorOptions options;
    options.schedules = true;
    Simulation simulation(3, seed, options);
    for (int step = 0; step < 8; ++step) {
      for (int rank = 0; rank < 3; ++rank) simulation.Submit(rank, Allreduce("a"));
      simulation.Settle();
    }
    RT_CHECK(simulation.scheduled > 0);
    // Two have promised when each of the three comes to something else.
    simulation.Submit(0, Allreduce("a"));
    simulation.Submit(1, Allreduce("a"));
    for (int rank = 0; rank < 3; ++rank) simulation.Submit(rank, Allreduce("other"));
    simulation.Settle();
    for (int rank = 0; rank < 3; ++rank) RT_CHECK_EQ(Executions(simulation, rank, "other"), 1);
    RT_CHECK_EQ(Executions(simulation, 0, "a"), 8);
    simulation.Submit(2, Allreduce("a"));
    simulation.Settle();
    for (int rank = 0; rank < 3; ++rank) RT_CHECK_EQ(Executions(simulation, rank, "a"), 9);
    CheckSameOrder(simulation);
  }
}

// ---- mismatches ----

RT_TEST(each_mismatch_is_told_to_all_in_the_same_words) {
  struct Case {
    Request usual, odd;
    std::string text;
  };
  std::vector<Case> cases;
  auto add = [&](Request usual, Request odd, const std::string& text) { cases.push_back({usual, odd, text}); };
  Request x = Allreduce("x"), odd = x;
  odd.operation = Operation::kReducescatter;
  add(x, odd,
      "operation must be the same on all ranks, but is allreduce on ranks 10, 12 and reducescatter on rank 11. ");
  odd = x, odd.tensors.push_back(x.tensors[0]);
  add(x, odd, "number of tensors must be the same on all ranks, but is 1 on ranks 10, 12 and 2 on rank 11. ");
  odd = x, odd.tensors[0].dtype = DType::kFloat64;
  add(x, odd, "dtype must be the same on all ranks, but is float32 on ranks 10, 12 and float64 on rank 11. ");
  odd = x, odd.tensors[0].shape = {2, 2};
  add(x, odd, "shape must be the same on all ranks, but is [4] on ranks 10, 12 and [2, 2] on rank 11. ");
  odd = x, odd.reduction = Reduction::kMin;
  add(x, odd, "reduction must be the same on all ranks, but is sum on ranks 10, 12 and min on rank 11. ");
  odd = x, odd.prescale = 0.5;
  add(x, odd, "prescale factor must be the same on all ranks, but is 1 on ranks 10, 12 and 0.5 on rank 11. ");
  odd = x, odd.compression = Compression::kBFloat16;
  add(x, odd, "compression must be the same on all ranks, but is none on ranks 10, 12 and bfloat16 on rank 11. ");
  odd = x, odd.postscale = 2;
  add(x, odd, "postscale factor must be the same on all ranks, but is 1 on ranks 10, 12 and 2 on rank 11. ");
  odd = x, odd.device = 3;
  add(x, odd, "device must be the same on all ranks, but is host on ranks 10, 12 and CUDA on rank 11. ");
  Request broadcast = x;
  broadcast.operation = Operation::kBroadcast;
  broadcast.root = 10;
  odd = broadcast, odd.root = 12;
  add(broadcast, odd, "root must be the same on all ranks, but is 10 on ranks 10, 12 and 12 on rank 11. ");
  Request gather = x;
  gather.operation = Operation::kAllgather;
  gather.tensors[0].shape = {1, 3};
  odd = gather, odd.tensors[0].shape = {5, 4};
  add(gather, odd, "shape must be the same on all ranks, but is [*, 3] on ranks 10, 12 and [*, 4] on rank 11. ");
  Request set = Named(Operation::kAddProcessSet, "x");
  set.splits = {10, 11};
  odd = set, odd.splits = {10, 12};
  add(set, odd, "list must be the same on all ranks, but is [10, 11] on ranks 10, 12 and [10, 12] on rank 11. ");

  for (const Case& each : cases) {
    Simulation simulation(3, 11);
    for (int rank : {1, 2, 0}) {
      simulation.Submit(rank, rank == 1 ? each.odd : each.usual);
      simulation.Settle();
    }
    const Status status = FailureOf(simulation, 0, "x");
    RT_CHECK_EQ(status.code(), StatusCode::kMismatch);
    const std::string expected = each.usual.Subject() + ": " + each.text;
    RT_CHECK_EQ(status.message().substr(0, expected.size()), expected);
    for (int rank : {1, 2}) RT_CHECK_EQ(FailureOf(simulation, rank, "x").message(), status.message());
    // The name is free again.
    for (int rank : {1, 2, 0}) simulation.Submit(rank, each.usual);
    simulation.Settle();
    for (int rank : {1, 2, 0}) RT_CHECK_EQ(Executions(simulation, rank, "x"), 1);
  }
}

// ---- shutdown ----

RT_TEST(leaving_without_submitting_fails_the_others) {
  for (int leaver : {0, 1, 2}) {
    Simulation simulation(3, 1);
    simulation.Submit((leaver + 1) % 3, Allreduce("early"));
    simulation.Settle();
    simulation.Leave(leaver);
    simulation.Settle();
    RT_CHECK(simulation.Idle((leaver + 1) % 3));  // at once, though the third has not come
    simulation.Submit((leaver + 1) % 3, Allreduce("late"));
    simulation.Submit((leaver + 2) % 3, Allreduce("early"));
    simulation.Submit((leaver + 2) % 3, Allreduce("late"));
    simulation.Settle();
    for (int rank = 0; rank < 3; ++rank) {
      if (rank == leaver) continue;
      for (const std::string name : {"early", "late"}) {
        const Status status = FailureOf(simulation, rank, name);
        RT_CHECK_EQ(status.code(), StatusCode::kClosed);
        RT_CHECK(status.message().find("rank " + std::to_string(10 + leaver) + " called shutdown()") !=
                     std::string::npos ||
                 status.message().find("rank " + std::to_string(10 + leaver) + " has called shutdown()") !=
                     std::string::npos);
      }
      RT_CHECK(simulation.Idle(rank));
    }
  }
}

// What a rank submitted before it left still runs, on all members or on none.
RT_TEST(leaving_after_submitting_keeps_the_operation) {
  for (int leaver : {0, 1, 2})
    for (uint64_t seed = 1; seed < 30; ++seed) {
      Simulation simulation(3, seed);
      simulation.Submit(leaver, Allreduce("x"));
      simulation.Submit((leaver + 1) % 3, Allreduce("x"));
      if (seed % 2 == 0) simulation.Tick((leaver + 1) % 3);
      simulation.Leave(leaver);
      for (size_t moves = seed % 5; moves > 0; --moves) simulation.Move();
      simulation.Submit((leaver + 2) % 3, Allreduce("x"));
      simulation.Settle();
      for (int rank = 0; rank < 3; ++rank) {
        RT_CHECK_EQ(Executions(simulation, rank, "x"), Executions(simulation, 0, "x"));
        RT_CHECK(simulation.Idle(rank));
      }
    }
}

// What it submitted last travels as an id that the coordinator has evicted, and is asked for again. Found by the
// simulator.
RT_TEST(goodbye_waits_for_what_is_asked_for_again) {
  NegotiatorOptions options;
  options.cache_capacity = 1;
  Simulation simulation(2, 1, options);
  for (int rank : {0, 1}) simulation.Submit(rank, Allreduce("a"));
  simulation.Settle();
  for (int rank : {0, 1}) simulation.Submit(rank, Allreduce("b"));
  simulation.Tick(1);
  simulation.Submit(1, Allreduce("a"));
  simulation.Leave(1);
  simulation.Submit(0, Allreduce("a"));
  simulation.Settle();
  RT_CHECK_EQ(simulation.resends, int64_t{1});
  for (int rank : {0, 1}) RT_CHECK_EQ(Executions(simulation, rank, "a"), 2);
}

// The others come when it has stopped serving. It took part in nothing that is under way. Found by the simulator.
RT_TEST(what_a_rank_left_behind_fails_when_it_is_gone) {
  for (bool others_wait : {false, true}) {
    Simulation simulation(3, 1);
    simulation.Submit(2, Allreduce("x"));
    if (others_wait) simulation.Submit(1, Allreduce("x"));
    simulation.Settle();
    simulation.Leave(2);
    simulation.Leave(2, true);
    simulation.Settle();
    if (!others_wait) simulation.Submit(1, Allreduce("x"));
    simulation.Submit(0, Allreduce("x"));
    simulation.Settle();
    for (int rank : {0, 1}) {
      RT_CHECK_EQ(FailureOf(simulation, rank, "x").code(), StatusCode::kClosed);
      RT_CHECK(simulation.Idle(rank));
    }
  }
}

// ---- stalls ----

NegotiatorOptions StallOptions(Nanoseconds warning, Nanoseconds abort) {
  NegotiatorOptions options;
  options.stall_warning = warning;
  options.stall_abort = abort;
  return options;
}

RT_TEST(stall_is_reported_with_doubling_patience) {
  Simulation simulation(4, 1, StallOptions(30 * kSecond, kNever));
  const Nanoseconds start = simulation.now;
  for (int rank : {0, 3}) {
    simulation.Submit(rank, Allreduce("x"));
    simulation.Settle();
  }
  RT_CHECK_EQ(simulation.negotiator(0).next_timer(), start + 30 * kSecond);
  std::vector<int> reported;
  for (int second = 1; second <= 500; ++second) {
    simulation.now = start + second * kSecond;
    const size_t before = simulation.warnings(0).size();
    simulation.Tick(0);
    if (simulation.warnings(0).size() > before) reported.push_back(second);
  }
  RT_CHECK(reported == (std::vector<int>{30, 60, 120, 240, 480}));
  RT_CHECK_EQ(simulation.warnings(0)[0],
              std::string("allreduce 'x': waiting 30 s: submitted by ranks 10, 13; missing ranks 11, 12. A "
                          "branch, the number of batches or the set of gradients may differ between ranks. It will not "
                          "be given up (RINGTRAIN_STALL_ABORT_SECONDS=0)."));
  for (int rank : {1, 2}) simulation.Submit(rank, Allreduce("x"));
  simulation.Settle();
  for (int rank = 0; rank < 4; ++rank) RT_CHECK_EQ(Executions(simulation, rank, "x"), 1);
}

RT_TEST(stall_fails_at_the_limit_and_late_ranks_hear_of_it) {
  Simulation simulation(3, 1, StallOptions(30 * kSecond, 100 * kSecond));
  const Nanoseconds start = simulation.now;
  for (int rank : {0, 1}) simulation.Submit(rank, Allreduce("x"));
  simulation.Settle();
  simulation.now = start + 99 * kSecond;
  simulation.Tick(0);
  RT_CHECK(simulation.InFlight(0, "x"));
  RT_CHECK(simulation.warnings(0).back().find("It will fail after 100 s") != std::string::npos);
  simulation.now = start + 100 * kSecond;
  simulation.Settle();
  const Status status = FailureOf(simulation, 0, "x");
  RT_CHECK_EQ(status.code(), StatusCode::kTimeout);
  RT_CHECK_EQ(
      status.message(),
      std::string("allreduce 'x': waiting 100 s: submitted by ranks 10, 11; missing rank 12. A branch, the "
                  "number of batches or the set of gradients may differ between ranks. It was given up after 100 s "
                  "(RINGTRAIN_STALL_ABORT_SECONDS; long_phase() "
                  "on the busy rank extends it)."));
  RT_CHECK_EQ(FailureOf(simulation, 1, "x").message(), status.message());
  simulation.Submit(2, Allreduce("x"));
  simulation.Settle();
  RT_CHECK_EQ(FailureOf(simulation, 2, "x").message(), status.message());
  for (int rank : {0, 1, 2}) simulation.Submit(rank, Allreduce("x"));
  simulation.Settle();
  for (int rank : {0, 1, 2}) RT_CHECK_EQ(Executions(simulation, rank, "x"), 1);
}

// Each is the other's missing part, and both are told, so that one sees the name that was meant.
RT_TEST(different_names_are_both_reported) {
  Simulation simulation(3, 1, StallOptions(30 * kSecond, 100 * kSecond));
  simulation.Submit(0, Allreduce("gradient.0"));
  simulation.Submit(1, Allreduce("gradient.1"));
  simulation.Submit(2, Allreduce("gradient.0"));
  simulation.Settle();
  simulation.now += 30 * kSecond;
  simulation.Tick(0);
  const std::vector<std::string> texts = simulation.warnings(0);
  RT_REQUIRE(texts.size() == 2);
  RT_CHECK(texts[0].find("allreduce 'gradient.0': waiting 30 s: submitted by ranks 10, 12; missing rank 11.") == 0);
  RT_CHECK(texts[1].find("allreduce 'gradient.1': waiting 30 s: submitted by rank 11; missing ranks 10, 12.") == 0);
}

// Where they wait for each other the most are right, or the side of the lowest rank; others have no reason to evict
// them.
RT_TEST(who_waits_for_more_that_wait_for_it_blames_nobody) {
  struct Row {
    int size;
    std::set<int> another_way;  // the others submit x
    bool blames;                // whether who goes another way blames the others, and not they it
  };
  for (const Row& row : {Row{3, {1}, false}, Row{3, {0}, false}, Row{3, {0, 1}, true}, Row{2, {1}, false},
                         Row{2, {0}, true}, Row{4, {1, 2}, false}, Row{4, {0, 3}, true}}) {
    for (bool first : {false, true}) {  // it comes to its limit before the others
      Simulation simulation(row.size, 1, StallOptions(30 * kSecond, 100 * kSecond));
      for (bool now : {true, false}) {
        for (int rank = 0; rank < row.size; ++rank) {
          const bool is_other = row.another_way.count(rank) > 0;
          if ((is_other == first) == now) simulation.Submit(rank, Allreduce(is_other ? "of some" : "x"));
        }
        simulation.Settle();
        simulation.now += kSecond;
      }
      simulation.now += 98 * kSecond;
      simulation.Settle();
      simulation.now += kSecond;
      simulation.Settle();
      for (int rank = 0; rank < row.size; ++rank) {
        std::vector<int> missing;
        const bool is_other = row.another_way.count(rank) > 0;
        for (int other = 0; other < row.size && is_other == row.blames; ++other)
          if ((row.another_way.count(other) > 0) != is_other) missing.push_back(10 + other);
        RT_REQUIRE(simulation.outcomes(rank).size() == 1);
        RT_CHECK_EQ(simulation.outcomes(rank)[0].status.code(), StatusCode::kTimeout);
        RT_CHECK(simulation.outcomes(rank)[0].missing == missing);
      }
    }
  }
}

// Who goes on after the error waits for those no longer.
RT_TEST(a_rank_that_has_gone_on_since_may_be_blamed) {
  Simulation simulation(3, 1, StallOptions(30 * kSecond, 100 * kSecond));
  for (int rank : {0, 2}) simulation.Submit(rank, Allreduce("x"));
  simulation.Settle();
  simulation.now += kSecond;
  simulation.Submit(1, Allreduce("y"));
  simulation.Settle();
  simulation.now += 99 * kSecond;
  simulation.Settle();
  for (int rank : {0, 2}) simulation.Submit(rank, Allreduce("z"));
  simulation.Settle();
  simulation.Submit(1, Allreduce("z"));
  simulation.Settle();
  simulation.now += kSecond;
  simulation.Settle();
  RT_CHECK(simulation.outcomes(1).back().missing == (std::vector<int>{10, 12}));
}

// Warnings and the limit wait for a member in a long phase, and for it alone; both begin anew when it is back.
RT_TEST(a_long_phase_is_waited_for) {
  for (int busy : {0, 2}) {
    Simulation simulation(3, 1, StallOptions(30 * kSecond, 100 * kSecond));
    const Nanoseconds start = simulation.now;
    auto wait_until = [&](int second) {
      simulation.now = start + second * kSecond;
      simulation.Settle();
    };
    simulation.LongPhase(busy, 1000 * kSecond);
    for (int rank : {0, 1, 2})
      if (rank != busy) simulation.Submit(rank, Allreduce("x"));
    simulation.Submit(busy, Allreduce("y"));
    wait_until(0);
    RT_CHECK_EQ(simulation.negotiator(0).next_timer(), start + 30 * kSecond);  // y misses others
    wait_until(101);
    RT_CHECK_EQ(FailureOf(simulation, busy, "y").code(), StatusCode::kTimeout);
    RT_CHECK_EQ(simulation.warnings(0).size(), size_t{0});  // y failed before it was looked at
    wait_until(500);
    RT_CHECK(simulation.InFlight(1, "x"));
    RT_CHECK_EQ(simulation.negotiator(0).next_timer(), start + 1030 * kSecond);
    simulation.LongPhase(busy, 0);
    wait_until(500);
    wait_until(529);
    RT_CHECK_EQ(simulation.warnings(0).size(), size_t{0});
    wait_until(530);
    RT_CHECK_EQ(simulation.warnings(0).size(), size_t{1});
    RT_CHECK(simulation.warnings(0)[0].find("It will fail after 600 s") != std::string::npos);
    wait_until(599);
    RT_CHECK(simulation.InFlight(1, "x"));
    wait_until(600);
    RT_CHECK_EQ(FailureOf(simulation, 1, "x").code(), StatusCode::kTimeout);
  }
}

RT_TEST(progress_elsewhere_does_not_silence_a_stall) {
  Simulation simulation(2, 1, StallOptions(10 * kSecond, 50 * kSecond));
  simulation.Submit(1, Allreduce("stuck"));
  for (int second = 0; second < 60; ++second) {
    for (int rank : {0, 1}) simulation.Submit(rank, Allreduce("x"));
    simulation.Settle();
    simulation.now += kSecond;
  }
  RT_CHECK_EQ(FailureOf(simulation, 1, "stuck").code(), StatusCode::kTimeout);
  RT_CHECK_EQ(Executions(simulation, 0, "x"), 60);
}

}  // namespace
}  // namespace ringtrain
