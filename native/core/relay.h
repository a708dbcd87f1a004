// Relay: one member's place in the tree through which a process set negotiates, and what is held there. Sans-I/O.
//
// The lowest member of each host stands for it: what the others of its host are ready for goes to it, and the lowest
// members of the hosts form a tree, with the coordinator at its root. A relay holds what comes from behind it until all
// behind it are ready for the same, and passes that on as one share; a share says who, not how often, so a frame grows
// with what differs and not with the members. Nothing can run before all are ready for it, so holding delays no
// operation. What is not complete goes on after kHold, so that the coordinator knows who is missing, and a frame that
// is not mere readiness goes on at once, behind what was held: the order of what one member sends is kept.
//
// What the coordinator sends goes down the same way, so the order for each member is kept there too.
#ifndef RINGTRAIN_CORE_RELAY_H_
#define RINGTRAIN_CORE_RELAY_H_

#include <map>
#include <string>
#include <vector>

#include "base/clock.h"
#include "core/frame.h"
#include "core/member_set.h"

namespace ringtrain {

class Relay {
 public:
  static constexpr Nanoseconds kHold = 1000000;

  struct Child {
    int member;
    MemberSet behind;  // it and those for which it stands
  };

  // hosts: by member, any numbers that are equal for members of one host. fanout: hosts below one in the tree.
  Relay(const std::vector<int>& hosts, int me, int fanout);

  int parent() const { return parent_; }  // -1 of the coordinator
  const std::vector<Child>& children() const { return children_; }
  bool IsChild(int member) const;
  // Others are behind it, or it is the coordinator.
  bool relays() const { return parent_ < 0 || !children_.empty(); }

  // ---- towards the coordinator ----
  // A frame of a member behind this one, or of this one itself.
  void Take(Nanoseconds now, int member, const Frame& frame);
  void Take(Nanoseconds now, ReadyShare share);
  // What is to go on now; no shares if nothing.
  Frame Gathered(Nanoseconds now);
  Nanoseconds next_timer() const { return held_.empty() ? kNever : hold_until_; }

  // ---- from the coordinator ----
  struct Onward {
    int member;  // a child
    Frame frame;
  };
  // What goes to the children, so that these members get the frame; none: all.
  std::vector<Onward> Spread(const std::vector<int>& members, const std::string& frame) const;

 private:
  void PlaceIn(const std::vector<int>& hosts, int me, int fanout);
  void Hold(Nanoseconds now, ReadyShare share);
  bool IsStale(const ReadyShare& share) const { return share.frame.empty() && share.schedule < newest_schedule_; }
  void DropStale();
  bool IsWhole(const MemberSet& members) const;
  std::vector<ReadyShare> TakeWhole();

  int members_;
  int parent_ = -1;
  std::vector<Child> children_;
  MemberSet expected_;  // who is behind it, itself included, but for those that have joined or left
  MemberSet absent_;    // those
  struct Held {
    ReadyShare share;
    Nanoseconds last_at;
  };
  std::vector<Held> held_;      // in the order in which they came
  size_t first_mergeable_ = 0;  // of held_: those before it lie in front of a frame that goes as it is
  Nanoseconds hold_until_ = kNever;
  uint32_t newest_schedule_ = 0;  // that any behind it has begun: what was announced before is void
};

}  // namespace ringtrain
#endif  // RINGTRAIN_CORE_RELAY_H_
