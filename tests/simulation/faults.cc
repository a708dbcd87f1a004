#include "faults.h"

#include <algorithm>
#include <cstdlib>
#include <sstream>

#include "base/ranks.h"
#include "random.h"

namespace ringtrain {
namespace simulation {
const char* const kLossText = "connection reset by peer";

namespace {

constexpr Nanoseconds kBound = 15 * kSecond;  // RINGTRAIN_DEAD_AFTER_SECONDS, as users have it
constexpr Nanoseconds kMargin = 2 * kSecond;  // what is promised beyond it
constexpr Nanoseconds kBlink = 6 * kSecond;   // what the short freezes of a plan come to
constexpr Nanoseconds kJitter = kSecond;      // between the ranks that one signal stops
constexpr Nanoseconds kDoze = kSecond;        // of a rank with nothing pending; what has come it hears then
constexpr int kSlowest = 30;                  // steps of a slow rank

std::vector<int> RanksOnHost(const Plan& plan, int host) {
  std::vector<int> ranks;
  for (int rank : plan.ranks)
    if (plan.host_of.at(rank) == host) ranks.push_back(rank);
  return ranks;
}

std::vector<int> HostsOf(const Plan& plan) {
  std::set<int> hosts;
  for (int rank : plan.ranks) hosts.insert(plan.host_of.at(rank));
  return {hosts.begin(), hosts.end()};
}

std::string SubjectText(const Plan& plan, const std::vector<int>& ranks) {
  return RanksText(ranks) + " on host '" + plan.HostName(ranks[0]) + "': expected ";
}

// What RanksText made the beginning of a text of; none if it is of one rank.
std::vector<int> RanksIn(const std::string& text) {
  std::vector<int> ranks;
  std::istringstream rest(text);
  std::string word;
  rest >> word;
  for (int rank; word == "ranks" && rest >> rank;) {
    if (rank < 0)  // what follows a dash
      for (int next = ranks.back() + 1; next < -rank; ++next) ranks.push_back(next);
    ranks.push_back(std::abs(rank));
    if (rest.peek() == ',') rest.get();
  }
  return ranks;
}

// What is told of a rank with which a connection was lost.
std::string LossText(const Plan& plan, int rank) {
  return RanksText({rank}) + " on host '" + plan.HostName(rank) +
         "': the connection to it must last until shutdown(), but was lost: " + kLossText +
         ". It has ended, or the network to its host is cut: look for its own last words, and for its exit code or "
         "signal in what the launcher prints; if there are none, look at that host and at the network to it.";
}

// Who may be called lost: of a crash, those that crash.
std::vector<int> EndsOfConnections(const Plan& plan, const Fault& fault) {
  std::vector<int> ends = fault.ranks;
  if (fault.kind != Fault::kLoss || ends.size() > 1) return ends;
  for (int rank : plan.ranks)
    if (plan.Connected(rank, fault.ranks[0])) ends.push_back(rank);
  return ends;
}

// Delays of the network and of slow ranks on the way of a sign and of the news.
Nanoseconds Slack(const Plan& plan) {
  const bool blinks = std::any_of(plan.faults.begin(), plan.faults.end(), [](const Fault& fault) {
    return (fault.kind == Fault::kFreeze || fault.kind == Fault::kLateStart) && fault.duration <= kMargin;
  });
  return 30 * plan.link_delay + 3 * kSlowest * plan.step_delay + (blinks ? kBlink : 0) +
         (plan.idle_ranks_doze ? kDoze : 0);
}

bool Cuts(const Plan& plan, const Fault& fault) {
  std::set<int> hosts;
  for (int rank : fault.ranks) hosts.insert(plan.host_of.at(rank));
  return hosts.size() < HostsOf(plan).size();
}

class FaultDrawer {
 public:
  explicit FaultDrawer(Plan* plan) : plan_(*plan), random_({plan->seed, 8}) {}

  void Draw() {
    fault_.at = random_.OneIn(3) ? random_.Between(0, 1000) * kMillisecond : random_.Between(0, 40) * kSecond;
    fault_.duration = Duration(random_.OneIn(3));
    DrawKind();
    if (fault_.ranks.size() == plan_.ranks.size())
      fault_.duration = random_.Between(3, 25) * kSecond;  // a stall is reported after 30
    fault_.number = static_cast<int>(plan_.faults.size());
    plan_.faults.push_back(fault_);
    if (!IsDeadly(plan_, fault_)) ForgetLateness();
    for (int rank : plan_.ranks)
      if (random_.OneIn(2)) plan_.lingers[rank] = random_.Between(1, 60) * kSecond;
  }

 private:
  // Away from the bound, whose side the delays must not decide.
  Nanoseconds Duration(bool harmless) {
    return (harmless ? random_.Between(3, kBound / kSecond - 4) : random_.Between(kBound / kSecond + 4, 90)) * kSecond;
  }

  // What is survived must not be mixed up with ranks that are late: the one would add to the other's time.
  void ForgetLateness() {
    for (Turn& turn : plan_.turns)
      for (auto& part : turn.parts) part.second.delay = part.second.long_phase = 0;
  }

  void DrawKind() {
    const int rank = random_.Pick(plan_.ranks);
    const std::vector<int> host = RanksOnHost(plan_, plan_.host_of.at(rank));
    switch (random_.Below(10)) {
      case 0:  // Ctrl-Z of the whole job
        fault_.kind = Fault::kFreeze;
        fault_.ranks = plan_.ranks;
        return;
      case 1:
        fault_.kind = Fault::kFreeze;
        fault_.ranks = host;
        return;
      case 2:
      case 3:
        fault_.kind = Fault::kFreeze;
        fault_.ranks = {rank};
        return;
      case 4:
        fault_.kind = Fault::kLateStart;
        fault_.ranks = {rank};
        fault_.at = 0;
        return;
      case 5:
        fault_.kind = Fault::kCrash;
        fault_.ranks = random_.OneIn(2) ? host : std::vector<int>{rank};
        return;
      case 6:
        fault_.kind = Fault::kCrash;
        fault_.ranks = {rank};
        return;
      case 7:
        fault_.kind = Fault::kRaise;
        fault_.ranks = {rank};
        return;
      default:
        return DrawCut();
    }
  }

  void DrawCut() {
    fault_.kind = Fault::kCut;
    for (int host : random_.Some(HostsOf(plan_)))
      for (int rank : RanksOnHost(plan_, host)) fault_.ranks.push_back(rank);
    std::sort(fault_.ranks.begin(), fault_.ranks.end());
    fault_.way =
        random_.Pick(std::vector<Fault::Way>{Fault::kBothWays, Fault::kBothWays, Fault::kOutward, Fault::kInward});
    if (fault_.duration > kBound && random_.OneIn(2)) fault_.duration = kForGood;
  }

  Plan& plan_;
  Random random_;
  Fault fault_;
};

}  // namespace

void DrawHosts(Plan* plan) {
  Random random{plan->seed, 7};
  plan->options.dead_after_seconds = static_cast<double>(kBound / kSecond);
  plan->idle_ranks_doze = random.OneIn(3);
  const int a_host = random.Pick(std::vector<int>{1, 2, 3, 4, 8, 16});
  const int hosts = (static_cast<int>(plan->ranks.size()) + a_host - 1) / a_host;
  const bool in_turn = random.OneIn(3);  // ranks are dealt out to the hosts one by one
  for (size_t place = 0; place < plan->ranks.size(); ++place)
    plan->host_of[plan->ranks[place]] = static_cast<int>(place) % (in_turn ? hosts : 1 << 30) / (in_turn ? 1 : a_host);
}

void DrawLastingFault(Plan* plan) {
  Random random{plan->seed, 9};
  if (!plan->leaves_after.empty()) return;  // a crash may be felt later than those who left must be gone
  plan->waits_at_exit = random.OneIn(2);
  if (!random.OneIn(3)) return;
  plan->waits_at_exit = true;
  // Silences add up: no other may come to this one.
  auto silences = [](const Fault& fault) { return fault.kind != Fault::kSlow; };
  plan->faults.erase(std::remove_if(plan->faults.begin(), plan->faults.end(), silences), plan->faults.end());
  FaultDrawer(plan).Draw();
}

void DrawLoss(Plan* plan) {
  Random random{plan->seed, 12};
  plan->wire_tells = random.OneIn(2);
  if (!plan->wire_tells || !plan->faults.empty() || HostsOf(*plan).size() < 2 || !random.OneIn(3)) return;
  Fault fault;
  fault.kind = Fault::kLoss;
  fault.at = random.OneIn(3) ? random.Between(0, 1000) * kMillisecond : random.Between(0, 40) * kSecond;
  fault.duration = kForGood;
  const int rank = random.Pick(plan->ranks);
  fault.ranks = {rank};
  if (random.OneIn(2)) {
    std::vector<int> others;
    for (int other : plan->ranks)
      if (plan->Connected(rank, other)) others.push_back(other);
    fault.ranks.push_back(random.Pick(others));
    std::sort(fault.ranks.begin(), fault.ranks.end());
  }
  plan->faults.push_back(fault);
  if (!plan->leaves_after.empty()) return;  // what leaves must be gone by a time
  for (int each : plan->ranks)
    if (random.OneIn(2)) plan->lingers[each] = random.Between(1, 60) * kSecond;
}

void DrawUncaught(Plan* plan) {
  Random random{plan->seed, 13};
  if (!plan->faults.empty() || !plan->leaves_after.empty() || !random.OneIn(3)) return;
  Fault fault;
  fault.kind = Fault::kRaise;
  fault.when_told = true;
  fault.ranks = {random.OneIn(2) ? plan->ranks[0] : random.Pick(plan->ranks)};
  plan->faults.push_back(fault);
  plan->waits_at_exit = true;
}

bool EndsByErrorsAlone(const Plan& plan) {
  return std::all_of(plan.faults.begin(), plan.faults.end(),
                     [](const Fault& fault) { return fault.kind == Fault::kRaise; });
}

bool IsDeadly(const Plan& plan, const Fault& fault) {
  switch (fault.kind) {
    case Fault::kCrash:
    case Fault::kRaise:
      return true;
    case Fault::kFreeze:
    case Fault::kLateStart:
      return fault.duration > kBound && fault.ranks.size() < plan.ranks.size();
    case Fault::kCut:
      return fault.duration > kBound && Cuts(plan, fault);
    case Fault::kLoss:
      return HostsOf(plan).size() > 1;
    case Fault::kSlow:
      return false;
  }
  return false;
}

Nanoseconds TimeToEnd(const Plan& plan, const Fault& fault, bool told) {
  const bool at_once = fault.kind == Fault::kRaise || fault.kind == Fault::kLoss || told;
  return (at_once ? 0 : kBound) + (fault.ranks.size() > 1 ? kJitter : 0) + kMargin + Slack(plan);
}

Nanoseconds TimeToEndAfterWaking(const Plan& plan) { return kJitter + kMargin + Slack(plan); }

Nanoseconds Jitter(const Plan& plan, const Fault& fault, int rank) {
  if (fault.ranks.size() < 2) return 0;
  return static_cast<Nanoseconds>(Mix({plan.seed, 10, static_cast<uint64_t>(rank)}) % kJitter);
}

// That several ranks of a host have ended, each in some crash, and one of them in this one.
bool TellsOfSeveral(const Plan& plan, const Fault& fault, const std::string& cause) {
  std::vector<int> crashed;
  for (const Fault& each : plan.faults)
    if (each.kind == Fault::kCrash) crashed.insert(crashed.end(), each.ranks.begin(), each.ranks.end());
  const std::vector<int> named = RanksIn(cause);
  const auto has_crashed = [&](int rank) { return std::count(crashed.begin(), crashed.end(), rank) > 0; };
  const auto in_this = [&](int rank) { return std::count(fault.ranks.begin(), fault.ranks.end(), rank) > 0; };
  return named.size() > 1 && cause.find(SubjectText(plan, named)) == 0 &&
         std::all_of(named.begin(), named.end(), has_crashed) && std::any_of(named.begin(), named.end(), in_this);
}

std::string RaisedText(int rank) { return "rank " + std::to_string(rank) + " has failed: ValueError"; }

std::string Misfit(const Plan& plan, const Fault& fault, Nanoseconds struck, Nanoseconds now,
                   const std::string& cause) {
  if (fault.kind == Fault::kRaise) return cause == RaisedText(fault.ranks[0]) ? "" : "it was raised otherwise";
  if (fault.kind == Fault::kLoss || (fault.kind == Fault::kCrash && plan.wire_tells)) {
    const std::vector<int> ends = EndsOfConnections(plan, fault);
    const bool lost = std::any_of(ends.begin(), ends.end(), [&](int rank) { return cause == LossText(plan, rank); });
    if (lost || fault.kind == Fault::kLoss) return lost ? "" : "that connection was not lost";
  }
  std::vector<std::string> subjects;
  std::map<int, std::vector<int>> hosts;
  for (int rank : plan.ranks) hosts[plan.host_of.at(rank)].push_back(rank);
  for (int rank : fault.kind == Fault::kCut ? plan.ranks : fault.ranks) {
    const std::vector<int>& host = hosts.at(plan.host_of.at(rank));
    if (fault.kind != Fault::kCut) subjects.push_back(SubjectText(plan, {rank}));
    if (host[0] == rank) subjects.push_back(SubjectText(plan, host));  // which beats for all of them
  }
  if (fault.kind == Fault::kCrash && TellsOfSeveral(plan, fault, cause)) return "";
  if (std::none_of(subjects.begin(), subjects.end(),
                   [&](const std::string& subject) { return cause.compare(0, subject.size(), subject) == 0; }))
    return "nothing has happened to that rank";
  const bool ended = cause.find("its process has ended") != std::string::npos;
  if (ended && fault.kind != Fault::kCrash) return "that process lives";
  if (!ended && now < struck + kBound - kMargin) return "it has not been silent for as long";
  return "";
}

}  // namespace simulation
}  // namespace ringtrain
