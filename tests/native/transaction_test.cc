// The window's transaction: who releases when, what a change of the world does with an open window, and where samples
// go. Whole jobs are simulated in tests/simulation/elastic.
#include "core/transaction.h"

#include <memory>

#include "check.h"

namespace ringtrain {
namespace {

const Uid kA{0, 1}, kB{0, 2}, kC{0, 3};
const Uids kAll = {kA, kB, kC};

template <typename Effect>
std::vector<Effect> TakeAll(TransactionEffects* effects) {
  std::vector<Effect> found;
  for (const TransactionEffect& effect : *effects)
    if (const auto* one = std::get_if<Effect>(&effect)) found.push_back(*one);
  effects->clear();
  return found;
}

// A member of a world that runs, which has begun its window.
struct Rank {
  explicit Rank(const Uid& me, const Uids& members = kAll) : transaction(me, 2) {
    transaction.Run(members, false, &effects);
  }
  void BecomeWhole() {
    samples = transaction.Begin();
    transaction.Submitted("x");
    transaction.Closed(&effects);
    transaction.ResultHeld("x", &effects);
  }
  size_t Releases() { return TakeAll<transaction_effect::Release>(&effects).size(); }
  Transaction transaction;
  TransactionEffects effects;
  std::vector<Positions> samples;
};

RT_TEST(a_step_is_released_once_all_members_are_whole) {
  Rank rank(kA);
  rank.BecomeWhole();
  RT_CHECK_EQ(TakeAll<transaction_effect::TellWhole>(&rank.effects).size(), size_t{1});
  rank.transaction.PeerIsWhole(kB, 1, false, &rank.effects);
  rank.transaction.PeerIsWhole(kB, 1, false, &rank.effects);  // once more counts for nobody else
  RT_CHECK_EQ(rank.Releases(), size_t{0});
  rank.transaction.PeerIsWhole(kC, 1, false, &rank.effects);
  const auto releases = TakeAll<transaction_effect::Release>(&rank.effects);
  RT_REQUIRE_EQ(releases.size(), size_t{1});
  RT_CHECK_EQ(releases[0].step, Step{1});
  RT_CHECK_EQ(releases[0].divisor, size_t{3});
  RT_CHECK_EQ(rank.transaction.kept(), size_t{0});
}

RT_TEST(whole_everywhere_is_released_and_everything_else_done_again) {
  const auto settled = [](std::vector<Standing> survivors) { return Settle(survivors); };
  RT_CHECK_EQ(settled({{4, WindowStage::kWhole}, {4, WindowStage::kWhole}}).released, Step{5});
  RT_CHECK(settled({{4, WindowStage::kWhole}, {4, WindowStage::kWhole}}).fresh);
  RT_CHECK_EQ(settled({{4, WindowStage::kWhole}, {4, WindowStage::kBegun}}).released, Step{4});
  RT_CHECK(!settled({{4, WindowStage::kWhole}, {4, WindowStage::kIdle}}).fresh);
  RT_CHECK_EQ(settled({{4, WindowStage::kWhole}, {5, WindowStage::kIdle}}).released,
              Step{5});  // somebody has released it
  RT_CHECK(settled({{4, WindowStage::kWhole}, {5, WindowStage::kIdle}}).fresh);
  RT_CHECK(!settled({{4, WindowStage::kWhole}, {5, WindowStage::kBegun}}).fresh);
  RT_CHECK(settled({{4, WindowStage::kIdle}, {4, WindowStage::kIdle}}).fresh);
}

RT_TEST(a_window_that_is_done_again_keeps_inputs_and_shares_and_gives_back_those_of_the_dead) {
  Rank rank(kC);
  rank.BecomeWhole();
  RT_CHECK_EQ(rank.samples[0].first, uint64_t{4});
  const Standing standing = rank.transaction.Stop();
  RT_CHECK(standing.stage == WindowStage::kWhole);
  rank.transaction.PeerIsWhole(kA, 1, false, &rank.effects);  // too late
  rank.transaction.PeerIsWhole(kB, 1, false, &rank.effects);
  RT_CHECK_EQ(rank.Releases(), size_t{0});
  RT_REQUIRE(rank.transaction.Settle({0, false}, {kA, kC}, &rank.effects));  // B is gone
  rank.transaction.Run({kA, kC}, false, &rank.effects);
  const auto again = TakeAll<transaction_effect::Submit>(&rank.effects);
  RT_REQUIRE_EQ(again.size(), size_t{1});
  RT_CHECK_EQ(again[0].names[0], std::string("x"));
  rank.transaction.ResultHeld("x", &rank.effects);
  rank.transaction.PeerIsWhole(kA, 1, false, &rank.effects);
  const auto releases = TakeAll<transaction_effect::Release>(&rank.effects);
  RT_REQUIRE_EQ(releases.size(), size_t{1});
  RT_CHECK_EQ(releases[0].divisor, size_t{2});
  const StepProgress progress = rank.transaction.progress();
  RT_CHECK(progress.order.given_back() == (std::vector<Positions>{{2, 4}}));
  RT_CHECK_EQ(progress.order.next(), uint64_t{6});
}

RT_TEST(a_settlement_releases_what_others_have_released) {
  Rank rank(kA);
  rank.BecomeWhole();
  rank.transaction.Stop();
  RT_REQUIRE(rank.transaction.Settle({1, true}, {kA}, &rank.effects));
  const auto releases = TakeAll<transaction_effect::Release>(&rank.effects);
  RT_REQUIRE_EQ(releases.size(), size_t{1});
  RT_CHECK_EQ(releases[0].divisor, size_t{3});                        // of the world that gave the results
  RT_CHECK(rank.transaction.Settle({1, true}, {kA}, &rank.effects));  // the same again changes nothing
  RT_CHECK_EQ(rank.Releases(), size_t{0});
}

RT_TEST(a_settlement_that_does_not_fit_is_refused) {
  Rank rank(kA);
  rank.transaction.Begin();
  rank.transaction.Stop();
  RT_CHECK(!rank.transaction.Settle({1, true}, {kA}, &rank.effects));   // not whole
  RT_CHECK(!rank.transaction.Settle({2, false}, {kA}, &rank.effects));  // two steps ahead
  RT_CHECK(!rank.transaction.Settle({0, true}, {kA}, &rank.effects));   // its window is open
}

RT_TEST(all_pause_behind_the_step_at_which_one_was_asked) {
  Rank rank(kA, {kA, kB});
  rank.BecomeWhole();
  rank.effects.clear();
  rank.transaction.PeerIsWhole(kB, 1, true, &rank.effects);  // B was asked, A was not
  RT_CHECK_EQ(TakeAll<transaction_effect::Pause>(&rank.effects).size(), size_t{1});
  RT_CHECK(!rank.transaction.may_begin());
  rank.transaction.Stop();
  RT_REQUIRE(rank.transaction.Settle({1, true}, {kA, kB, kC}, &rank.effects));
  rank.transaction.Run({kA, kB, kC}, false, &rank.effects);
  RT_CHECK(rank.transaction.may_begin());
}

// Some have heard that the next world runs and have begun in it, others have not: both deal the window to its members.
RT_TEST(a_window_is_dealt_to_the_newest_world_that_was_formed) {
  Rank rank(kB, {kA, kB});
  rank.transaction.Stop();
  RT_REQUIRE(rank.transaction.Settle({0, true}, {kA, kB, kC}, &rank.effects));  // never runs here
  RT_REQUIRE(rank.transaction.Settle({0, false}, {kA, kB}, &rank.effects));     // A has begun in it, C is gone
  rank.transaction.Run({kA, kB}, false, &rank.effects);
  rank.BecomeWhole();
  rank.transaction.PeerIsWhole(kA, 1, false, &rank.effects);
  RT_CHECK(rank.transaction.progress().order.given_back() == (std::vector<Positions>{{4, 6}}));
}

RT_TEST(what_nobody_has_begun_is_dealt_anew) {
  Rank rank(kB, {kA, kB, kC});
  rank.transaction.Stop();
  RT_REQUIRE(rank.transaction.Settle({0, false}, {kA, kB}, &rank.effects));  // A had begun
  RT_REQUIRE(rank.transaction.Settle({0, true}, {kB}, &rank.effects));       // and is gone, too
  rank.transaction.Run({kB}, false, &rank.effects);
  rank.BecomeWhole();
  RT_CHECK(rank.samples == (std::vector<Positions>{{0, 2}}));
}

RT_TEST(positions_that_were_given_back_are_dealt_first) {
  SampleOrder order;
  order.Take(10);
  order.GiveBack({{6, 8}});
  order.GiveBack({{2, 4}, {8, 9}});
  RT_CHECK(order.given_back() == (std::vector<Positions>{{2, 4}, {6, 9}}));
  RT_CHECK(order.Slice(1, 5) == (std::vector<Positions>{{3, 4}, {6, 9}, {10, 11}}));
  order.Take(3);
  RT_CHECK(order.given_back() == (std::vector<Positions>{{7, 9}}));
  order.Take(4);
  RT_CHECK(order.given_back().empty());
  RT_CHECK_EQ(order.next(), uint64_t{12});
}

}  // namespace
}  // namespace ringtrain
