// Plan: everything that a simulated world is going to do, with the verdict that each of its operations must get.
//
// A plan is drawn from a seed (Generate) and is a value: a failing one is made smaller by leaving things out (Case),
// and what is left still knows its verdicts, because they follow from who does what (ExpectedVerdict) and not from how
// it was drawn.
#ifndef RINGTRAIN_TESTS_SIMULATION_PLAN_H_
#define RINGTRAIN_TESTS_SIMULATION_PLAN_H_

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "agree/negotiator.h"
#include "base/clock.h"
#include "base/options.h"

namespace ringtrain {
namespace simulation {

constexpr Nanoseconds kMillisecond = 1000000;
constexpr Nanoseconds kForGood = 1000000 * kSecond;

enum class Act {
  kSubmits,
  kRefuses,   // its own rank finds it wrong
  kAbsent,    // has joined before, or left
  kAbandons,  // submits, shuts down without waiting for it, and is gone before the others come
};

// What one rank does about a turn.
struct Part {
  Act act = Act::kSubmits;
  int round = 0;
  Request request;             // of kSubmits and kAbandons
  std::string value;           // where ranks differ: what the error must say about this one
  std::string refusal;         // of kRefuses
  Nanoseconds delay = 0;       // before it, from the fence of its round or when its turn comes
  Nanoseconds long_phase = 0;  // announced for the delay
};

// One operation: what every member of a process set does about one name.
struct Turn {
  int number = 0;
  int set = 0;  // planned process set; 0 is the world
  std::string name;
  std::string differs;        // the attribute in which ranks differ, if they do
  bool fenced = false;        // alone in its round, which starts and ends on all ranks at one moment
  int creates = 0;            // add_process_set: the planned set
  std::map<int, Part> parts;  // by rank
  std::vector<int> needs;     // numbers of turns without which this one has no sense

  // Some submitter's.
  const Request& request() const;
  std::vector<int> ranks_that(Act act) const;
};

struct Verdict {
  bool runs = true;
  StatusCode code = StatusCode::kOk;  // of a failure
  std::vector<std::string> any_of;    // one of these texts begins the failure's
  std::vector<std::string> all_of;    // each of these texts is in it
  int warnings = 0;                   // stall reports before it
};

struct Fault {
  enum Kind { kFreeze, kSlow, kLateStart, kCrash, kRaise, kCut, kLoss };
  enum Way { kBothWays, kOutward, kInward };  // of frames that are not let through
  int number = 0;
  Kind kind = kFreeze;
  std::vector<int> ranks;  // ascending; kCut: those of the hosts on one side of it; kLoss: the two ends of a
                           // connection, or one end of all that a rank has with other hosts
  Nanoseconds at = 0, duration = 0;
  bool when_told =
      false;  // kRaise: not at a time, but as soon as an operation fails, as a program that catches no error
  Way way = kBothWays;
};

struct Plan {
  uint64_t seed = 0;
  std::vector<int> ranks;                // ascending
  Options options;                       // those of them that the protocol reads
  int fanout = 1;                        // of the tree in which promises travel between hosts
  std::map<int, int> host_of;            // by rank
  std::map<int, std::vector<int>> sets;  // planned set -> its ranks
  std::vector<Turn> turns;
  std::vector<Fault> faults;
  std::map<int, int> leaves_after;     // rank -> round; the others leave at the end
  std::map<int, Nanoseconds> lingers;  // rank -> how long it computes before it leaves
  bool waits_at_exit = false;          // who leaves at the end waits for the others without a limit
  bool idle_ranks_doze = false;        // a rank with nothing pending looks at its mail once a second
  bool wire_tells = false;             // the wire between hosts tells that a connection is lost, as TCP does
  Nanoseconds link_delay = 0, step_delay = 0, program_delay = 0, batch_delay = 0;  // at most

  // Two ranks have a connection of the wire; those of one host have its memory.
  bool Connected(int one, int other) const { return host_of.at(one) != host_of.at(other); }
  // The world ends before its time.
  bool fails() const;
  std::string HostName(int rank) const { return "host" + std::to_string(host_of.at(rank)); }
  std::string Text() const;
};

// A plan and what is kept of it. Its text is what a failure prints and `simulate --case` takes.
struct Case {
  using Kept = std::optional<std::set<int>>;  // everything, unless it says what
  uint64_t seed = 1;
  int size = 0;  // 0: the seed chooses
  Kept ranks, turns, faults;

  std::string Text() const;
  // False for a text that is no case.
  static bool Parse(const std::string& text, Case* parsed);
};

// How the error names the list of a process set: [0, 2, 5]
std::string RanksListText(const std::vector<int64_t>& ranks);

// How a text about a turn's operation begins: what it is, and where if not in the world.
std::string SubjectIn(const Turn& turn);

Plan Generate(uint64_t seed, int size);
Plan MakePlan(const Case& from);
Verdict ExpectedVerdict(const Plan& plan, const Turn& turn);

}  // namespace simulation
}  // namespace ringtrain
#endif  // RINGTRAIN_TESTS_SIMULATION_PLAN_H_
