// When an operation that waits for members is reported and given up, and in which words. No threads, no real time.
#include "agree/stall_watch.h"

#include "check.h"

namespace ringtrain {
namespace {

bool Has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// An operation of three members, which waits for the last two.
class Stalled {
 public:
  Stalled(Nanoseconds warning, Nanoseconds abort, Nanoseconds since = 0)
      : watch(warning, abort), clock(watch.Start(since)) {}

  Nanoseconds due() const { return watch.DueAt(clock, missing); }
  StallWatch::Verdict JudgeAt(Nanoseconds now) {
    return watch.Judge(now, {"allreduce 'x'", {4}, {5, 6}}, missing, &clock);
  }

  StallWatch watch;
  StallWatch::Clock clock;
  StallWatch::Missing missing = [](int member) { return member > 0; };
};

RT_TEST(a_report_is_due_at_each_doubling_of_the_age) {
  Stalled stalled(30 * kSecond, kNever, 7 * kSecond);
  RT_CHECK_EQ(stalled.due(), 37 * kSecond);
  RT_CHECK(!stalled.JudgeAt(37 * kSecond).give_up);
  RT_CHECK_EQ(stalled.due(), 67 * kSecond);
  stalled.JudgeAt(67 * kSecond);
  RT_CHECK_EQ(stalled.due(), 127 * kSecond);
}

RT_TEST(a_late_look_skips_the_reports_that_it_missed) {
  Stalled stalled(30 * kSecond, kNever);
  stalled.JudgeAt(130 * kSecond);
  RT_CHECK_EQ(stalled.due(), 240 * kSecond);
}

RT_TEST(an_operation_is_given_up_at_its_age_and_no_earlier) {
  Stalled stalled(30 * kSecond, 40 * kSecond);
  RT_CHECK(!stalled.JudgeAt(30 * kSecond).give_up);
  RT_CHECK_EQ(stalled.due(), 40 * kSecond);  // before the next report
  RT_CHECK(!stalled.JudgeAt(40 * kSecond - 1).give_up);
  RT_CHECK(stalled.JudgeAt(40 * kSecond).give_up);
}

RT_TEST(the_words_name_ranks_age_and_what_will_happen) {
  Stalled given_up(30 * kSecond, 40 * kSecond), kept(kSecond / 2, kNever);
  RT_CHECK_EQ(
      given_up.JudgeAt(30 * kSecond).text,
      "allreduce 'x': waiting 30 s: submitted by rank 4; missing ranks 5, 6. A branch, the number of batches "
      "or the set of gradients may differ between ranks. It will fail after 40 s (RINGTRAIN_STALL_ABORT_SECONDS; "
      "long_phase() on the busy rank extends it).");
  RT_CHECK(Has(given_up.JudgeAt(41 * kSecond).text, "waiting 41 s: "));
  RT_CHECK(Has(given_up.JudgeAt(41 * kSecond).text, "It was given up after 40 s (RINGTRAIN_STALL_ABORT_SECONDS; "));
  const std::string text = kept.JudgeAt(kSecond / 2).text;
  RT_CHECK(Has(text, "waiting 0.5 s: "));
  RT_CHECK(Has(text, "It will not be given up (RINGTRAIN_STALL_ABORT_SECONDS=0)."));
  RT_CHECK(Has(kept.JudgeAt(3 * kSecond / 2).text, "waiting 1.5 s: "));
}

RT_TEST(a_long_phase_of_a_missing_member_puts_report_and_end_off) {
  Stalled stalled(30 * kSecond, 100 * kSecond);
  RT_CHECK(stalled.watch.DueInOrder());
  stalled.watch.LongPhase(2, 500 * kSecond);
  RT_CHECK(!stalled.watch.DueInOrder());
  RT_CHECK_EQ(stalled.due(), 530 * kSecond);
  RT_CHECK(Has(stalled.JudgeAt(530 * kSecond).text, "It will fail after 600 s"));
  RT_CHECK_EQ(stalled.due(), 600 * kSecond);
  RT_CHECK(stalled.JudgeAt(600 * kSecond).give_up);
}

RT_TEST(whoever_was_stopped_itself_gives_the_missing_the_time_once_more) {
  Stalled stalled(30 * kSecond, 40 * kSecond);
  stalled.watch.StoodStill(900 * kSecond);
  RT_CHECK_EQ(stalled.due(), 930 * kSecond);
  RT_CHECK(!stalled.JudgeAt(930 * kSecond).give_up);
  RT_CHECK(!stalled.JudgeAt(940 * kSecond - 1).give_up);
  RT_CHECK(stalled.JudgeAt(940 * kSecond).give_up);
}

RT_TEST(a_long_phase_of_another_member_changes_nothing) {
  Stalled stalled(30 * kSecond, 100 * kSecond);
  stalled.watch.LongPhase(0, 500 * kSecond);
  RT_CHECK_EQ(stalled.due(), 30 * kSecond);
}

RT_TEST(a_member_that_comes_back_early_is_expected_from_then_on) {
  Stalled stalled(30 * kSecond, 100 * kSecond);
  stalled.watch.LongPhase(1, 500 * kSecond);
  stalled.watch.LongPhase(1, 20 * kSecond);
  RT_CHECK_EQ(stalled.due(), 50 * kSecond);
}

RT_TEST(a_long_phase_is_remembered_until_no_end_depends_on_it) {
  Stalled stalled(30 * kSecond, 100 * kSecond);
  stalled.watch.LongPhase(1, 60 * kSecond);
  stalled.watch.Forget(160 * kSecond - 1);
  RT_CHECK(!stalled.watch.DueInOrder());
  stalled.watch.Forget(160 * kSecond);
  RT_CHECK(stalled.watch.DueInOrder());
}

}  // namespace
}  // namespace ringtrain
