// SimulatedWorld: one world of an elastic job as one of its members has it: the product's Protocol, driven as a rank's
// driver thread drives it. What is simulated is the data plane: each member sends what it gives to an operation to all
// others, and a result is the set of that.
#ifndef RINGTRAIN_TESTS_SIMULATION_ELASTIC_WORLD_H_
#define RINGTRAIN_TESTS_SIMULATION_ELASTIC_WORLD_H_

#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "elastic/membership.h"
#include "elastic/step.h"
#include "judge.h"
#include "plan.h"
#include "world/protocol.h"

namespace ringtrain {
namespace elastic {

constexpr char kStateName[] = "state";  // of the broadcast

// What one rank gives to an operation; each kind of operation has its own.
struct Gift {
  Contribution contribution;
  Standing standing;
  int32_t place = -1;
  bool pauses = false;
  bool fits = true;  // what the rank has to what others have
  Progress progress;
};
using Gifts = std::map<Uid, Gift>;

// What ranks send each other. Each names its epoch.
struct Message {
  enum Kind { kFrame, kGift, kHello, kHelloAnswer };
  Message(Kind its_kind, const EpochId& of, const Uid& sender) : kind(its_kind), epoch(of), from(sender) {}

  Kind kind;
  EpochId epoch;
  Uid from;
  std::string bytes;  // kFrame
  std::string name;   // kGift
  Gift gift;
};

// What the other ranks of a host see of a process in a world.
struct Life {
  bool left = false, died = false;
  uint64_t beats = 0;
};

class Surroundings {
 public:
  virtual ~Surroundings() = default;
  virtual Nanoseconds now() const = 0;
  virtual void Send(const Uid& from, const Uid& to, Message message) = 0;
  virtual void TellAgent(const Uid& from, const ControlFrame& frame) = 0;
  virtual void Call(const Uid& process, Nanoseconds delay) = 0;  // Step of it
  virtual bool has_died(const Uid& process) const = 0;
  virtual Life& life(const Uid& process, const EpochId& epoch) = 0;
  // Why the ranks of a host end an epoch; empty until one of them does.
  virtual std::string& notice(const std::string& host, const EpochId& epoch) = 0;
  virtual void Exit(const Uid& process, int exit_code) = 0;
  virtual void Trace(const Uid& process, const std::string& text) = 0;
};

class SimulatedWorld {
 public:
  SimulatedWorld(const Plan& plan, const Process& process, const ControlFrame& form, Judge* judge,
                 Surroundings* surroundings);

  const EpochId& epoch() const { return epoch_; }
  const std::vector<Member>& members() const { return members_; }
  int rank() const { return world_.rank; }

  // ---- the program ----
  void Submit(const std::string& name, const Gift& gift);
  // Of an operation that has been submitted; null as long as there is none.
  const Gifts* ResultOf(const std::string& name) const;
  void Forget(const std::string& name) { results_.erase(name); }
  // Nothing here will have a result any more, or not that.
  bool has_ended() const { return ended_; }
  bool has_failed(const std::string& name) const { return ended_ || failed_.count(name) > 0; }
  // Members of whom nothing is heard; and those that have not come to an operation, which was given up.
  Uids Silent() const;
  Uids unheard() const;  // lately
  const Uids& missing() const { return missing_; }
  // This rank goes, or was told that the world is over.
  void Leave();
  void Abort();

  // ---- what comes ----
  void Receive(Message* message);
  void Step();
  Nanoseconds next_look() const { return ended_ ? kNever : protocol_->next_look(); }

 private:
  Uids UidsOf(const std::vector<int>& ranks) const;
  void FinishResults();
  bool Complete(const std::string& name) const;
  void LookForTheDead();
  SignsOfLife Signs() const;
  void SendToAll(const Message& message);
  Message Of(Message::Kind kind) const { return {kind, epoch_, process_.uid}; }

  void CarryOut();
  void Do(rank_effect::Send& send);
  void Do(rank_effect::Start& start);
  void Do(rank_effect::Fail& fail);
  void Do(rank_effect::Beat&);
  void Do(rank_effect::NoteCause& note);
  void Do(rank_effect::Wake& wake);
  void Do(rank_effect::End&) { ended_ = true; }
  template <typename Other>
  void Do(Other&) {}

  const Process process_;
  const EpochId epoch_;
  const std::vector<Member> members_;
  Judge* const judge_;
  Surroundings* const surroundings_;
  World world_;
  Options options_;
  std::unique_ptr<Protocol> protocol_;
  bool ended_ = false;
  std::map<std::string, Gift> given_;     // by this rank, by name
  std::map<std::string, Gifts> arrived_;  // of operations that have no result yet
  std::map<std::string, Gifts> results_;
  std::set<std::string> failed_;
  Uids missing_, unheard_;
  Nanoseconds looked_at_ = kNever;
  std::deque<effect::Execute> batches_;
  std::map<Uid, uint64_t> arrivals_;
  RankEffects effects_;
};

}  // namespace elastic
}  // namespace ringtrain
#endif  // RINGTRAIN_TESTS_SIMULATION_ELASTIC_WORLD_H_
