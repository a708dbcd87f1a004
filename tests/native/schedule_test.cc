// The parts of a schedule: what repeats itself, what one member promises, what it knows of the others, and how a
// promise lies in memory. What members do together is in tests/simulation.
#include "agree/schedule.h"

#include <thread>

#include "agree/promises.h"
#include "check.h"
#include "transport/promise_slot.h"

namespace ringtrain {
namespace {

constexpr Nanoseconds kMillisecond = 1000000;
constexpr Nanoseconds kLongestWait = 1000 * kMillisecond;

// How often the step must come until it is found; 0: not within so many.
int StepsUntilFound(Repetition* repetition, const Cycle& step, int most = 5000) {
  for (int count = 1; count <= most; ++count) {
    for (const auto& batch : step) repetition->Note(batch);
    if (repetition->found()) return count;
  }
  return 0;
}

RT_TEST(a_step_that_comes_three_times_is_found_at_its_end) {
  Repetition repetition;
  RT_CHECK_EQ(StepsUntilFound(&repetition, {{1, 2}, {3}}), 3);
  RT_CHECK(repetition.cycle() == (Cycle{{1, 2}, {3}}));
  repetition.Note({1, 2});
  RT_CHECK(!repetition.found());  // in its middle
}

RT_TEST(what_shares_a_batch_may_change_from_step_to_step) {
  Repetition repetition;
  for (const Cycle& step : {Cycle{{1, 2}, {3}}, Cycle{{1}, {2, 3}}, Cycle{{1, 2, 3}}, Cycle{{1}, {2}, {3}}})
    for (const auto& batch : step) repetition.Note(batch);
  RT_CHECK(repetition.found());
  RT_CHECK(repetition.cycle() == (Cycle{{1}, {2, 3}}));  // neither the most batches nor the fewest
}

RT_TEST(what_comes_before_the_loop_is_no_part_of_it) {
  Repetition repetition;
  for (ResponseCache::Id id : {90, 91, 92}) repetition.Note({id});
  RT_CHECK_EQ(StepsUntilFound(&repetition, {{1}, {2}}), 4);
  RT_CHECK(repetition.cycle() == (Cycle{{1}, {2}}));
}

RT_TEST(other_operations_are_another_step) {
  Repetition repetition;
  StepsUntilFound(&repetition, {{1}, {2}});
  repetition.Note({1});
  repetition.Note({5});
  repetition.Note({1});
  RT_CHECK(!repetition.found());
  repetition.Forget();
  RT_CHECK_EQ(StepsUntilFound(&repetition, {{1}, {2}}), 3);
}

RT_TEST(schedules_that_end_soon_are_tried_ever_more_seldom) {
  Repetition repetition;
  int last = StepsUntilFound(&repetition, {{1}});
  for (int times = 0; times < 12; ++times) {
    repetition.Ended(5);
    const int steps = StepsUntilFound(&repetition, {{1}});
    RT_CHECK(steps > last || steps == 1024);
    last = steps;
  }
  RT_CHECK_EQ(last, 1024);
  for (int times = 0; times < 12; ++times) {
    repetition.Ended(100000);
    StepsUntilFound(&repetition, {{1}});
  }
  repetition.Ended(100000);
  RT_CHECK_EQ(StepsUntilFound(&repetition, {{1}}), 3);
}

RT_TEST(a_batch_is_promised_when_all_before_it_and_all_of_it_is_here) {
  BatchSchedule schedule(1, {{1, 2}, {3}}, kLongestWait, 0);
  RT_CHECK(!schedule.Take(0, 4));
  RT_CHECK(schedule.Take(0, 3) && schedule.Take(0, 1));
  RT_CHECK(!schedule.Promise(0));
  RT_CHECK(schedule.Take(0, 2));
  RT_CHECK(schedule.Promise(0));
  RT_CHECK_EQ(schedule.promised(), uint64_t{2});
  RT_CHECK(!schedule.Promise(0));  // not the next time of what has not started
  RT_CHECK(schedule.StartNext(0) == (std::vector<ResponseCache::Id>{1, 2}));
  schedule.Take(0, 2);
  RT_CHECK(!schedule.Promise(0));
  schedule.Take(0, 1);
  RT_CHECK(schedule.Promise(0));
  RT_CHECK_EQ(schedule.promised(), uint64_t{3});
  schedule.Freeze();
  schedule.StartNext(0);
  schedule.Take(0, 3);
  RT_CHECK(!schedule.Promise(0));
}

RT_TEST(what_waits_too_long_ends_a_schedule) {
  BatchSchedule schedule(1, {{1}, {2}}, kLongestWait, 0);
  RT_CHECK_EQ(schedule.due(), kNever);
  schedule.Take(5 * kMillisecond, 2);  // and what comes before it does not come
  RT_CHECK_EQ(schedule.due(), 55 * kMillisecond);
  schedule.Take(9 * kMillisecond, 1);
  schedule.Promise(9 * kMillisecond);
  RT_CHECK_EQ(schedule.due(), 9 * kMillisecond + kLongestWait);
  schedule.StartNext(20 * kMillisecond);
  RT_CHECK_EQ(schedule.due(), 20 * kMillisecond + kLongestWait);
  schedule.StartNext(21 * kMillisecond);
  RT_CHECK_EQ(schedule.due(), kNever);
}

RT_TEST(all_of_a_host_promise_by_its_memory) {
  Promises promises({0, 0, 0}, 1, 8);
  promises.Begin(7);
  promises.See({{7, 4, 0, 10}, {7, 3, 0, 30}, {6, 9, 0, 20}});
  RT_CHECK_EQ(promises.agreed(), uint64_t{0});  // the last one speaks of another schedule
  promises.See({{7, 4, 0, 10}, {7, 3, 0, 30}, {7, 5, 0, 90}});
  RT_CHECK_EQ(promises.agreed(), uint64_t{3});
  const LastPromise last = promises.TakeLast();
  RT_CHECK_EQ(last.member, 2);
  RT_CHECK_EQ(last.at - last.before, Nanoseconds{60});
  RT_CHECK(promises.TakeNews().empty());
}

// Four hosts below each other: 0 - 1 - 3 and 0 - 2, as a tree with two below one.
RT_TEST(leaders_tell_their_neighbours_what_their_side_has_promised) {
  const std::vector<int> hosts = {0, 1, 2, 3};
  std::vector<Promises> leaders;
  for (int me = 0; me < 4; ++me) leaders.emplace_back(hosts, me, 2);
  for (Promises& leader : leaders) leader.Begin(1);
  const auto pass = [&] {
    int64_t frames = 0;
    for (bool any = true; any;) {
      any = false;
      for (int me = 0; me < 4; ++me) {
        for (const Promises::Told& told : leaders[static_cast<size_t>(me)].TakeNews()) {
          leaders[static_cast<size_t>(told.member)].Hear(0, me, 1, told.count, me, 0);
          any = true;
          ++frames;
        }
      }
    }
    return frames;
  };
  for (int me : {3, 1, 0}) leaders[static_cast<size_t>(me)].See({{1, 2, 0, 0}});
  pass();
  for (const Promises& leader : leaders) RT_CHECK_EQ(leader.agreed(), uint64_t{0});
  leaders[2].See({{1, 1, 0, 0}});
  pass();
  for (const Promises& leader : leaders) RT_CHECK_EQ(leader.agreed(), uint64_t{1});
  leaders[2].See({{1, 2, 0, 0}});
  for (Promises& leader : leaders) leader.See({{1, 2, 0, 0}});
  pass();
  for (Promises& leader : leaders) leader.See({{1, 3, 0, 0}});
  RT_CHECK_EQ(pass(), int64_t{6});  // one each way between neighbours
  for (const Promises& leader : leaders) RT_CHECK_EQ(leader.agreed(), uint64_t{3});
}

RT_TEST(a_neighbour_may_begin_first) {
  Promises promises({0, 1}, 0, 8);
  promises.Begin(1);
  promises.Hear(0, 1, 2, 5, 1, 0);
  promises.See({{1, 9, 0, 0}});
  RT_CHECK_EQ(promises.agreed(), uint64_t{0});
  promises.Begin(2);
  promises.See({{2, 3, 0, 0}});
  RT_CHECK_EQ(promises.agreed(), uint64_t{3});
}

RT_TEST(members_of_other_hosts_hear_of_it_from_their_leader) {
  Promises promises({0, 0, 1}, 1, 8);
  promises.Begin(1);
  promises.See({{1, 4, 2, 0}, {1, 5, 0, 0}});
  RT_CHECK_EQ(promises.agreed(), uint64_t{2});
  RT_CHECK_EQ(promises.here_promised(), uint64_t{4});
}

// The counter of one schedule is never read under the name of another, whatever is written meanwhile.
RT_TEST(a_promise_is_read_with_its_schedule) {
  static PromiseSlot slot;
  constexpr uint64_t kKeys = 20000;
  std::atomic<bool> done{false};
  std::thread writer([&] {
    for (uint64_t key = 1; key <= kKeys; ++key)
      for (uint64_t count = 0; count < 5; ++count) slot.Write(key, {key * 10 + count, key * 10 + count, 0});
    done.store(true);
  });
  uint64_t key = 1, read = 0;
  while (!done.load()) {
    const PromiseSlot::Value value = slot.Read(key);
    if (value.promised == 0) {
      key = key % kKeys + 1;
      continue;
    }
    ++read;
    RT_REQUIRE(value.promised / 10 == key && (value.agreed == 0 || value.agreed / 10 == key));
  }
  writer.join();
  const PromiseSlot::Value last = slot.Read(kKeys);
  RT_CHECK_EQ(last.promised, kKeys * 10 + 4);
  RT_CHECK_EQ(slot.Read(kKeys - 1).promised, uint64_t{0});
}

}  // namespace
}  // namespace ringtrain
