// Steps that survive a change of the world: what members settle, when a part is released, what ends a window, and who
// has contributed. Whole jobs are simulated in tests/simulation/elastic.
#include "elastic/step.h"

#include "check.h"

namespace ringtrain {
namespace {

using Numbers = std::vector<int32_t>;

Standing Holds(int64_t released, Stage stage, int64_t dealt_in = 3) { return {true, released, stage, dealt_in, false}; }
const Standing kJoins = {};

// released, and the dealing that goes on, or 0.
std::pair<int64_t, int64_t> Follows(std::vector<Standing> standings) {
  Settlement settlement, of_others;
  RT_REQUIRE(Settle(standings, &settlement));
  std::swap(standings.front(), standings.back());
  RT_REQUIRE(Settle(standings, &of_others));
  RT_CHECK_EQ(settlement.released, of_others.released);
  RT_CHECK(settlement.dealt_in == of_others.dealt_in);
  return {settlement.released, settlement.dealt_in.value_or(0)};
}

RT_TEST(whole_everywhere_is_released_and_everything_else_done_again) {
  using Pair = std::pair<int64_t, int64_t>;
  RT_CHECK(Follows({Holds(7, Stage::kWhole), Holds(7, Stage::kWhole)}) == Pair(8, 3));
  RT_CHECK(Follows({Holds(7, Stage::kWhole), Holds(7, Stage::kBegun)}) == Pair(7, 3));
  RT_CHECK(Follows({Holds(7, Stage::kWhole), Holds(7, Stage::kIdle)}) == Pair(7, 3));
  RT_CHECK(Follows({Holds(7, Stage::kIdle, 2), Holds(7, Stage::kIdle, 3)}) == Pair(7, 0));
}

RT_TEST(what_somebody_has_released_all_release) {
  using Pair = std::pair<int64_t, int64_t>;
  RT_CHECK(Follows({Holds(7, Stage::kWhole), Holds(8, Stage::kIdle)}) == Pair(8, 0));
  RT_CHECK(Follows({Holds(7, Stage::kWhole), Holds(8, Stage::kBegun, 4)}) == Pair(8, 4));
}

RT_TEST(what_not_all_held_nobody_can_have_released) {
  Settlement settlement;
  RT_CHECK(!Settle({Holds(7, Stage::kBegun), Holds(8, Stage::kIdle)}, &settlement));
  RT_CHECK(!Settle({Holds(7, Stage::kIdle), Holds(8, Stage::kIdle)}, &settlement));
  RT_CHECK(!Settle({Holds(6, Stage::kWhole), Holds(8, Stage::kIdle)}, &settlement));
}

RT_TEST(who_joins_has_no_voice_and_gets_the_state) {
  Settlement settlement;
  RT_REQUIRE(Settle({Holds(7, Stage::kIdle), kJoins}, &settlement));
  RT_CHECK_EQ(settlement.released, int64_t{7});
  RT_CHECK(settlement.gives_state && !settlement.dealt_in);
  RT_REQUIRE(Settle({kJoins, kJoins}, &settlement));  // the first world
  RT_CHECK_EQ(settlement.released, int64_t{0});
  RT_CHECK(settlement.gives_state);
  RT_REQUIRE(Settle({Holds(7, Stage::kIdle), Holds(7, Stage::kIdle)}, &settlement));
  RT_CHECK(!settlement.gives_state);
}

// Which contributors each window had that has ended.
std::vector<Contributors> Finished(const StepEffects& effects) {
  std::vector<Contributors> finished;
  for (const StepEffect& effect : effects)
    if (const auto* finish = std::get_if<step_effect::Finish>(&effect)) finished.push_back(finish->contributors);
  return finished;
}

// A rank that has begun in world 1, of three, at place 1.
struct Rank {
  explicit Rank(bool several = false) : steps(several) {
    steps.EnterWorld(1, 3, 1);
    RT_REQUIRE(steps.Hear({kJoins, kJoins, kJoins}));
    steps.Settle({}, &effects);
    steps.TookState();
    effects.clear();
  }
  // Has results of a part, which all have; how many windows have ended.
  size_t Release(Part part) {
    steps.BeginPart();
    steps.Hold(part);
    effects.clear();
    steps.Release(&effects);
    return Finished(effects).size();
  }
  // The next world, in which the others have these standings, and those places in the dealing that goes on.
  void EnterNext(int64_t number, std::vector<Standing> others, const Numbers& places) {
    steps.EnterWorld(number, static_cast<int32_t>(others.size()) + 1, 0);
    others.push_back(steps.standing(false));
    RT_REQUIRE(steps.Hear(others));
    effects.clear();
    steps.Settle(places, &effects);
  }
  Steps steps;
  StepEffects effects;
};

RT_TEST(a_window_of_one_optimizer_ends_with_its_step) {
  Rank rank;
  rank.steps.Begin();
  RT_CHECK_EQ(rank.Release(Part::kNothing), size_t{0});
  RT_CHECK_EQ(rank.Release(Part::kSome), size_t{0});
  RT_CHECK_EQ(rank.Release(Part::kStep), size_t{1});
  RT_CHECK(rank.steps.stage() == Stage::kIdle);
  RT_CHECK_EQ(rank.steps.released(), int64_t{3});
}

RT_TEST(a_window_of_several_optimizers_ends_with_a_part_of_its_own) {
  Rank rank(true);
  rank.steps.Begin();
  RT_CHECK_EQ(rank.Release(Part::kStep), size_t{0});
  RT_CHECK_EQ(rank.Release(Part::kStep), size_t{0});
  RT_CHECK(rank.steps.has_end_to_come());
  RT_CHECK_EQ(rank.Release(Part::kLast), size_t{1});
  RT_CHECK(!rank.steps.has_end_to_come());
}

RT_TEST(results_that_are_given_up_make_no_window_but_one_that_must_be_ended) {
  Rank rank;
  RT_CHECK_EQ(rank.Release(Part::kNothing), size_t{0});
  RT_CHECK(rank.steps.has_end_to_come());
  RT_CHECK_EQ(rank.Release(Part::kStep), size_t{1});  // within a step there is an end
  RT_CHECK(!rank.steps.has_end_to_come());
}

RT_TEST(whoever_is_lost_before_a_window_is_released_has_no_part_in_it) {
  Rank rank;
  rank.steps.Begin();
  rank.EnterNext(2, {Holds(0, Stage::kWhole, 1)}, {2, 1});
  RT_CHECK(rank.steps.contributors() == Contributors(Numbers{2, 1}));
  RT_CHECK(rank.steps.stage() == Stage::kBegun);
  RT_CHECK_EQ(rank.Release(Part::kStep), size_t{1});
  RT_CHECK(Finished(rank.effects)[0] == Contributors(Numbers{2, 1}));
  RT_CHECK(!rank.steps.contributors());
  RT_CHECK_EQ(rank.steps.standing(false).dealt_in, int64_t{2});
}

RT_TEST(whoever_is_lost_behind_the_first_part_has_its_samples_in_the_window) {
  Rank rank;
  rank.steps.Begin();
  rank.Release(Part::kSome);
  rank.EnterNext(2, {Holds(1, Stage::kBegun, 1)}, {2, 1});
  RT_CHECK_EQ(rank.Release(Part::kStep), size_t{1});
  RT_CHECK(Finished(rank.effects)[0] == Contributors());
}

RT_TEST(what_is_used_within_a_window_brings_no_samples) {
  Rank rank;
  rank.steps.Begin();
  rank.Release(Part::kNothing);
  rank.EnterNext(2, {Holds(1, Stage::kBegun, 1)}, {2, 1});
  RT_CHECK_EQ(rank.Release(Part::kStep), size_t{1});
  RT_CHECK(Finished(rank.effects)[0] == Contributors(Numbers{2, 1}));
}

RT_TEST(a_window_that_all_hold_is_released_by_the_settlement) {
  Rank rank;
  rank.steps.Begin();
  rank.steps.BeginPart();
  rank.steps.Hold(Part::kStep);
  rank.EnterNext(2, {Holds(0, Stage::kWhole, 1)}, {2, 1});
  RT_CHECK_EQ(Finished(rank.effects).size(), size_t{1});
  RT_CHECK_EQ(rank.steps.released(), int64_t{1});
  RT_CHECK_EQ(rank.steps.standing(false).dealt_in, int64_t{2});
}

RT_TEST(results_that_not_all_hold_are_given_up) {
  Rank rank;
  rank.steps.BeginPart();
  rank.steps.Hold(Part::kStep);
  rank.EnterNext(2, {Holds(0, Stage::kBegun, 1)}, {2, 1});
  RT_CHECK(rank.steps.stage() == Stage::kBegun);
  RT_CHECK_EQ(rank.steps.released(), int64_t{0});
}

RT_TEST(a_part_that_all_hold_is_released_and_its_window_goes_on) {
  Rank rank;
  rank.steps.Begin();
  rank.steps.BeginPart();
  rank.steps.Hold(Part::kNothing);
  rank.EnterNext(2, {Holds(0, Stage::kWhole, 1)}, {2, 1});
  RT_CHECK_EQ(rank.steps.released(), int64_t{1});
  RT_CHECK(rank.steps.stage() == Stage::kBegun);
  RT_CHECK(rank.steps.contributors() == Contributors(Numbers{2, 1}));
  RT_CHECK_EQ(rank.Release(Part::kStep), size_t{1});
  RT_CHECK(Finished(rank.effects)[0] == Contributors(Numbers{2, 1}));
}

// It had been settled that the window goes on in its dealing of world 1, and whoever had begun it was lost then.
RT_TEST(a_dealing_that_nobody_has_begun_any_more_is_given_up) {
  Rank rank;
  rank.EnterNext(2, {Holds(0, Stage::kBegun, 1)}, {0, 1});
  RT_CHECK_EQ(rank.steps.standing(false).dealt_in, int64_t{1});
  rank.EnterNext(3, {Holds(0, Stage::kIdle, 1)}, {});
  RT_CHECK_EQ(rank.steps.standing(false).dealt_in, int64_t{3});
  RT_CHECK(!rank.steps.contributors());
}

RT_TEST(results_that_no_world_can_have_leave_the_window_open) {
  Rank rank;
  rank.steps.BeginPart();
  rank.steps.Hold(Part::kSome);
  rank.steps.Drop();
  RT_CHECK(rank.steps.stage() == Stage::kBegun);
}

}  // namespace
}  // namespace ringtrain
