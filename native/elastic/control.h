// Control: what ranks, agents and the authority of an elastic job tell each other (membership.h, authority.h). A rank
// speaks to the agent of its host, the agent to the launcher; each of these connections keeps the order.
//
// A frame is a byte for the type, then the fields that its row below names. Integers have variable length
// (base/bytes.h).
#ifndef RINGTRAIN_ELASTIC_CONTROL_H_
#define RINGTRAIN_ELASTIC_CONTROL_H_

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

namespace ringtrain {

// Who a process is, for its whole life: random, given by the agent that starts it.
struct Uid {
  uint64_t high = 0, low = 0;
  bool operator==(const Uid& other) const { return high == other.high && low == other.low; }
  bool operator!=(const Uid& other) const { return !(*this == other); }
  bool operator<(const Uid& other) const { return std::tie(high, low) < std::tie(other.high, other.low); }
};
using Uids = std::vector<Uid>;

// The number of a world: counts rise, and the nonce tells two launchers apart that have granted the same one.
struct EpochId {
  uint64_t count = 0, nonce = 0;  // count 0: none yet
  bool operator==(const EpochId& other) const { return count == other.count && nonce == other.nonce; }
  bool operator!=(const EpochId& other) const { return !(*this == other); }
  bool operator<(const EpochId& other) const { return std::tie(count, nonce) < std::tie(other.count, other.nonce); }
};

enum class ControlType : uint8_t {
  kReady = 1,     // rank: here I am. process, program, epoch: the last one that it has been a member of, stopped
  kDead = 2,      // agent: this process has ended. process, exit_code, or -signal
  kSuspect = 3,   // rank: epoch; uids: of whom it hears nothing, or (hangs) who do not come, or (refused) who join with
                  // other values; none: it cannot connect
  kStop = 4,      // authority to ranks: epoch; at_release: pause between two steps, else at once. Then report
  kReport = 5,    // rank: epoch: which Stop it answers; process, admits, holds_state; uids: whom it did not hear lately
  kForm = 6,      // authority to ranks: epoch, members in rank order, key
  kFormed = 7,    // rank: epoch; process: it has reached all members
  kGo = 8,        // authority to ranks: epoch; at_release: pause between its first two steps
  kLeave = 9,     // rank: process wants to leave; finished: its program has come to its end. Authority to it: do
  kEvict = 10,    // authority to agent and rank: process is not wanted any longer, because of text
  kAsk = 11,      // authority to agent and its ranks: who are you?
  kPresent = 12,  // agent: uids: its processes; record: the newest Form that it has passed on;
                  // finished: some rank here has come to the end of its program
  kBeat = 13      // authority to agent and its ranks, and agent to authority: I live
};

struct Process {
  Uid uid;
  std::string host;
  int slot = 0;         // on that host
  std::string address;  // where it listens
};

struct Member {
  Process process;
  bool joins = false;  // takes the state over from those that do not
};

struct ControlFrame {
  ControlType type = ControlType::kBeat;
  EpochId epoch;
  Process process;
  std::string program;  // digest of what must be equal on all ranks
  bool stopped = false, at_release = false, holds_state = false, finished = false, hangs = false, refused = false;
  bool admits = true;  // somebody new, to the next world
  int exit_code = 0;
  Uids uids;
  std::vector<Member> members;
  std::string key;  // 32 bytes, of the connections of this epoch
  std::string text;
  std::string record;

  std::string Encode() const;
  // False for bytes that are no frame.
  static bool Decode(const std::string& bytes, ControlFrame* frame);
};

Uids UidsOf(const std::vector<Member>& members);

}  // namespace ringtrain
#endif  // RINGTRAIN_ELASTIC_CONTROL_H_
