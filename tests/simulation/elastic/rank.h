// SimulatedRank: a process of an elastic job: the product's Membership, Transaction and, for each epoch anew, Protocol,
// driven as a rank's driver thread will drive them; and a program that trains. What is simulated is the data plane:
// each member sends its contribution to all others, and a result is the set of them.
#ifndef RINGTRAIN_TESTS_SIMULATION_ELASTIC_RANK_H_
#define RINGTRAIN_TESTS_SIMULATION_ELASTIC_RANK_H_

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/membership.h"
#include "core/protocol.h"
#include "core/transaction.h"
#include "judge.h"
#include "plan.h"
#include "random.h"

namespace ringtrain {
namespace elastic {

constexpr char kProgram[] = "program";  // the digest of what all train

// What ranks send each other. Each names its epoch.
struct Message {
  enum Kind { kFrame, kContribution, kWhole, kHello, kHelloAnswer, kState, kRuns } kind = kFrame;
  EpochId epoch;
  Uid from;
  std::string bytes;  // kFrame
  std::string name;   // kContribution
  Contribution contribution;
  Step step = 0;  // kWhole
  bool pauses = false;
  StepProgress progress;  // kState
};

// What the other ranks of a host see of a process.
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
  virtual Life& life(const Uid& process) = 0;
  // Why the ranks of a host end an epoch; empty until one of them does.
  virtual std::string& notice(const std::string& host, const EpochId& epoch) = 0;
  virtual void Exit(const Uid& process, int exit_code) = 0;
  virtual void Trace(const Uid& process, const std::string& text) = 0;
};

class SimulatedRank {
 public:
  SimulatedRank(const Plan& plan, Process process, const std::string& program, Judge* judge,
                Surroundings* surroundings);

  void Begin();
  void Hear(const ControlFrame& frame);
  void Receive(Message message);
  void Step();
  void Notice();
  bool is_member() const { return membership_.state() == Membership::State::kMember; }

 private:
  struct Window {  // of the program, with its inputs
    std::vector<Positions> samples;
    std::map<std::string, Contribution> inputs;
    std::vector<std::string> to_submit;
    bool closed = false;
  };

  void Program();
  void Submit(const std::string& name);
  Membership::Arrival WhenToTake(const Message& message) const;
  void Take(Message& message);
  void TakeKept();
  void Contribute(const std::string& name, const Contribution& contribution);
  void FinishResults();
  void HeedNotice();
  void LookForTheDead();
  SignsOfLife Signs() const;
  Uids UidsOfRanks(const std::vector<int>& ranks) const;

  void CarryOutProtocol();
  void CarryOut(rank_effect::Send& send);
  void CarryOut(rank_effect::Start& start);
  void CarryOut(rank_effect::Fail& fail);
  void CarryOut(rank_effect::Beat&);
  void CarryOut(rank_effect::NoteCause& note);
  void CarryOut(rank_effect::Wake& wake);
  void CarryOut(rank_effect::End&) { broken_ = true; }
  template <typename Other>
  void CarryOut(Other&) {}

  void CarryOutMembership();
  void CarryOutTransaction();
  void Do(membership_action::Send& send);
  void Do(membership_action::Abandon&);
  void Do(membership_action::Connect& connect);
  void Do(membership_action::GiveState& give);
  void Do(membership_action::Run&);
  void Do(membership_action::Depart&);
  void Do(membership_action::Fence& fence);
  void Do(TransactionEffect& effect) {
    std::visit([this](auto& what) { Do(what); }, effect);
  }
  void Do(transaction_effect::TellWhole& tell);
  void Do(transaction_effect::Release& release);
  void Do(transaction_effect::Submit& submit);
  void Do(transaction_effect::Pause&);

  void SendToAll(const Message& message);
  void Arm();
  Message Of(Message::Kind kind, const EpochId& epoch) const;

  const Plan& plan_;
  const Process process_;
  const std::string program_;
  Judge* const judge_;
  Surroundings* const surroundings_;
  simulation::Random random_;
  Transaction transaction_;
  Membership membership_;
  bool over_ = false, finished_ = false;

  // The program.
  std::optional<Window> window_;
  Nanoseconds program_at_ = 0;

  // The present epoch.
  Options options_;
  World world_;
  std::unique_ptr<Protocol> protocol_;
  bool broken_ = false;  // it has ended for this rank, which waits to be told
  std::deque<effect::Execute> batches_;
  std::map<std::string, std::map<Uid, Contribution>> arrived_;  // by name
  Sums sums_;
  std::map<Uid, uint64_t> arrivals_;
  std::deque<Message> kept_;  // for a later epoch
  EpochId connecting_;        // the world that forms

  MembershipActions actions_;
  TransactionEffects transaction_effects_;
  RankEffects effects_;
  Nanoseconds armed_ = kNever;
};

}  // namespace elastic
}  // namespace ringtrain
#endif  // RINGTRAIN_TESTS_SIMULATION_ELASTIC_RANK_H_
