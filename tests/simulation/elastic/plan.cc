#include "plan.h"

#include <algorithm>
#include <numeric>
#include <sstream>

#include "random.h"

namespace ringtrain {
namespace elastic {
namespace {

using simulation::Random;

// Frames whose sending is a moment at which everything is at stake.
const std::vector<ControlType> kMoments = {ControlType::kStop,   ControlType::kStop, ControlType::kReport,
                                           ControlType::kReport, ControlType::kForm, ControlType::kForm,
                                           ControlType::kFormed, ControlType::kGo,   ControlType::kGo,
                                           ControlType::kReady,  ControlType::kLeave};

class Drawing {
 public:
  explicit Drawing(uint64_t seed) : random_({seed, 77}) { plan_.seed = seed; }

  Plan Draw() {
    const int hosts = static_cast<int>(random_.Between(1, 4));
    for (int host = 0; host < hosts; ++host) plan_.slots.push_back(static_cast<int>(random_.Between(1, 3)));
    if (plan_.ranks() == 1) plan_.slots[0] = 3;
    if (hosts > 1 && random_.OneIn(8)) plan_.late.insert(hosts - 1);
    plan_.minimum = random_.OneIn(3) ? static_cast<int>(random_.Between(1, plan_.ranks())) : 1;
    plan_.operations = static_cast<int>(random_.Between(1, 3));
    plan_.draws = static_cast<int>(random_.Between(1, 3));
    plan_.cut = random_.Pick(std::vector<Cut>{Cut::kPositions, Cut::kBatches, Cut::kGrowingBatches});
    plan_.batch = random_.Between(1, 12);
    plan_.window = random_.Between(20, 400) * kMillisecond;
    plan_.link_delay = random_.OneIn(10) ? kSilence / 4 : random_.Between(1, 10) * kMillisecond;
    plan_.first_pause = random_.Between(1, 8) * kSecond / 2;
    plan_.start_up = random_.Between(50, 3000) * kMillisecond;
    plan_.cache_capacity = random_.Pick(std::vector<int64_t>{0, 2, 1024, 1024});
    plan_.fusion_threshold_bytes = random_.Pick(std::vector<int64_t>{0, 1 << 20});
    plan_.steps = random_.Between(8, 40);
    const int faults = random_.OneIn(12) ? 0 : static_cast<int>(random_.Between(1, random_.OneIn(2) ? 2 : 6));
    for (int fault = 0; fault < faults; ++fault) plan_.faults.push_back(DrawFault(fault));
    Smooth();
    return std::move(plan_);
  }

 private:
  Fault DrawFault(int number) {
    static const std::vector<Fault::Kind> kinds = {
        Fault::kCrash,         Fault::kCrash,    Fault::kCrash,     Fault::kCrash,       Fault::kFreeze,
        Fault::kHang,          Fault::kHostLost, Fault::kHostReset, Fault::kCut,         Fault::kLauncherCrash,
        Fault::kLauncherCrash, Fault::kNotice,   Fault::kNotice,    Fault::kOtherProgram};
    Fault fault{number, random_.Pick(kinds)};
    if (fault.kind == Fault::kOtherProgram && simulation::Mix({plan_.seed, static_cast<uint64_t>(number)}) % 2 == 0)
      fault.kind = Fault::kOtherValues;
    if (fault.kind == Fault::kNotice && simulation::Mix({plan_.seed, static_cast<uint64_t>(number), 1}) % 3 == 0)
      fault.kind = Fault::kHostNotice;
    if (fault.kind == Fault::kHang && simulation::Mix({plan_.seed, static_cast<uint64_t>(number), 3}) % 2 == 0)
      fault.kind = Fault::kAnotherWay;
    fault.host = static_cast<int>(random_.Below(plan_.slots.size()));
    fault.slot = static_cast<int>(random_.Below(static_cast<uint64_t>(plan_.slots[static_cast<size_t>(fault.host)])));
    const bool at_a_moment = fault.kind == Fault::kLauncherCrash ? !random_.OneIn(3) : random_.OneIn(2);
    const bool kills = fault.kind == Fault::kCrash || fault.kind == Fault::kLauncherCrash;
    if (number > 0 && kills && random_.OneIn(2)) {  // during the recovery from the last one
      fault.follows = true;
      fault.frame = random_.Pick(kMoments);
      fault.nth = static_cast<int>(random_.Between(1, plan_.ranks()));
    } else if (at_a_moment) {
      fault.frame = random_.Pick(kMoments);
      fault.nth = static_cast<int>(random_.Between(1, 4 * plan_.ranks()));
    } else {
      fault.at = plan_.start_up + random_.Between(0, 2 * plan_.steps * plan_.window);
    }
    if (fault.kind == Fault::kFreeze) fault.duration = DrawFreeze(number);
    if (fault.kind == Fault::kHang) fault.duration = random_.Between(1, 90) * kSecond;
    if (fault.kind == Fault::kLauncherCrash)
      fault.duration = random_.OneIn(8) ? kNever : random_.Between(1, 200) * kSecond / 10;
    if (fault.kind == Fault::kCut) DrawCut(&fault);
    return fault;
  }

  // Some end about when the rank is given up.
  Nanoseconds DrawFreeze(int number) {
    const Nanoseconds any = random_.Between(1, 200) * kSecond / 10;
    const uint64_t drawn = simulation::Mix({plan_.seed, static_cast<uint64_t>(number), 2});
    return drawn % 4 > 0 ? any : kSilence + static_cast<Nanoseconds>(drawn / 4 % 1500) * kMillisecond;
  }

  void DrawCut(Fault* fault) {
    fault->duration = random_.OneIn(3) ? random_.Between(1, 30) * kSecond / 10 : random_.Between(10, 30) * kSecond;
    fault->way =
        random_.OneIn(4) ? random_.Pick(std::vector<Fault::Way>{Fault::kOutward, Fault::kInward}) : Fault::kBoth;
    std::vector<int> places(plan_.slots.size());
    std::iota(places.begin(), places.end(), 0);
    for (int host : random_.Some(places)) fault->places.insert(host);
    fault->spares_launcher = random_.OneIn(2);
    if (fault->spares_launcher) return;
    if (random_.OneIn(4)) fault->places = {kLauncher};
    if (random_.OneIn(3)) fault->places.insert(kLauncher);
  }

  // Frames that are late by more than a third of the bound are a fault by themselves; and what is slow needs fewer
  // steps to show everything.
  void Smooth() {
    if (plan_.link_delay > kSecond) plan_.steps = std::min<int64_t>(plan_.steps, 10);
  }

  Random random_;
  Plan plan_;
};

}  // namespace

std::string HostName(int host) { return std::string(1, static_cast<char>('a' + host)); }

bool Plan::OneIn(uint64_t count, int64_t done, uint64_t what) const {
  return simulation::Mix({seed, static_cast<uint64_t>(done), what}) % count == 0;
}

int Plan::ranks() const { return std::accumulate(slots.begin(), slots.end(), 0); }

bool Plan::Has(Fault::Kind kind) const {
  return std::any_of(faults.begin(), faults.end(), [&](const Fault& fault) { return fault.kind == kind; });
}

bool Plan::must_succeed() const {
  // Of two ranks that wait for each other it may be the right one that goes.
  if (Has(Fault::kAnotherWay) && (faults.size() > 1 || ranks() < 3 || !late.empty())) return false;
  std::set<std::pair<int, int>> struck;
  for (const Fault& fault : faults) {
    const bool short_cut = fault.kind == Fault::kCut && fault.duration < kSilence / 2;
    if ((fault.kind == Fault::kCut && !short_cut) || fault.kind == Fault::kNotice || fault.kind == Fault::kHostNotice)
      return false;
    if (fault.kind == Fault::kLauncherCrash && fault.duration == kNever) return false;
    const bool all_of_host = fault.kind == Fault::kHostLost || fault.kind == Fault::kHostReset;
    for (int slot = 0; slot < slots[static_cast<size_t>(fault.host)]; ++slot)
      if (all_of_host || slot == fault.slot) struck.insert({fault.host, slot});
  }
  return minimum == 1 && static_cast<int>(struck.size()) < ranks() && link_delay < kSecond &&
         !(Has(Fault::kLauncherCrash) && faults.size() > 1);
}

std::string Plan::Text() const {
  static const char* const kKinds[] = {"crash",       "freeze",        "hang",           "loss",
                                       "reset",       "cut",           "launcher crash", "notice",
                                       "host notice", "other program", "other values",   "another way"};
  static const char* const kCuts[] = {"positions", "batches", "growing batches"};
  static const char* const kWays[] = {"", " outward", " inward"};
  std::ostringstream text;
  text << "hosts of";
  for (int count : slots) text << " " << count;
  text << " slots, at least " << minimum << " ranks, " << steps << " steps of " << operations << " operations in "
       << window / kMillisecond << " ms, delay " << link_delay / kMillisecond << " ms, pause "
       << first_pause / kMillisecond << " ms, " << draws << " draws of " << kCuts[static_cast<int>(cut)] << " of "
       << batch << ", start " << start_up / kMillisecond << " ms" << (late.empty() ? "" : ", the last host is late")
       << "\n";
  for (const Fault& fault : faults) {
    text << "  fault " << fault.number << ": " << kKinds[fault.kind] << kWays[fault.way];
    if (fault.kind == Fault::kCut) {
      text << " of";
      if (fault.spares_launcher) text << " between hosts, of";
      for (int place : fault.places) text << " " << (place == kLauncher ? "launcher" : HostName(place));
    } else if (fault.kind != Fault::kLauncherCrash) {
      text << " of " << HostName(fault.host) << ":" << fault.slot;
    }
    if (fault.nth > 0)
      text << (fault.follows ? " then" : "") << " at frame " << fault.nth << " of type "
           << static_cast<int>(fault.frame);
    else
      text << " at " << fault.at / kMillisecond << " ms";
    if (fault.duration == kNever) text << " for good";
    if (fault.duration > 0 && fault.duration < kNever) text << " for " << fault.duration / kMillisecond << " ms";
    text << "\n";
  }
  return text.str();
}

Plan Draw(uint64_t seed, const std::set<int>* some) {
  Plan plan = Drawing(seed).Draw();
  if (some == nullptr) return plan;
  plan.faults.erase(std::remove_if(plan.faults.begin(), plan.faults.end(),
                                   [&](const Fault& fault) { return some->count(fault.number) == 0; }),
                    plan.faults.end());
  return plan;
}

}  // namespace elastic
}  // namespace ringtrain
