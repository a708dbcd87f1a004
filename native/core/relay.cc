#include "core/relay.h"

#include <algorithm>
#include <utility>

namespace ringtrain {
namespace {

// Nothing but operations that are ready, none of which changes who takes part.
bool IsMereReadiness(const Frame& frame) {
  return frame.type == FrameType::kReady && frame.resent == 0 && frame.refusals.empty() &&
         std::none_of(frame.requests.begin(), frame.requests.end(),
                      [](const Request& request) { return request.operation == Operation::kJoin; });
}

bool TakesLeave(const Frame& frame) {
  return frame.type == FrameType::kGoodbye ||
         std::any_of(frame.requests.begin(), frame.requests.end(),
                     [](const Request& request) { return request.operation == Operation::kJoin; });
}

}  // namespace

Relay::Relay(const std::vector<int>& hosts, int me, int fanout)
    : members_(static_cast<int>(hosts.size())), expected_(members_), absent_(members_) {
  PlaceIn(hosts, me, fanout);
}

void Relay::PlaceIn(const std::vector<int>& hosts, int me, int fanout) {
  std::map<int, size_t> place_of;            // of a host in the order of their lowest members
  std::vector<std::vector<int>> members_of;  // by place
  for (int member = 0; member < members_; ++member) {
    const size_t place = place_of.emplace(hosts[static_cast<size_t>(member)], members_of.size()).first->second;
    if (place == members_of.size()) members_of.emplace_back();
    members_of[place].push_back(member);
  }
  const auto width = static_cast<size_t>(fanout);
  const size_t mine = place_of.at(hosts[static_cast<size_t>(me)]);
  const std::vector<int>& here = members_of[mine];
  expected_.Add(me);
  if (here[0] != me) {
    parent_ = here[0];
    return;
  }
  if (mine > 0) parent_ = members_of[(mine - 1) / width][0];
  for (int member : here) {
    if (member == me) continue;
    children_.push_back({member, MemberSet(members_)});
    children_.back().behind.Add(member);
  }
  for (size_t below = mine * width + 1; below <= mine * width + width && below < members_of.size(); ++below) {
    children_.push_back({members_of[below][0], MemberSet(members_)});
    Child& child = children_.back();
    // Level by level: the places behind one place are a range on each level.
    for (size_t first = below, end = below + 1; first < members_of.size();
         first = first * width + 1, end = end * width + 1)
      for (size_t place = first; place < std::min(end, members_of.size()); ++place)
        for (int member : members_of[place]) child.behind.Add(member);
  }
  for (const Child& child : children_) expected_.Add(child.behind);
}

bool Relay::IsChild(int member) const {
  return std::any_of(children_.begin(), children_.end(), [&](const Child& child) { return child.member == member; });
}

// ---- towards the coordinator ----

void Relay::Take(Nanoseconds now, int member, const Frame& frame) {
  ReadyShare share;
  share.members = MemberSet(members_);
  share.members.Add(member);
  share.last = member;
  if (IsMereReadiness(frame)) {
    share.schedule = frame.schedule;
    share.ids = frame.ids;
    share.requests = frame.requests;
  } else {
    share.frame = frame.Encode();
  }
  Take(now, std::move(share));
}

void Relay::Take(Nanoseconds now, ReadyShare share) {
  if (absent_.HasAny(share.members)) {  // the join is over
    absent_.Remove(share.members);
    expected_.Add(share.members);
  }
  if (share.frame.empty()) {
    newest_schedule_ = std::max(newest_schedule_, share.schedule);
    if (IsStale(share)) return;
    DropStale();
    return Hold(now, std::move(share));
  }
  Frame frame;
  if (Frame::Decode(share.frame, &frame) && TakesLeave(frame)) {
    absent_.Add(share.members);
    expected_.Remove(share.members);
  }
  hold_until_ = now;
  held_.push_back({std::move(share), now});
  first_mergeable_ = held_.size();
}

// The coordinator would: the members have taken it into the schedule.
void Relay::DropStale() {
  for (size_t place = held_.size(); place-- > 0;) {
    if (!IsStale(held_[place].share)) continue;
    held_.erase(held_.begin() + static_cast<std::ptrdiff_t>(place));
    if (place < first_mergeable_) --first_mergeable_;
  }
}

void Relay::Hold(Nanoseconds now, ReadyShare share) {
  if (held_.empty()) hold_until_ = now + kHold;
  for (size_t place = first_mergeable_; place < held_.size(); ++place) {
    Held& held = held_[place];
    if (held.share.ids != share.ids || !(held.share.requests == share.requests)) continue;
    const Nanoseconds gap = now - std::exchange(held.last_at, now);
    held.share.gap = share.members.size() > 1 ? std::min(gap, share.gap) : gap;
    held.share.last = share.last;
    held.share.members.Add(share.members);
    return;
  }
  held_.push_back({std::move(share), now});
}

Frame Relay::Gathered(Nanoseconds now) {
  Frame frame;
  frame.type = FrameType::kGathered;
  frame.members = members_;
  if (held_.empty()) return frame;
  if (now >= hold_until_ || (held_.size() == 1 && IsWhole(held_[0].share.members))) {
    for (Held& held : held_) frame.shares.push_back(std::move(held.share));
    held_.clear();
    first_mergeable_ = 0;
  } else {
    frame.shares = TakeWhole();
  }
  return frame;
}

bool Relay::IsWhole(const MemberSet& members) const {
  MemberSet missing = expected_;
  missing.Remove(members);
  return missing.size() == 0;
}

// Members have come to the same operations in different shares: what all are ready for goes on, the rest stays.
std::vector<ReadyShare> Relay::TakeWhole() {
  int arrivals = 0;
  for (const Held& held : held_) arrivals += held.share.members.size();
  if (arrivals < expected_.size()) return {};
  std::map<ResponseCache::Id, MemberSet> by_id;
  std::map<std::string, MemberSet> by_name;
  for (const Held& held : held_) {
    for (ResponseCache::Id id : held.share.ids)
      by_id.emplace(id, MemberSet(members_)).first->second.Add(held.share.members);
    for (const Request& request : held.share.requests)
      by_name.emplace(request.name, MemberSet(members_)).first->second.Add(held.share.members);
  }
  std::vector<ReadyShare> whole;
  ReadyShare all;  // of ids that all behind it are ready for, in one
  all.members = MemberSet(members_);
  all.schedule = newest_schedule_;
  for (const auto& [id, members] : by_id) {
    if (!IsWhole(members)) continue;
    all.ids.push_back(id);
    all.members.Add(members);
  }
  std::vector<Held> rest;
  for (Held& held : held_) {
    ReadyShare part = held.share;
    part.ids.clear();
    part.requests.clear();
    Held left{part, held.last_at};
    for (ResponseCache::Id id : held.share.ids) {
      if (!IsWhole(by_id.at(id))) left.share.ids.push_back(id);
    }
    for (Request& request : held.share.requests)
      (IsWhole(by_name.at(request.name)) ? part : left.share).requests.push_back(std::move(request));
    if (held.share.ids.size() != left.share.ids.size()) {
      all.last = held.share.last;
      all.gap = held.share.gap;
    }
    if (!part.requests.empty()) whole.push_back(std::move(part));
    if (!left.share.ids.empty() || !left.share.requests.empty()) rest.push_back(std::move(left));
  }
  if (!all.ids.empty()) whole.push_back(std::move(all));
  held_ = std::move(rest);
  first_mergeable_ = 0;
  return whole;
}

// ---- from the coordinator ----

std::vector<Relay::Onward> Relay::Spread(const std::vector<int>& members, const std::string& frame) const {
  std::vector<Onward> onward;
  for (const Child& child : children_) {
    SpreadCopy copy;
    copy.frame = frame;
    for (int member : members)
      if (child.behind.has(member)) copy.members.push_back(member);
    if (!members.empty() && copy.members.empty()) continue;
    Frame next;
    next.type = FrameType::kSpread;
    if (static_cast<int>(copy.members.size()) == child.behind.size()) copy.members.clear();
    next.copies.push_back(std::move(copy));
    onward.push_back({child.member, std::move(next)});
  }
  return onward;
}

}  // namespace ringtrain
