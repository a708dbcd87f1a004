// Draws a plan from a seed. A plan is a sequence of episodes: rounds of ordinary operations, ranks that run out of data
// and join, process sets that come and go, ranks that are late. Within them names repeat, orders differ from rank to
// rank, and some operations are wrong in one of the ways that users get them wrong.
#include <algorithm>

#include "faults.h"
#include "plan.h"
#include "random.h"

namespace ringtrain {
namespace simulation {
namespace {

constexpr int kMaxAlltoall = 64;                 // ranks: its verdict has a number for each pair
constexpr Nanoseconds kWhenGone = 20 * kSecond;  // by then ranks that left have stopped serving
constexpr int kSteadySteps = 14;
constexpr int kLargeWorld = 64;  // from here on plans are shorter

std::string ShapeText(const Request& request) {
  const bool any_rows = request.operation == Operation::kAllgather || request.operation == Operation::kAlltoall;
  std::string text = "[";
  for (size_t i = 0; i < request.tensors[0].shape.size(); ++i)
    text += (i > 0 ? ", " : "") + (i == 0 && any_rows ? "*" : std::to_string(request.tensors[0].shape[i]));
  return text + "]";
}

// An attribute in which ranks may differ: changes a request in the `variant`-th way, 0 being none, and says what the
// error shows.
struct Difference {
  const char* attribute;
  bool (*possible)(const Request&);
  std::string (*apply)(int variant, const std::vector<int>& members, Request*);
};

const std::vector<Difference>& Differences() {
  static const std::vector<Difference> differences = {
      {"operation", [](const Request& r) { return r.operation == Operation::kAllreduce && r.tensors.size() == 1; },
       [](int variant, const std::vector<int>&, Request* request) {
         const Operation operations[] = {Operation::kAllreduce, Operation::kReducescatter, Operation::kAllgather};
         request->operation = operations[variant];
         return std::string(Text(request->operation));
       }},
      {"number of tensors", [](const Request& r) { return Find(r.operation)->reduces; },
       [](int variant, const std::vector<int>&, Request* request) {
         for (; variant > 0; --variant) request->tensors.push_back(request->tensors[0]);
         return std::to_string(request->tensors.size());
       }},
      {"dtype", [](const Request& r) { return r.tensors.size() == 1; },
       [](int variant, const std::vector<int>&, Request* request) {
         const DType dtypes[] = {request->tensors[0].dtype, DType::kFloat64, DType::kInt16};
         request->tensors[0].dtype = dtypes[variant];
         return std::string(Text(dtypes[variant]));
       }},
      {"shape", [](const Request& r) { return r.tensors.size() == 1; },
       [](int variant, const std::vector<int>&, Request* request) {
         for (; variant > 0; --variant) request->tensors[0].shape.push_back(3);
         return ShapeText(*request);
       }},
      {"reduction", [](const Request& r) { return Find(r.operation)->reduces; },
       [](int variant, const std::vector<int>&, Request* request) {
         const Reduction reductions[] = {request->reduction, Reduction::kMin, Reduction::kProduct};
         request->reduction = reductions[variant];
         return std::string(Text(request->reduction));
       }},
      {"prescale factor", [](const Request& r) { return Find(r.operation)->reduces; },
       [](int variant, const std::vector<int>&, Request* request) {
         request->prescale = 1 << variant;
         return std::to_string(1 << variant);
       }},
      {"root", [](const Request& r) { return r.operation == Operation::kBroadcast; },
       [](int variant, const std::vector<int>& members, Request* request) {
         request->root = members[variant % members.size()];
         return std::to_string(request->root);
       }},
  };
  return differences;
}

class Generator {
 public:
  Generator(uint64_t seed, int size) : random_({seed, 1}), long_phases_({seed, 11}), steady_({seed, 14}) {
    plan_.seed = seed;
    const int drawn =
        random_.OneIn(8) ? 9 + static_cast<int>(random_.Below(24)) : 2 + static_cast<int>(random_.Below(7));
    if (size == 0) size = drawn;
    const int first = random_.OneIn(2) ? 0 : 10;  // global ranks are not places among the members
    for (int rank = 0; rank < size; ++rank) plan_.ranks.push_back(first + rank);
    large_ = size > kLargeWorld;
    plan_.sets[0] = plan_.ranks;
    live_sets_ = {0};
  }

  Plan Draw() {
    DrawOptions();
    for (int episodes = large_ ? 3 : 3 + static_cast<int>(random_.Below(6)); episodes > 0; --episodes) DrawEpisode();
    const bool some_leave = random_.OneIn(3);
    if (!large_) DrawSteady(some_leave);
    if (some_leave) DrawLeaving();
    DrawFaults();
    DrawHosts(&plan_);
    DrawLastingFault(&plan_);
    DrawLoss(&plan_);
    DrawUncaught(&plan_);
    return std::move(plan_);
  }

 private:
  void DrawOptions() {
    plan_.options.cache_capacity = random_.Pick(std::vector<int64_t>{0, 1, 2, 3, 5, 1024, 1024, 1024});
    plan_.options.fusion_threshold_bytes = random_.Pick(std::vector<int64_t>{0, 64, 400, 64 << 20});
    plan_.options.stall_warning_seconds = 30;
    plan_.options.stall_abort_seconds = 600;
    plan_.link_delay = random_.Pick(std::vector<Nanoseconds>{0, kMillisecond, 20 * kMillisecond});
    plan_.step_delay = random_.Pick(std::vector<Nanoseconds>{0, kMillisecond, 5 * kMillisecond});
    plan_.program_delay = random_.Pick(std::vector<Nanoseconds>{0, kMillisecond, 20 * kMillisecond});
    plan_.batch_delay = random_.Pick(std::vector<Nanoseconds>{0, 2 * kMillisecond, 30 * kMillisecond});
    names_ = 1 + static_cast<int>(random_.Below(6));
  }

  void DrawEpisode() {
    switch (random_.Below(10)) {
      case 0:
      case 1:
        return DrawJoin();
      case 2:
      case 3:
        return DrawAddSet();
      case 4:
        return DrawRemoveSet();
      case 5:
        return DrawLateness();
      default:
        for (uint64_t rounds = 1 + random_.Below(4); rounds > 0; --rounds) DrawRound(true);
    }
  }

  // ---- operations ----

  // The request of a name, the same for the whole plan but for a rare change of the model.
  Request& Model(int set, const std::string& name) {
    auto found = models_.find({set, name});
    if (found != models_.end() && !random_.OneIn(10)) return found->second;
    Request request;
    request.name = name;
    request.tensors = {
        {random_.OneIn(4) ? DType::kFloat16 : DType::kFloat32, {static_cast<int64_t>(random_.Below(20))}}};
    request.cacheable = !random_.OneIn(10);
    switch (random_.Below(11)) {
      case 0:
        request.operation = Operation::kAllgather;
        request.tensors[0].shape.push_back(3);
        break;
      case 1:
        request.operation = Operation::kBroadcast;
        request.root = random_.Pick(plan_.sets[set]);
        break;
      case 2:
        request.operation = Operation::kReducescatter;
        break;
      case 3:
        request.tensors.push_back({request.tensors[0].dtype, {7}});  // a group
        break;
      case 4:
        request.reduction = Reduction::kMax;
        break;
      case 5:
        if (plan_.ranks.size() <= kMaxAlltoall) request.operation = Operation::kAlltoall;
        break;
      case 6:
        request.reduction = Reduction::kAverage;
        request.weight = 1 + static_cast<int64_t>(random_.Below(2));
        break;
      case 7:
        request.compression = Compression::kFloat16;
        break;
      case 8:
        request.operation = Operation::kBarrier;
        request.tensors.clear();
        break;
      default:
        break;
    }
    return models_[{set, name}] = request;
  }

  // What this rank submits: rows, splits and weights are its own.
  Request RequestFor(int rank, const Request& model, const std::vector<int>& members) {
    Request request = model;
    if (request.operation == Operation::kAllgather) request.tensors[0].shape[0] = rank % 4;
    if (request.weight != Request::kNoCount) request.weight *= 1 + rank % 3;
    if (request.operation != Operation::kAlltoall) return request;
    for (size_t to = 0; to < members.size(); ++to) request.splits.push_back((rank + static_cast<int>(to)) % 3);
    request.tensors[0].shape[0] = 0;
    for (int64_t rows : request.splits) request.tensors[0].shape[0] += rows;
    return request;
  }

  Turn MakeTurn(int set, const std::string& name, int round) {
    Turn turn;
    turn.number = static_cast<int>(plan_.turns.size());
    turn.set = set;
    turn.name = name;
    if (set > 0) turn.needs.push_back(made_by_[set]);
    for (int rank : plan_.sets[set]) turn.parts[rank].round = round;
    return turn;
  }

  Turn MakeDataTurn(int set, const std::string& name) {
    Turn turn = MakeTurn(set, name, round_);
    const Request model = Model(set, name);
    for (auto& part : turn.parts) part.second.request = RequestFor(part.first, model, plan_.sets[set]);
    return turn;
  }

  Turn MakeControlTurn(Operation operation, int set, const std::string& name, const std::vector<int64_t>& list) {
    Turn turn = MakeTurn(set, name, round_);
    for (auto& part : turn.parts) {
      part.second.request.name = name;
      part.second.request.operation = operation;
      part.second.request.splits = list;
    }
    return turn;
  }

  void Add(Turn turn) {
    if (!turn.ranks_that(Act::kSubmits).empty()) plan_.turns.push_back(std::move(turn));
  }

  // ---- what goes wrong with them ----

  void MakeDiffer(Turn* turn) {
    const std::vector<int> submitters = turn->ranks_that(Act::kSubmits);
    std::vector<Difference> possible;
    for (const Difference& difference : Differences())
      if (difference.possible(turn->request())) possible.push_back(difference);
    if (possible.empty() || submitters.size() < 2) return;
    const Difference& difference = random_.Pick(possible);
    turn->differs = difference.attribute;
    const std::vector<int> odd = random_.Some(submitters);
    const int variants = random_.OneIn(2) ? 1 : 2;
    for (int rank : submitters) {
      Part& part = turn->parts[rank];
      const bool is_odd = std::find(odd.begin(), odd.end(), rank) != odd.end();
      const int variant = is_odd ? 1 + static_cast<int>(random_.Below(variants)) : 0;
      part.value = difference.apply(variant, plan_.sets[turn->set], &part.request);
    }
  }

  void MakeRefused(Turn* turn) {
    for (int rank : random_.Some(turn->ranks_that(Act::kSubmits))) {
      Part& part = turn->parts[rank];
      part.act = Act::kRefuses;
      part.refusal = "refusal " + std::to_string(turn->number) + " by rank " + std::to_string(rank);
    }
  }

  void MayGoWrong(Turn* turn) {
    switch (random_.Below(8)) {
      case 0:
        return MakeDiffer(turn);
      case 1:
        return MakeRefused(turn);
      default:
        return;
    }
  }

  // ---- episodes ----

  // Some names of every live set.
  void DrawRound(bool may_go_wrong) {
    for (int set : live_sets_)
      for (int name = 0; name < names_; ++name) {
        if (random_.OneIn(3)) continue;
        Turn turn = MakeDataTurn(set, "w" + std::to_string(name));
        if (may_go_wrong) MayGoWrong(&turn);
        Add(std::move(turn));
      }
    ++round_;
  }

  // Ranks of one set run out of data after different numbers of rounds.
  void DrawJoin() {
    const int set = random_.Pick(live_sets_), first = round_;
    Turn join = MakeControlTurn(Operation::kJoin, set, random_.OneIn(2) ? "join" : "join" + std::to_string(round_), {});
    int last = first;
    for (auto& part : join.parts) {
      part.second.round = first + static_cast<int>(random_.Below(4));
      last = std::max(last, part.second.round);
    }
    const Turn joins = join;
    Add(std::move(join));
    for (; round_ <= last; ++round_)
      for (int name = 0; name < names_; ++name) {
        if (random_.OneIn(3)) continue;
        Turn turn = MakeDataTurn(set, "w" + std::to_string(name));
        turn.needs.push_back(joins.number);
        for (auto& part : turn.parts)
          if (joins.parts.at(part.first).round < round_) part.second.act = Act::kAbsent;
        if (turn.ranks_that(Act::kSubmits).empty()) continue;
        MayGoWrong(&turn);
        Add(std::move(turn));
      }
  }

  void DrawAddSet() {
    const std::vector<int> members = random_.OneIn(4) ? plan_.ranks : random_.Some(plan_.ranks);
    const int set = next_set_++;
    Turn turn =
        MakeControlTurn(Operation::kAddProcessSet, 0, "add" + std::to_string(set), {members.begin(), members.end()});
    plan_.sets[set] = members;
    if (random_.OneIn(4)) {  // some rank has another idea of it
      turn.differs = "list";
      for (auto& part : turn.parts) part.second.value = RanksListText(part.second.request.splits);
      for (int rank : random_.Some(plan_.ranks)) {
        Part& part = turn.parts[rank];
        part.request.splits = {plan_.ranks.back()};
        part.value = RanksListText(part.request.splits);
      }
    }
    turn.creates = set;
    made_by_[set] = turn.number;
    if (ExpectedVerdict(plan_, turn).runs) live_sets_.push_back(set);
    Add(std::move(turn));
    ++round_;
  }

  void DrawRemoveSet() {
    if (live_sets_.size() < 2) return;
    const size_t place = 1 + random_.Below(live_sets_.size() - 1);
    const int set = live_sets_[place];
    live_sets_.erase(live_sets_.begin() + static_cast<std::ptrdiff_t>(place));
    Turn turn = MakeControlTurn(Operation::kRemoveProcessSet, 0, "remove" + std::to_string(set), {set});
    turn.needs.push_back(made_by_[set]);
    Add(std::move(turn));
    ++round_;
  }

  // Some ranks are so late that it is reported, or given up. Away from the limits, whose side the other delays must not
  // decide.
  void DrawLateness() {
    static const std::vector<std::pair<int, int>> seconds = {{35, 55}, {66, 110}, {130, 230}, {250, 460}, {620, 900}};
    const int set = random_.Pick(live_sets_);
    if (plan_.sets[set].size() < 2) return;
    Turn turn = MakeDataTurn(set, "w" + std::to_string(random_.Below(names_)));
    turn.fenced = true;
    const auto [least, most] = large_ ? seconds[0] : random_.Pick(seconds);
    for (int rank : random_.Some(plan_.sets[set])) turn.parts[rank].delay = random_.Between(least, most) * kSecond;
    if (!large_ && long_phases_.OneIn(2)) DrawLongPhase(&turn);
    Add(std::move(turn));
    ++round_;
  }

  // Whoever is late has announced it, for a time that is or is not enough.
  void DrawLongPhase(Turn* turn) {
    struct Phase {
      int announced, least, most;
    };
    static const std::vector<Phase> phases = {{40, 35, 55},    {40, 80, 110},   {100, 140, 220},
                                              {700, 620, 690}, {100, 620, 690}, {100, 720, 900}};
    const Phase phase = long_phases_.Pick(phases);
    for (auto& entry : turn->parts) {
      Part& part = entry.second;
      if (part.delay == 0) continue;
      part.delay = long_phases_.Between(phase.least, phase.most) * kSecond;
      part.long_phase = phase.announced * kSecond;
    }
  }

  // The same step again and again, so that it comes to run by a schedule, and then what does not fit: an operation of
  // its own, a shape that has changed, a failure, an operation that is left out; from a stream of its own.
  // by_all: in the world, so that no rank comes to what follows long before the others.
  void DrawSteady(bool by_all) {
    std::swap(random_, steady_);
    const int set = by_all ? 0 : random_.Pick(live_sets_);
    std::vector<std::string> names;
    for (uint64_t count = 1 + random_.Below(4); count > 0; --count) names.push_back("s" + std::to_string(count));
    const std::set<int> odd = OddRounds();
    for (int step = 0; step < kSteadySteps; ++step, ++round_) {
      for (const std::string& name : names) {
        const bool is_odd = odd.count(step) > 0 && random_.OneIn(2);
        if (is_odd && random_.OneIn(4)) continue;
        if (is_odd && random_.OneIn(3)) models_.erase({set, name});
        Turn turn = MakeTurn(set, name, round_);
        const Request model = SteadyModel(set, name);
        for (auto& part : turn.parts) part.second.request = RequestFor(part.first, model, plan_.sets[set]);
        if (is_odd) MayGoWrong(&turn);
        Add(std::move(turn));
      }
      if (odd.count(step) > 0 && random_.OneIn(2)) Add(MakeDataTurn(set, "w0"));
    }
    std::swap(random_, steady_);
  }

  std::set<int> OddRounds() {
    std::set<int> odd;
    for (uint64_t count = random_.Below(4); count > 0; --count)
      odd.insert(5 + static_cast<int>(random_.Below(kSteadySteps - 5)));
    return odd;
  }

  // Of data, and cacheable.
  const Request& SteadyModel(int set, const std::string& name) {
    const auto found = models_.find({set, name});
    if (found != models_.end()) return found->second;
    Request request;
    request.name = name;
    request.tensors = {{DType::kFloat32, {static_cast<int64_t>(random_.Below(20))}}};
    if (random_.OneIn(4)) {
      request.operation = Operation::kAllgather;
      request.tensors[0].shape.push_back(3);
    }
    return models_[{set, name}] = request;
  }

  // One or two ranks leave before the others have finished; some operations come only when they are gone.
  void DrawLeaving() {
    for (int rank : {random_.Pick(plan_.ranks), random_.Pick(plan_.ranks)}) plan_.leaves_after[rank] = round_;
    const bool abandoned = !random_.OneIn(4);
    if (abandoned) DrawAbandoned();
    ++round_;
    const size_t first = plan_.turns.size();
    for (uint64_t rounds = 1 + random_.Below(3); rounds > 0; --rounds) DrawRound(false);
    for (size_t number = first; number < plan_.turns.size(); ++number)
      for (auto& part : plan_.turns[number].parts)
        if (plan_.leaves_after.count(part.first) > 0) part.second.act = Act::kAbsent;
    if (!abandoned && plan_.turns.size() > first)
      for (auto& part : plan_.turns.back().parts) part.second.delay = kWhenGone;
    for (size_t number = plan_.turns.size(); number-- > first;)
      if (plan_.turns[number].ranks_that(Act::kSubmits).empty())
        plan_.turns.erase(plan_.turns.begin() + static_cast<std::ptrdiff_t>(number));
  }

  // The leaving ranks submit it and do not wait.
  void DrawAbandoned() {
    Turn turn = MakeDataTurn(random_.Pick(live_sets_), "abandoned");
    for (auto& part : turn.parts)
      if (plan_.leaves_after.count(part.first) > 0)
        part.second.act = Act::kAbandons;
      else
        part.second.delay = kWhenGone;
    Add(std::move(turn));
  }

  void DrawFaults() {
    static const Fault::Kind kinds[] = {Fault::kFreeze, Fault::kFreeze, Fault::kSlow, Fault::kLateStart, Fault::kCrash};
    if (random_.OneIn(2)) return;
    for (uint64_t count = 1 + random_.Below(3); count > 0; --count) {
      Fault fault;
      fault.number = static_cast<int>(plan_.faults.size());
      // Who has left must have gone by a deadline, which a crash may come to know later.
      fault.kind = kinds[random_.Below(plan_.leaves_after.empty() ? 5 : 4)];
      fault.ranks = {random_.Pick(plan_.ranks)};
      fault.at = fault.kind == Fault::kLateStart ? 0 : random_.Between(0, 1000) * kMillisecond;
      fault.duration = random_.Between(10, 2000) * kMillisecond;
      plan_.faults.push_back(fault);
    }
  }

  Plan plan_;
  Random random_, long_phases_, steady_;
  bool large_ = false;
  int names_ = 1, round_ = 0, next_set_ = 1;
  std::vector<int> live_sets_;
  std::map<int, int> made_by_;  // planned set -> number of the turn that adds it
  std::map<std::pair<int, std::string>, Request> models_;
};

}  // namespace

Plan Generate(uint64_t seed, int size) { return Generator(seed, size).Draw(); }

}  // namespace simulation
}  // namespace ringtrain
