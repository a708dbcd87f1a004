// Transaction: one rank's side of a step that survives a change of the world. Sans-I/O, like protocol.h.
//
// A window is all operations between two updates of an optimizer; its step is the update behind it, and has a number
// that rises by one. Rules, of which everything else follows:
//
//   whole(s)     this rank holds every result of window s. Every member tells all others.
//   released(s)  all members are whole. Only now a rank may use the results, or let go of the inputs.
//
// So whoever has released s knows that every member holds s, and two members differ by one step at most. When the world
// changes, each survivor reports its Standing: the last step that it has released, and how far it is with the window
// after it. Settle, which is pure, makes one answer of all reports:
//
//   release   somebody has released r + 1, or all are whole for it: all release it
//   redo      else nobody can have released it: all drop its results and submit the same inputs in the next epoch
//
// No survivor ever needs the state of another, no input is computed again, and what the outside may have seen of a rank
// that is gone stays true.
//
// Samples. The members take equal shares of one order of positions (SampleOrder), in rank order, so that progress is
// one number. A window that is open when the world changes keeps its shares; those of members that are gone go back,
// and are the first to be dealt again. The next window is dealt among the new members. Who is new is therefore only
// admitted where no window is open ("fresh"), and whoever contributes to a window is a member of the epoch that gives
// its results: the divisor of an average is that epoch's size.
//
// Pauses. A member that was asked to stop at a release says so together with whole(s). All members hear it before
// released(s), so all pause behind the same step.
//
// Driven by the rank's driver thread, which owns it together with membership.h: the program's calls, results and peers'
// words go in, effects come out, to be carried out in this order.
#ifndef RINGTRAIN_CORE_TRANSACTION_H_
#define RINGTRAIN_CORE_TRANSACTION_H_

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <variant>
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

using Step = uint64_t;

// How far a rank is with the window after the last one that it has released.
enum class WindowStage : uint8_t {
  kIdle = 0,   // nothing of it has been drawn
  kBegun = 1,  // its share of the samples has been drawn
  kWhole = 2   // and it holds every result
};

struct Standing {
  Step released = 0;
  WindowStage stage = WindowStage::kIdle;
};

// What follows from the survivors' standings.
struct Settlement {
  Step released = 0;  // by all; a window behind it that was begun is done again
  bool fresh = true;  // none was: the next window is dealt among the new members
};
Settlement Settle(const std::vector<Standing>& survivors);

// first <= position < last
struct Positions {
  uint64_t first = 0, last = 0;
  bool operator==(const Positions& other) const { return first == other.first && last == other.last; }
};

// What is left of an epoch's order: a few ranges that were given back, then everything from `next` on.
class SampleOrder {
 public:
  // `count` positions, counted from the one at `from` of what is left.
  std::vector<Positions> Slice(uint64_t from, uint64_t count) const;
  void Take(uint64_t count);
  // Positions that had been taken; each comes before all that never were.
  void GiveBack(const std::vector<Positions>& positions);
  const std::vector<Positions>& given_back() const { return given_back_; }
  uint64_t next() const { return next_; }

 private:
  std::vector<Positions> given_back_;  // ascending, apart from each other
  uint64_t next_ = 0;
};

// What a rank that joins takes over beside the tensors.
struct StepProgress {
  Step released = 0;
  SampleOrder order;
};

namespace transaction_effect {
struct TellWhole {  // to all members of this epoch
  Step step;
  bool pauses;
};
struct Release {  // the results may be used, the inputs let go of
  Step step;
  size_t divisor;
};
struct Submit {  // the kept inputs, once more
  std::vector<std::string> names;
};
struct Pause {};  // no window begins before the next epoch
}  // namespace transaction_effect
using TransactionEffect = std::variant<transaction_effect::TellWhole, transaction_effect::Release,
                                       transaction_effect::Submit, transaction_effect::Pause>;
using TransactionEffects = std::vector<TransactionEffect>;

class Transaction {
 public:
  // share: positions that each member draws for a window.
  Transaction(Uid me, uint64_t share) : me_(me), share_(share) {}

  // ---- the program ----
  bool may_begin() const { return running_ && !paused_ && stage_ == WindowStage::kIdle; }
  // This rank's share of the window that begins.
  std::vector<Positions> Begin();
  // An operation of the window; its input is kept. True if it is to be submitted in the present epoch at once, else
  // that follows when the next one begins.
  bool Submitted(const std::string& name);
  // There are no more operations in the window.
  void Closed(TransactionEffects* effects);

  // ---- the present epoch ----
  void ResultHeld(const std::string& name, TransactionEffects* effects);
  void PeerIsWhole(const Uid& peer, Step step, bool pauses, TransactionEffects* effects);
  // Pause behind the next release.
  void PauseAtRelease() { asked_to_pause_ = true; }

  // ---- a change of the world ----
  // Nothing is held or released from here on but by Settle.
  Standing Stop();
  // Of the survivors, and who they are now. False if the settlement does not follow from what this rank has reported.
  bool Settle(const Settlement& settlement, const Uids& members, TransactionEffects* effects);
  void Adopt(const StepProgress& progress);  // of a rank that joins
  // pauses: behind the first release.
  void Run(const Uids& members, bool pauses, TransactionEffects* effects);

  Step released() const { return released_; }
  bool running() const { return running_; }
  StepProgress progress() const { return {released_, order_}; }
  size_t kept() const { return operations_.size(); }  // inputs

 private:
  void BecomeWhole(TransactionEffects* effects);
  void ReleaseIfAllAreWhole(TransactionEffects* effects);
  void Release(TransactionEffects* effects);
  std::vector<Positions> ShareOf(const Uid& member) const;

  const Uid me_;
  const uint64_t share_;
  Step released_ = 0;
  SampleOrder order_;  // without what the open window will take
  Uids members_;       // of the newest world that was formed, whether it has run or not: others may have begun in it
  bool running_ = false, paused_ = false, asked_to_pause_ = false;
  Step pause_after_ = 0;
  std::map<Uid, Step> whole_;  // by member, in this epoch

  // The open window.
  WindowStage stage_ = WindowStage::kIdle;
  Uids dealt_;  // to whom, in the order of the shares
  Uids gone_;   // of those
  bool closed_ = false;
  std::map<std::string, bool> operations_;  // by name: its result is held
};

}  // namespace ringtrain
#endif  // RINGTRAIN_CORE_TRANSACTION_H_
