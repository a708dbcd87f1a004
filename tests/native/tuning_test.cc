// Tuning, but for the threads: which steps there are, which settings are kept, what is remembered.
#include <functional>
#include <random>

#include "check.h"
#include "core/step_clock.h"
#include "core/tuning_memory.h"
#include "core/tuning_search.h"

namespace ringtrain {
namespace {

constexpr Nanoseconds kMillisecond = 1000000;
constexpr auto kFusion = static_cast<size_t>(Tunable::fusion_threshold_bytes);
constexpr auto kBurst = static_cast<size_t>(Tunable::burst_bytes);
constexpr auto kGather = static_cast<size_t>(Tunable::gather_microseconds);

// ---- steps ----

Response Agreed(const std::string& name, int64_t elements, bool cacheable = true) {
  Response response;
  response.request.name = name;
  response.request.operation = Operation::kAllreduce;
  response.request.tensors.push_back({DType::kFloat32, {elements}});
  response.request.cacheable = cacheable;
  return response;
}

// A step of a network: the statistics of a layer that is used twice, two gradients, a loss without a name.
void Step(StepClock* clock, Nanoseconds* now, Nanoseconds took, std::vector<Nanoseconds>* steps) {
  for (const Response& response : {Agreed("statistics", 8), Agreed("statistics", 8), Agreed("small", 10),
                                   Agreed("large", 1000), Agreed("loss", 5000, false)}) {
    *now += took / 5;
    if (const auto step = clock->Saw(*now, response)) steps->push_back(*step);
  }
}

RT_TEST(a_step_is_what_lies_between_its_largest_operations) {
  StepClock clock;
  Nanoseconds now = 1;
  std::vector<Nanoseconds> steps;
  clock.Saw(now, Agreed("broadcast", 100000));  // once, at the beginning
  for (int step = 0; step < 4; ++step) Step(&clock, &now, 10 * kMillisecond, &steps);
  RT_REQUIRE(!steps.empty());
  RT_CHECK_EQ(steps.back(), 10 * kMillisecond);
  RT_CHECK_EQ(clock.operations(), 5);
  RT_CHECK_EQ(clock.model(),
              "allreduce 'large' float32,1000\nallreduce 'small' float32,10\nallreduce 'statistics' float32,8\n");
  steps.clear();
  clock.StopLearning();
  clock.Saw(now, Agreed("validation", 1000000));
  clock.Saw(now, Agreed("validation", 1000000));
  now += 5 * kMillisecond;
  for (int step = 0; step < 2; ++step) Step(&clock, &now, 10 * kMillisecond, &steps);
  RT_CHECK_EQ(steps.size(), size_t{2});
  RT_CHECK_EQ(steps[0], 15 * kMillisecond);  // with what lay between the two
  RT_CHECK_EQ(steps[1], 10 * kMillisecond);
}

RT_TEST(models_differ_by_shape) {
  StepClock one, other;
  for (int i = 0; i < 3; ++i) {
    one.Saw(i, Agreed("x", 10));
    other.Saw(i, Agreed("x", 11));
  }
  RT_CHECK(!one.model().empty() && one.model() != other.model());
}

// ---- the search ----

using Cost = std::function<double(const Settings&)>;  // milliseconds of a step

SearchPlan Plan() {
  SearchPlan plan;
  plan.start = {4, 1, 10, 1000};
  plan.values = {{{1, 2, 4, 8}, {}, {5, 10, 20}, {100, 1000, 10000}}};
  plan.steps_per_sample = 10;
  plan.max_samples = 100;
  return plan;
}

// Settings that the search ends with. `noise`: of a step, as a share; every tenth step takes ten times as long.
Settings Found(const SearchPlan& plan, const Cost& cost, double noise, uint64_t seed, int* steps) {
  TuningSearch search(plan);
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<double> shake(1 - noise, 1 + noise);
  for (*steps = 0; !search.done(); ++*steps) {
    RT_REQUIRE(*steps < 10000);
    const double outlier = noise > 0 && random() % 10 == 0 ? 10 : 1;
    search.StepTook(static_cast<Nanoseconds>(cost(search.wanted()) * shake(random) * outlier * 1e6));
  }
  RT_CHECK(search.wanted() == search.best());
  return search.best();
}

RT_TEST(the_shortest_steps_are_found) {
  int steps = 0;
  // 4 -> 2 -> 1 gains; a longer gathering, too; another burst makes it worse.
  const Cost cost = [](const Settings& settings) {
    return 100 + 20.0 * static_cast<double>(settings[kFusion]) + (settings[kGather] == 10000 ? -30 : 0) +
           (settings[kBurst] == 10 ? 0 : 50);
  };
  const Settings expected = {1, 1, 10, 10000};
  RT_CHECK(Found(Plan(), cost, 0, 1, &steps) == expected);
  for (uint64_t seed = 1; seed <= 50; ++seed) RT_CHECK(Found(Plan(), cost, 0.05, seed, &steps) == expected);
  RT_CHECK(steps < 250);
}

RT_TEST(noise_alone_changes_nothing) {
  int changed = 0, steps = 0;
  for (uint64_t seed = 1; seed <= 200; ++seed)
    changed += Found(Plan(), [](const Settings&) { return 100.0; }, 0.1, seed, &steps) != Plan().start;
  RT_CHECK(changed <= 2);  // one in a hundred
}

// A machine that becomes faster while a candidate is tried makes the candidate no better.
RT_TEST(a_faster_machine_is_no_gain) {
  for (int from = 1; from < 12; ++from) {
    TuningSearch search(Plan());
    for (int sample = 0; !search.done(); ++sample) {
      const Nanoseconds took = (sample < from ? 100 : 60) * kMillisecond;
      while (!search.done() && !search.StepTook(took)) {
      }
    }
    RT_CHECK(search.best() == Plan().start);
  }
}

RT_TEST(a_setting_without_values_stays) {
  SearchPlan plan = Plan();
  for (auto& values : plan.values) values.clear();
  TuningSearch search(plan);
  for (int step = 0; step < plan.steps_per_sample; ++step) search.StepTook(kMillisecond);
  RT_CHECK(search.done() && search.best() == plan.start);
}

RT_TEST(samples_end) {
  SearchPlan plan = Plan();
  plan.max_samples = 3;
  int steps = 0;
  Found(plan, [](const Settings& settings) { return static_cast<double>(settings[kFusion]); }, 0, 1, &steps);
  RT_CHECK(steps <= 3 * (plan.steps_per_sample + 1));
}

// The first step after a change began before it.
RT_TEST(the_step_of_a_change_does_not_count) {
  SearchPlan plan = Plan();
  plan.steps_per_sample = 1;
  TuningSearch search(plan);
  RT_CHECK(search.StepTook(100).has_value());
  RT_CHECK(search.wanted() != plan.start);
  RT_CHECK(!search.StepTook(1).has_value());
  const auto sample = search.StepTook(100);
  RT_REQUIRE(sample.has_value());
  RT_CHECK_EQ(sample->step, Nanoseconds{100});
}

// ---- what is remembered ----

RT_TEST(memory_keeps_what_it_was_told) {
  TuningMemory memory;
  const std::string one = KeyOf({"a", "b"}), other = KeyOf({"ab", ""});
  RT_CHECK(one != other);
  const Settings settings = {1 << 20, 4, 1 << 20, 100};
  memory.Keep(one, settings);
  TuningMemory read;
  RT_CHECK(read.Read(memory.Text()));
  RT_REQUIRE(read.Find(one).has_value());
  RT_CHECK(*read.Find(one) == settings);
  RT_CHECK(!read.Find(other).has_value());
  for (size_t i = 0; i < TuningMemory::kMost; ++i) read.Keep(KeyOf({std::to_string(i)}), settings);
  RT_CHECK(!read.Find(one).has_value());
  RT_CHECK(read.Find(KeyOf({"0"})).has_value());
}

RT_TEST(broken_memory_is_none) {
  TuningMemory memory;
  const Settings settings = {1 << 20, 4, 1 << 20, 100};
  memory.Keep(KeyOf({"a"}), settings);
  const std::string text = memory.Text();
  RT_CHECK(memory.Read("") && memory.Text() != text);
  const auto refuses = [](const std::string& broken) {
    TuningMemory read;
    return !read.Read(broken) && read.Text() == TuningMemory().Text();
  };
  RT_CHECK(refuses("something else"));
  RT_CHECK(refuses(text.substr(0, text.find("tcp_streams"))));  // cut off
  RT_CHECK(refuses(text + "more\n"));
  std::string outside = text;
  outside.replace(outside.find("tcp_streams=4"), 13, "tcp_streams=9");
  RT_CHECK(refuses(outside));
  std::string misnamed = text;
  misnamed.replace(misnamed.find("tcp_streams"), 11, "tcp_strands");
  RT_CHECK(refuses(misnamed));
}

}  // namespace
}  // namespace ringtrain
