#include "plan.h"

#include <algorithm>
#include <cstdio>
#include <sstream>

#include "base/ranks.h"
#include "faults.h"
#include "random.h"

namespace ringtrain {
namespace simulation {
namespace {

bool Contains(const std::vector<int>& values, int value) {
  return std::find(values.begin(), values.end(), value) != values.end();
}

// "dtype must be the same on all ranks, but is float32 on ranks 0, 2 and float16 on rank 1. "
std::string DifferenceText(const Turn& turn, const std::vector<int>& submitters) {
  std::vector<std::pair<std::string, std::vector<int>>> groups;
  for (int rank : submitters) {
    const std::string& value = turn.parts.at(rank).value;
    auto group = std::find_if(groups.begin(), groups.end(), [&](const auto& other) { return other.first == value; });
    if (group == groups.end()) group = groups.insert(groups.end(), {value, {}});
    group->second.push_back(rank);
  }
  if (groups.size() < 2) return "";
  std::string text = turn.differs + " must be the same on all ranks, but is ";
  for (size_t group = 0; group < groups.size(); ++group) {
    if (group > 0) text += group + 1 == groups.size() ? " and " : ", ";
    text += groups[group].first + " on " + RanksText(groups[group].second);
  }
  return text + ". ";
}

Verdict Failure(StatusCode code, std::vector<std::string> any_of, std::vector<std::string> all_of = {},
                int warnings = 0) {
  Verdict verdict;
  verdict.runs = false;
  verdict.code = code;
  verdict.any_of = std::move(any_of);
  verdict.all_of = std::move(all_of);
  verdict.warnings = warnings;
  return verdict;
}

Nanoseconds FromSeconds(double seconds) { return static_cast<Nanoseconds>(seconds * 1e9); }

// Reports of a stall that lasts so long: the next comes after twice the time, and none before the missing ranks are
// back from the long phase that they have announced and the first time has passed once more.
int ReportsWithin(Nanoseconds age, Nanoseconds patience, Nanoseconds long_phase) {
  const Nanoseconds first = long_phase > 0 ? long_phase + patience : patience;
  int reports = 0;
  for (Nanoseconds at = first; at <= age; ++reports) {
    while (patience <= at) patience *= 2;
    at = std::max(patience, first);
  }
  return reports;
}

std::string ListText(const std::set<int>& numbers) {
  std::string text;
  for (int number : numbers) text += (text.empty() ? "" : ",") + std::to_string(number);
  return text;
}

bool ParseList(const std::string& text, std::set<int>* numbers) {
  std::stringstream list(text);
  for (std::string number; std::getline(list, number, ',');) {
    if (number.empty() || number.find_first_not_of("0123456789") != std::string::npos) return false;
    numbers->insert(std::atoi(number.c_str()));
  }
  return true;
}

// The rank's own entry in what the others say, and the delays if nobody is left who would wait for the late ones.
void DropFromTurn(int rank, const std::vector<int>& members, Turn* turn) {
  turn->parts.erase(rank);
  const int place = static_cast<int>(std::lower_bound(members.begin(), members.end(), rank) - members.begin());
  bool prompt = false;
  for (auto& [other, part] : turn->parts) {
    Request& request = part.request;
    if (request.root == rank) request.root = members[members[0] == rank ? 1 : 0];
    if (request.operation == Operation::kAlltoall) {
      request.tensors[0].shape[0] -= request.splits[place];
      request.splits.erase(request.splits.begin() + place);
    }
    if (request.operation == Operation::kAddProcessSet) {
      request.splits.erase(std::remove(request.splits.begin(), request.splits.end(), rank), request.splits.end());
      part.value = RanksListText(request.splits);
    }
    prompt |= part.act == Act::kAbandons || (part.act == Act::kSubmits && part.delay == 0);
  }
  for (auto& part : turn->parts)
    if (!prompt) part.second.delay = part.second.long_phase = 0;
}

void DropRank(int rank, Plan* plan) {
  for (Turn& turn : plan->turns)
    if (turn.parts.count(rank) > 0 && turn.parts.size() > 1)
      DropFromTurn(rank, plan->sets.at(turn.set), &turn);
    else
      turn.parts.erase(rank);
  for (auto& set : plan->sets)
    set.second.erase(std::remove(set.second.begin(), set.second.end(), rank), set.second.end());
  plan->ranks = plan->sets.at(0);
  plan->leaves_after.erase(rank);
  plan->lingers.erase(rank);
  for (Fault& fault : plan->faults)
    fault.ranks.erase(std::remove(fault.ranks.begin(), fault.ranks.end(), rank), fault.ranks.end());
  plan->faults.erase(
      std::remove_if(plan->faults.begin(), plan->faults.end(), [](const Fault& fault) { return fault.ranks.empty(); }),
      plan->faults.end());
}

bool Keeps(const Case::Kept& kept, int number) { return !kept || kept->count(number) > 0; }

void KeepTurns(const Case::Kept& kept, Plan* plan) {
  std::set<int> dropped;
  for (const Turn& turn : plan->turns) {  // what a turn needs has a smaller number
    bool drop = !Keeps(kept, turn.number) || turn.ranks_that(Act::kSubmits).empty();
    for (int needed : turn.needs) drop |= dropped.count(needed) > 0;
    if (drop) dropped.insert(turn.number);
  }
  plan->turns.erase(std::remove_if(plan->turns.begin(), plan->turns.end(),
                                   [&](const Turn& turn) { return dropped.count(turn.number) > 0; }),
                    plan->turns.end());
}

void KeepFaults(const Case::Kept& kept, Plan* plan) {
  plan->faults.erase(std::remove_if(plan->faults.begin(), plan->faults.end(),
                                    [&](const Fault& fault) { return !Keeps(kept, fault.number); }),
                     plan->faults.end());
}

}  // namespace

std::string RanksListText(const std::vector<int64_t>& ranks) {
  std::string text = "[";
  for (int64_t rank : ranks) text += (text.size() > 1 ? ", " : "") + std::to_string(rank);
  return text + "]";
}

const Request& Turn::request() const {
  return std::find_if(parts.begin(), parts.end(), [](const auto& part) { return part.second.act == Act::kSubmits; })
      ->second.request;
}

std::vector<int> Turn::ranks_that(Act act) const {
  std::vector<int> ranks;
  for (const auto& part : parts)
    if (part.second.act == act) ranks.push_back(part.first);
  return ranks;
}

bool Plan::fails() const {
  return std::any_of(faults.begin(), faults.end(), [&](const Fault& fault) { return IsDeadly(*this, fault); });
}

std::string SubjectIn(const Turn& turn) {
  return turn.request().Subject() + (turn.set == 0 ? ": " : " of process set ");
}

Verdict ExpectedVerdict(const Plan& plan, const Turn& turn) {
  const std::vector<int> submitters = turn.ranks_that(Act::kSubmits), refusers = turn.ranks_that(Act::kRefuses);
  const Request& request = turn.request();
  const Nanoseconds warning = FromSeconds(plan.options.stall_warning_seconds),
                    abort = FromSeconds(plan.options.stall_abort_seconds);
  std::vector<int> gone, late;
  Nanoseconds delay = 0, long_phase = 0;
  for (const auto& [rank, part] : turn.parts) {
    auto leaves = plan.leaves_after.find(rank);
    const bool left = leaves != plan.leaves_after.end() && leaves->second < part.round;
    if (part.act == Act::kAbandons || (part.act == Act::kAbsent && left)) gone.push_back(rank);
    if (part.delay > 0) late.push_back(rank);
    delay = std::max(delay, part.delay);
    long_phase = std::max(long_phase, part.long_phase);
  }
  if (!gone.empty()) return Failure(StatusCode::kClosed, {}, {SubjectIn(turn), "called shutdown()"});
  if (!refusers.empty()) {
    std::vector<std::string> texts;
    for (int rank : refusers) texts.push_back(turn.parts.at(rank).refusal);
    return Failure(StatusCode::kInvalidArgument, texts);
  }
  std::vector<int> prompt;
  std::set_difference(submitters.begin(), submitters.end(), late.begin(), late.end(), std::back_inserter(prompt));
  Verdict verdict;
  if (!prompt.empty()) verdict.warnings = ReportsWithin(std::min(delay, long_phase + abort - 1), warning, long_phase);
  if (delay >= long_phase + abort && !prompt.empty())
    return Failure(StatusCode::kTimeout, {SubjectIn(turn)},
                   {": waiting ", "submitted by " + RanksText(prompt) + "; missing " + RanksText(late) + ".",
                    "It was given up after"},
                   verdict.warnings);
  const std::string difference = DifferenceText(turn, submitters);
  if (!difference.empty()) return Failure(StatusCode::kMismatch, {request.Subject() + ": " + difference});
  if (request.operation == Operation::kBroadcast && !Contains(submitters, request.root))
    return Failure(StatusCode::kMismatch,
                   {request.Subject() + ": root " + std::to_string(request.root) + " has joined "});
  return verdict;
}

namespace {

void ChooseSchedules(Plan* plan) {
  Random random({plan->seed, 12});
  plan->fanout = static_cast<int>(random.Between(1, 3));
  plan->options.schedule = random.OneIn(5) ? "off" : "auto";
}

}  // namespace

Plan MakePlan(const Case& from) {
  Plan plan = Generate(from.seed, from.size);
  for (int rank : std::vector<int>(plan.ranks))
    if (!Keeps(from.ranks, rank)) DropRank(rank, &plan);
  KeepTurns(from.turns, &plan);
  KeepFaults(from.faults, &plan);
  ChooseSchedules(&plan);
  return plan;
}

std::string Case::Text() const {
  std::string text = "seed=" + std::to_string(seed) + " size=" + std::to_string(size);
  if (ranks) text += " ranks=" + ListText(*ranks);
  if (turns) text += " turns=" + ListText(*turns);
  if (faults) text += " faults=" + ListText(*faults);
  return text;
}

bool Case::Parse(const std::string& text, Case* parsed) {
  *parsed = Case();
  std::stringstream words(text);
  for (std::string word; words >> word;) {
    const size_t equals = word.find('=');
    if (equals == std::string::npos) return false;
    const std::string name = word.substr(0, equals), value = word.substr(equals + 1);
    if (name == "seed")
      parsed->seed = std::strtoull(value.c_str(), nullptr, 10);
    else if (name == "size")
      parsed->size = std::atoi(value.c_str());
    else if (name == "ranks" && ParseList(value, &parsed->ranks.emplace()))
      continue;
    else if (name == "turns" && ParseList(value, &parsed->turns.emplace()))
      continue;
    else if (name == "faults" && ParseList(value, &parsed->faults.emplace()))
      continue;
    else
      return false;
  }
  return true;
}

std::string Plan::Text() const {
  static const char* const kFaults[] = {"freeze", "slow", "late start", "crash", "exception", "cut", "loss"};
  static const char* const kWays[] = {"", " outward", " inward"};
  std::ostringstream text;
  text << ranks.size() << " ranks, cache of " << options.cache_capacity << " names, fusion up to "
       << options.fusion_threshold_bytes << " bytes" << (waits_at_exit ? ", waits at exit" : "")
       << (idle_ranks_doze ? ", idle ranks doze" : "") << (wire_tells ? ", the wire tells of losses" : "")
       << (options.schedule == "auto" ? ", runs by schedules" : "") << "\n";
  std::map<int, std::vector<int>> hosts;
  for (int rank : ranks) hosts[host_of.at(rank)].push_back(rank);
  for (const auto& [host, local] : hosts) text << "  host " << host << ": " << RanksText(local) << "\n";
  for (const auto& [set, members] : sets)
    if (set > 0) text << "  set " << set << ": " << RanksText(members) << "\n";
  for (const Turn& turn : turns) {
    text << "  turn " << turn.number << (turn.fenced ? " (fenced)" : "") << ": " << turn.request().Subject()
         << " in set " << turn.set;
    for (const auto& [rank, part] : turn.parts) {
      text << "; " << rank << " in round " << part.round;
      if (part.act == Act::kRefuses) text << " refuses";
      if (part.act == Act::kAbsent) text << " absent";
      if (part.act == Act::kAbandons) text << " abandons it";
      if (!part.value.empty()) text << " " << part.value;
      if (part.delay > 0) text << " after " << part.delay / kSecond << " s";
      if (part.long_phase > 0) text << " of a long phase of " << part.long_phase / kSecond << " s";
    }
    text << "\n";
  }
  for (const Fault& fault : faults)
    text << "  fault " << fault.number << ": " << kFaults[fault.kind] << kWays[fault.way] << " of "
         << RanksText(fault.ranks) << " at " << fault.at / kMillisecond << " ms for " << fault.duration / kMillisecond
         << " ms\n";
  for (const auto& [rank, time] : lingers) text << "  rank " << rank << " lingers for " << time / kSecond << " s\n";
  for (const auto& [rank, round] : leaves_after) text << "  rank " << rank << " leaves after round " << round << "\n";
  return text.str();
}

}  // namespace simulation
}  // namespace ringtrain
