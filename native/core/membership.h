// Membership: one rank's side of an elastic job, sans-I/O: of which world it is a member, and when that ends.
//
//   starting → ready → member(e) → stopped(e) → member(e') → … → leaving      from any: fenced
//
// The authority (authority.h) numbers the worlds. A rank acts on its word alone, never on what it sees itself: whom it
// does not hear it suspects, and goes on or stands still until it is told. Between two worlds it is stopped: it has
// reported how far it is (transaction.h), and nothing of the old epoch has an effect on it any more. A Form names the
// next world and settles the open window at once, which is right whether that world ever runs or not; a Go runs it,
// once all its members have reached each other. Epochs rise: what names a smaller count than this rank has heard of is
// of the past.
//
// Who leaves on notice stays a member until the authority lets it go, which it does where no window is open. Who hears
// nothing of the authority for the grace ends itself: a rank that is cut off cannot know who goes on without it.
//
// Driven by (b) a rank's driver thread. It decodes each frame that comes through the agent and hands it to Arrived; it
// asks WhenToTake before it looks at any frame or message of another rank; it calls Reached for each member once a
// connection to it stands in both directions, Look at each look of the protocol's liveness, Tick at next_timer(). It
// carries the actions out in order, those of the transaction too, and hands what the transaction says to Paused. A
// fenced rank ends its process, and whatever it still holds is of no use to anyone.
#ifndef RINGTRAIN_CORE_MEMBERSHIP_H_
#define RINGTRAIN_CORE_MEMBERSHIP_H_

#include <optional>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/clock.h"
#include "core/control.h"
#include "core/transaction.h"

namespace ringtrain {

namespace membership_action {
struct Send {  // to the authority, through the agent
  ControlFrame frame;
};
struct Abandon {};  // what is under way in the present epoch, and its connections
struct Connect {    // to all members of the world that forms; the same may be asked for again under a higher count
  ControlFrame form;
};
struct GiveState {  // a share of the state to a rank that joins the world that forms
  Uid to;
};
// The world that was formed begins; what the transaction submits again belongs to it. All its members are to be told
// (PeerRuns): the launcher may have ended between two of its words.
struct Run {};
struct Depart {};  // the process may end, with success
struct Fence {     // the process must end
  std::string cause;
};
}  // namespace membership_action
using MembershipAction = std::variant<membership_action::Send, membership_action::Abandon, membership_action::Connect,
                                      membership_action::GiveState, membership_action::Run, membership_action::Depart,
                                      membership_action::Fence, TransactionEffect>;
using MembershipActions = std::vector<MembershipAction>;

struct MembershipOptions {
  Nanoseconds silence = 0;  // that is suspected
  Nanoseconds grace = 0;    // without a word of the authority
  // Whoever joins takes the state over by operations of the world that it joins, and not before that runs.
  bool state_in_world = false;
};

class Membership {
 public:
  enum class State { kStarting, kReady, kMember, kStopped, kLeaving, kFenced };
  enum class Arrival { kTake, kKeep, kRefuse };

  Membership(Process me, std::string program, const MembershipOptions& options, Transaction* transaction);

  // ---- events ----
  void Begin(Nanoseconds now, MembershipActions* actions);
  void Arrived(Nanoseconds now, const ControlFrame& frame, MembershipActions* actions);
  // A member of the world that forms can be spoken to and heard; of this rank itself: its side of that world is open.
  void Reached(const EpochId& epoch, const Uid& peer, MembershipActions* actions);
  // A member runs this world, so that all may.
  void PeerRuns(const EpochId& epoch, MembershipActions* actions);
  // A donor's share of the state has come, with how far it is.
  void TookState(const EpochId& epoch, const Uid& donor, const StepProgress& progress, MembershipActions* actions);
  // Members that were silent for half of the bound, and for all of it or whose connection is lost.
  void Look(Uids quiet, Uids silent, MembershipActions* actions);
  // Members that have not come to an operation of the present world, which was given up.
  void Missing(Uids uids, MembershipActions* actions) const;
  // The transaction pauses.
  void Paused(MembershipActions* actions);
  // Whether somebody new may be in the next world; not where the program is within a step that is to be done again.
  void Admits(bool admits) { admits_ = admits; }
  // The state has been taken over in the world that runs: this rank may give it to others from here on.
  void GotState() { lacks_state_ = false; }
  // Where it listens for the connections of the next world.
  void ListensAt(std::string address) { me_.address = std::move(address); }
  // What has been formed cannot be connected, and this rank does not know because of whom.
  void CannotConnect(MembershipActions* actions);
  // Somebody wants this rank to leave.
  void Noticed(MembershipActions* actions);
  // The program has come to its end.
  void Finished(MembershipActions* actions);
  void Tick(Nanoseconds now, MembershipActions* actions);
  Nanoseconds next_timer() const;

  // Of a frame or message of another rank: to be taken now, kept until the world that forms runs, or refused.
  Arrival WhenToTake(const EpochId& epoch) const;

  State state() const { return state_; }
  const EpochId& epoch() const { return epoch_; }  // of the last world that it has been a member of
  const std::vector<Member>& members() const { return members_; }
  bool holds_state() const { return epoch_.count > 0; }

 private:
  void Stop(const ControlFrame& stop, MembershipActions* actions);
  void Form(Nanoseconds now, const ControlFrame& form, MembershipActions* actions);
  void Go(const EpochId& epoch, bool pauses, MembershipActions* actions);
  void Halt(const EpochId& epoch, MembershipActions* actions);
  void TellFormed(MembershipActions* actions);
  void TellReady(MembershipActions* actions) const;
  void TellSilent(MembershipActions* actions) const;
  void SuspectUnreached(Nanoseconds now, MembershipActions* actions);
  void Fence(std::string cause, MembershipActions* actions);
  void Send(ControlFrame frame, MembershipActions* actions) const;
  bool over() const { return state_ == State::kLeaving || state_ == State::kFenced; }

  Process me_;
  const std::string program_;
  const MembershipOptions options_;
  Transaction* const transaction_;
  State state_ = State::kStarting;
  EpochId epoch_;
  std::vector<Member> members_;  // of it
  EpochId newest_;               // of all that this rank has heard of
  bool lacks_state_ = false;     // it has joined, and has not got the state yet
  bool admits_ = true;
  Uids quiet_, silent_;  // members of it: as Look has them
  Nanoseconds heard_ = 0, last_tick_ = 0;

  // The world that forms.
  std::optional<ControlFrame> form_;
  bool formed_ = false, joins_ = false;
  std::set<Uid> reached_, donors_;
  Nanoseconds reach_by_ = kNever;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_CORE_MEMBERSHIP_H_
