// A rank's side of an elastic job, where no order of frames may lead it astray. Whole jobs are simulated in
// tests/simulation/elastic.
#include "core/membership.h"

#include "check.h"

namespace ringtrain {
namespace {

constexpr Nanoseconds kSilence = 5, kGrace = 60;
const Process kA{{0, 1}, "a", 0, "a:1"}, kB{{0, 2}, "b", 0, "b:1"}, kC{{0, 3}, "b", 1, "b:2"};

ControlFrame Of(ControlType type, uint64_t count, std::vector<Member> members = {}) {
  ControlFrame frame;
  frame.type = type;
  frame.epoch = {count, 7};
  frame.members = std::move(members);
  return frame;
}

// Rank A, whom the authority tells things.
struct Rank {
  Rank() : transaction(kA.uid, 1), membership(kA, "program", {kSilence, kGrace}, &transaction) {
    membership.Begin(0, &actions);
  }
  void Hear(const ControlFrame& frame) { membership.Arrived(0, frame, &actions); }
  void RunWithB(uint64_t count) {
    Hear(Of(ControlType::kForm, count, {{kA, false}, {kB, false}}));
    membership.Reached({count, 7}, kA.uid, &actions);
    membership.Reached({count, 7}, kB.uid, &actions);
    Hear(Of(ControlType::kGo, count));
    actions.clear();
  }
  // How many frames of that type it has sent since the last look.
  int Sent(ControlType type) {
    int sent = 0;
    for (const MembershipAction& action : actions)
      if (const auto* send = std::get_if<membership_action::Send>(&action)) sent += send->frame.type == type ? 1 : 0;
    actions.clear();
    return sent;
  }
  bool is_member() const { return membership.state() == Membership::State::kMember; }
  Transaction transaction;
  Membership membership;
  MembershipActions actions;
};

RT_TEST(a_world_is_formed_once_all_members_are_reached) {
  Rank rank;
  rank.Hear(Of(ControlType::kForm, 1, {{kA, false}, {kB, false}}));
  rank.Hear(Of(ControlType::kGo, 1));
  RT_CHECK(!rank.is_member());
  RT_CHECK_EQ(rank.Sent(ControlType::kFormed), 0);
  rank.membership.Reached({1, 7}, kA.uid, &rank.actions);
  rank.membership.Reached({1, 7}, kB.uid, &rank.actions);
  RT_CHECK_EQ(rank.Sent(ControlType::kFormed), 1);
  rank.Hear(Of(ControlType::kGo, 2));  // of a world that it has not formed
  RT_CHECK(!rank.is_member());
  rank.Hear(Of(ControlType::kGo, 1));
  RT_CHECK(rank.is_member());
}

RT_TEST(a_world_of_one_runs_once_it_is_open) {
  Rank rank;
  rank.Hear(Of(ControlType::kForm, 1, {{kA, false}}));
  rank.Hear(Of(ControlType::kGo, 1));
  RT_CHECK(!rank.is_member());
  RT_CHECK_EQ(rank.Sent(ControlType::kFormed), 0);
  rank.membership.Reached({1, 7}, kA.uid, &rank.actions);
  RT_CHECK_EQ(rank.Sent(ControlType::kFormed), 1);
  rank.Hear(Of(ControlType::kGo, 1));
  RT_CHECK(rank.is_member());
}

RT_TEST(whoever_runs_a_world_tells_those_whom_the_launcher_could_not) {
  Rank rank;
  rank.Hear(Of(ControlType::kForm, 1, {{kA, false}, {kB, false}}));
  rank.membership.PeerRuns({1, 7}, &rank.actions);
  RT_CHECK(!rank.is_member());  // it has not formed it
  rank.membership.Reached({1, 7}, kA.uid, &rank.actions);
  rank.membership.Reached({1, 7}, kB.uid, &rank.actions);
  rank.membership.PeerRuns({1, 7}, &rank.actions);
  RT_CHECK(rank.is_member());
}

RT_TEST(a_world_that_was_stopped_never_runs) {
  Rank rank;
  rank.Hear(Of(ControlType::kForm, 1, {{kA, false}, {kB, false}}));
  rank.membership.Reached({1, 7}, kA.uid, &rank.actions);
  rank.membership.Reached({1, 7}, kB.uid, &rank.actions);
  rank.Hear(Of(ControlType::kStop, 1));
  rank.membership.PeerRuns({1, 7}, &rank.actions);
  rank.Hear(Of(ControlType::kGo, 1));
  rank.Hear(Of(ControlType::kForm, 1, {{kA, false}, {kB, false}}));
  RT_CHECK(!rank.is_member());
  RT_CHECK(rank.membership.WhenToTake({1, 7}) == Membership::Arrival::kRefuse);
}

RT_TEST(what_is_of_another_epoch_has_no_effect) {
  Rank rank;
  rank.RunWithB(3);
  RT_CHECK(rank.membership.WhenToTake({3, 7}) == Membership::Arrival::kTake);
  RT_CHECK(rank.membership.WhenToTake({3, 8}) == Membership::Arrival::kRefuse);
  RT_CHECK(rank.membership.WhenToTake({2, 7}) == Membership::Arrival::kRefuse);
  RT_CHECK(rank.membership.WhenToTake({4, 7}) == Membership::Arrival::kKeep);
  rank.Hear(Of(ControlType::kStop, 2));
  RT_CHECK(rank.is_member());
  rank.Hear(Of(ControlType::kStop, 4));  // of a world that it has not heard of: it has missed that
  RT_CHECK_EQ(rank.Sent(ControlType::kReport), 1);
  RT_CHECK(!rank.is_member());
}

RT_TEST(a_joiner_has_formed_once_all_donors_have_given) {
  Rank rank;
  ControlFrame form = Of(ControlType::kForm, 5, {{kB, false}, {kC, false}, {kA, true}});
  form.settlement = {9, true};
  rank.Hear(form);
  rank.membership.Reached({5, 7}, kA.uid, &rank.actions);
  rank.membership.Reached({5, 7}, kB.uid, &rank.actions);
  rank.membership.Reached({5, 7}, kC.uid, &rank.actions);
  rank.membership.TookState({5, 7}, kB.uid, {9, {}}, &rank.actions);
  RT_CHECK_EQ(rank.Sent(ControlType::kFormed), 0);
  rank.membership.TookState({5, 7}, kC.uid, {9, {}}, &rank.actions);
  RT_CHECK_EQ(rank.Sent(ControlType::kFormed), 1);
  RT_CHECK_EQ(rank.transaction.released(), Step{9});
  RT_CHECK(!rank.membership.holds_state());
}

RT_TEST(donors_at_different_steps_fence_a_joiner) {
  Rank rank;
  ControlFrame form = Of(ControlType::kForm, 5, {{kB, false}, {kA, true}});
  form.settlement = {9, true};
  rank.Hear(form);
  rank.membership.TookState({5, 7}, kB.uid, {8, {}}, &rank.actions);
  RT_CHECK(rank.membership.state() == Membership::State::kFenced);
}

RT_TEST(a_rank_ends_itself_when_it_hears_nothing_for_the_grace) {
  Rank rank;
  for (Nanoseconds now = 0; now < kGrace; now += 10) rank.membership.Tick(now, &rank.actions);
  RT_CHECK(rank.membership.state() != Membership::State::kFenced);
  rank.membership.Tick(kGrace, &rank.actions);
  RT_CHECK(rank.membership.state() == Membership::State::kFenced);
}

RT_TEST(a_rank_that_was_stopped_itself_gives_the_launcher_the_time_once_more) {
  Rank rank;
  rank.membership.Tick(10 * kGrace, &rank.actions);
  RT_CHECK(rank.membership.state() != Membership::State::kFenced);
}

RT_TEST(what_is_suspected_is_told_once_more_to_a_launcher_that_asks) {
  Rank rank;
  rank.RunWithB(1);
  rank.membership.Look({kB.uid}, {kB.uid}, &rank.actions);
  RT_CHECK_EQ(rank.Sent(ControlType::kSuspect), 1);
  rank.Hear(Of(ControlType::kAsk, 0));
  RT_CHECK_EQ(rank.Sent(ControlType::kSuspect), 1);
}

}  // namespace
}  // namespace ringtrain
