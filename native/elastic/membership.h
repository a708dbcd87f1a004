// Membership: one rank's side of an elastic job, sans-I/O: of which world it is a member, and when that ends.
//
//   starting → ready → member(e) → stopped(e) → member(e') → … → leaving      from any: fenced
//
// The authority (authority.h) numbers the worlds. A rank acts on its word alone, never on what it sees itself: whom it
// does not hear it suspects, and goes on or stands still until it is told. Between two worlds it is stopped, and
// nothing of the old epoch has an effect on it any more. A Form names the next world; a Go runs it, once all its
// members have reached each other. How far the members are with a step they settle there (elastic/step.h). Epochs rise:
// what names a smaller count than this rank has heard of is of the past.
//
// State is taken over by operations of a world, in the first one by all. Until a rank has, it holds none to the
// authority. Within a step that is to be done again nobody may join: a rank says with its report whether it admits
// somebody.
//
// Who leaves on notice stays a member until the authority lets it go, which it does between two steps. That nothing is
// heard of the authority the agent notices, and ends its ranks.
//
// Driven by a thread of the rank. It decodes each frame that comes through the agent and hands it to Arrived, opens the
// world that a Connect names, and says Connected. The program's thread says WorldEnded where it has come to the end of
// its world, Admits and GotState. Both carry the actions out in order. A fenced rank ends its process, and whatever it
// still holds is of no use to anyone.
#ifndef RINGTRAIN_ELASTIC_MEMBERSHIP_H_
#define RINGTRAIN_ELASTIC_MEMBERSHIP_H_

#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "elastic/control.h"

namespace ringtrain {

namespace membership_action {
struct Send {  // to the authority, through the agent
  ControlFrame frame;
};
struct Abandon {};  // what is under way in the present epoch, and its connections
struct Connect {    // to all members of the world that forms; the same may be asked for again under a higher count
  ControlFrame form;
};
struct Run {};     // the world that was formed begins
struct Pause {};   // the world is to be left by all members together, between two steps on which they agree
struct Depart {};  // the process may end, with success
struct Fence {     // the process must end
  std::string cause;
};
}  // namespace membership_action
using MembershipAction =
    std::variant<membership_action::Send, membership_action::Abandon, membership_action::Connect,
                 membership_action::Run, membership_action::Pause, membership_action::Depart, membership_action::Fence>;
using MembershipActions = std::vector<MembershipAction>;

class Membership {
 public:
  enum class State { kStarting, kReady, kMember, kStopped, kLeaving, kFenced };

  // program: digest of what must be equal on all ranks.
  Membership(Process me, std::string program) : me_(std::move(me)), program_(std::move(program)) {}

  // ---- the authority ----
  void Begin(MembershipActions* actions);
  void Arrived(const ControlFrame& frame, MembershipActions* actions);

  // ---- worlds ----
  // All members of the world with this count can be spoken to and heard; or not, and this rank does not know because of
  // whom.
  void Connected(uint64_t count, bool well, MembershipActions* actions);
  // Members whose connection is lost, or that are silent.
  void Suspect(Uids silent, MembershipActions* actions);
  // Members that this rank had not heard for half of the bound of silence when it looked last. It is told with the next
  // report: of a cut the first who reaches the bound has all others stopped, before they say whom they do not hear.
  void Unheard(Uids unheard);
  // Members that have not come to an operation of the present world, which was given up.
  void Missing(const Uids& uids, MembershipActions* actions) const;
  // Members that join with values which do not fit, and were told so: the others go on without them.
  void Refuse(const Uids& uids, MembershipActions* actions) const;

  // ---- the program ----
  // It has left its world, and was not told to.
  void WorldEnded(MembershipActions* actions);
  // Whether somebody new may be in the next world; not where the program is within a step that is to be done again.
  void Admits(bool admits) { admits_ = admits; }
  // The state has been taken over in the world that runs: this rank may give it to others from here on.
  void GotState() { holds_state_ = true; }
  // Where it listens for the connections of the next world.
  void ListensAt(std::string address) { me_.address = std::move(address); }
  // It has come to its end.
  void Finished(MembershipActions* actions);

  State state() const { return state_; }
  const EpochId& epoch() const { return epoch_; }  // of the last world that it has been a member of
  const std::vector<Member>& members() const { return members_; }

 private:
  void Stop(const ControlFrame& stop, MembershipActions* actions);
  void Form(const ControlFrame& form, MembershipActions* actions);
  void Go(const ControlFrame& go, MembershipActions* actions);
  void Halt(const EpochId& epoch, MembershipActions* actions);
  void TellReady(MembershipActions* actions) const;
  void TellSilent(MembershipActions* actions) const;
  enum class Fault { kSilent, kHangs, kRefused };
  void TellSuspects(const Uids& uids, Fault fault, MembershipActions* actions) const;
  void Fence(std::string cause, MembershipActions* actions);
  void Send(ControlFrame frame, MembershipActions* actions) const;
  bool over() const { return state_ == State::kLeaving || state_ == State::kFenced; }
  bool has_begun() const { return epoch_.count > 0; }

  Process me_;
  const std::string program_;
  State state_ = State::kStarting;
  EpochId epoch_;
  std::vector<Member> members_;  // of it
  EpochId newest_;               // of all that this rank has heard of
  bool holds_state_ = false;     // that all train
  bool admits_ = true;
  Uids silent_, unheard_;  // members of the last world

  // The world that forms.
  std::optional<ControlFrame> form_;
  bool formed_ = false;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_ELASTIC_MEMBERSHIP_H_
