// A rank's side of an elastic job, where no order of frames may lead it astray. Whole jobs are simulated in
// tests/simulation/elastic.
#include "elastic/membership.h"

#include <algorithm>

#include "check.h"

namespace ringtrain {
namespace {

const Process kA{{0, 1}, "a", 0, "a:1"}, kB{{0, 2}, "b", 0, "b:1"};

ControlFrame Of(ControlType type, uint64_t count, std::vector<Member> members = {}) {
  ControlFrame frame;
  frame.type = type;
  frame.epoch = {count, 7};
  frame.members = std::move(members);
  return frame;
}

// Rank A, whom the authority tells things.
struct Rank {
  Rank() : membership(kA, "program") { membership.Begin(&actions); }
  void Hear(const ControlFrame& frame) { membership.Arrived(frame, &actions); }
  void RunWithB(uint64_t count, bool joins = false) {
    Hear(Of(ControlType::kForm, count, {{kB, false}, {kA, joins}}));
    membership.Connected(count, true, &actions);
    Hear(Of(ControlType::kGo, count));
    actions.clear();
  }
  // The last report that it has sent.
  ControlFrame Report() {
    ControlFrame report;
    for (const MembershipAction& action : actions)
      if (const auto* send = std::get_if<membership_action::Send>(&action))
        if (send->frame.type == ControlType::kReport) report = send->frame;
    RT_CHECK(report.type == ControlType::kReport);
    actions.clear();
    return report;
  }
  bool Pauses() {
    const bool pauses = std::any_of(actions.begin(), actions.end(), [](const MembershipAction& action) {
      return std::holds_alternative<membership_action::Pause>(action);
    });
    actions.clear();
    return pauses;
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
  Membership membership;
  MembershipActions actions;
};

RT_TEST(a_world_is_formed_once_all_members_are_reached) {
  Rank rank;
  rank.Hear(Of(ControlType::kForm, 1, {{kA, false}, {kB, false}}));
  rank.Hear(Of(ControlType::kGo, 1));
  RT_CHECK(!rank.is_member());
  RT_CHECK_EQ(rank.Sent(ControlType::kFormed), 0);
  rank.membership.Connected(2, true, &rank.actions);
  RT_CHECK_EQ(rank.Sent(ControlType::kFormed), 0);
  rank.membership.Connected(1, true, &rank.actions);
  RT_CHECK_EQ(rank.Sent(ControlType::kFormed), 1);
  rank.Hear(Of(ControlType::kGo, 2));  // of a world that it has not formed
  RT_CHECK(!rank.is_member());
  rank.Hear(Of(ControlType::kGo, 1));
  RT_CHECK(rank.is_member());
}

RT_TEST(a_world_that_cannot_be_connected_is_suspected) {
  Rank rank;
  rank.Hear(Of(ControlType::kForm, 1, {{kA, false}, {kB, false}}));
  rank.membership.Connected(1, false, &rank.actions);
  RT_CHECK_EQ(rank.Sent(ControlType::kSuspect), 1);
  rank.Hear(Of(ControlType::kGo, 1));
  RT_CHECK(!rank.is_member());
}

RT_TEST(a_world_that_was_stopped_never_runs) {
  Rank rank;
  rank.Hear(Of(ControlType::kForm, 1, {{kA, false}, {kB, false}}));
  rank.membership.Connected(1, true, &rank.actions);
  rank.Hear(Of(ControlType::kStop, 1));
  rank.Hear(Of(ControlType::kGo, 1));
  rank.Hear(Of(ControlType::kForm, 1, {{kA, false}, {kB, false}}));
  RT_CHECK(!rank.is_member());
}

RT_TEST(what_is_of_another_epoch_has_no_effect) {
  Rank rank;
  rank.RunWithB(3);
  rank.Hear(Of(ControlType::kStop, 2));
  RT_CHECK(rank.is_member());
  rank.Hear(Of(ControlType::kStop, 4));  // of a world that it has not heard of: it has missed that
  RT_CHECK_EQ(rank.Sent(ControlType::kReport), 1);
  RT_CHECK(!rank.is_member());
}

RT_TEST(a_rank_holds_the_state_once_it_has_taken_it) {
  Rank rank;
  rank.RunWithB(5, true);
  rank.Hear(Of(ControlType::kStop, 5));
  RT_CHECK(!rank.Report().holds_state);
  Rank other;
  other.RunWithB(5, true);
  other.membership.GotState();
  other.Hear(Of(ControlType::kStop, 5));
  RT_CHECK(other.Report().holds_state);
}

RT_TEST(nobody_joins_within_a_step) {
  Rank rank;
  rank.RunWithB(1);
  rank.membership.Admits(false);
  rank.Hear(Of(ControlType::kStop, 1));
  RT_CHECK(!rank.Report().admits);
  rank.membership.Admits(true);
  rank.Hear(Of(ControlType::kStop, 1));  // asked for once more
  RT_CHECK(rank.Report().admits);
}

RT_TEST(a_pause_is_asked_for_while_a_world_runs) {
  Rank rank;
  rank.RunWithB(1);
  ControlFrame stop = Of(ControlType::kStop, 1);
  stop.at_release = true;
  rank.Hear(stop);
  RT_CHECK(rank.Pauses());
  RT_CHECK(rank.is_member());
  stop.epoch = {2, 7};
  rank.Hear(stop);
  RT_CHECK(!rank.Pauses());
}

RT_TEST(a_program_that_has_left_its_world_reports_once) {
  Rank rank;
  rank.RunWithB(1);
  rank.membership.WorldEnded(&rank.actions);
  RT_CHECK_EQ(rank.Sent(ControlType::kReport), 1);
  rank.membership.WorldEnded(&rank.actions);
  RT_CHECK_EQ(rank.Sent(ControlType::kReport), 0);
}

RT_TEST(what_is_suspected_is_told_once_more_to_a_launcher_that_asks) {
  Rank rank;
  rank.RunWithB(1);
  rank.membership.Suspect({kB.uid}, &rank.actions);
  RT_CHECK_EQ(rank.Sent(ControlType::kSuspect), 1);
  rank.Hear(Of(ControlType::kAsk, 0));
  RT_CHECK_EQ(rank.Sent(ControlType::kSuspect), 1);
}

}  // namespace
}  // namespace ringtrain
