// Options: every row's default, strict parsing, and texts that name option, expectation and value.
#include "base/options.h"

#include "check.h"

namespace ringtrain {
namespace {

Status Parse(const std::string& lines) {
  Options options;
  return Options::Parse(lines, &options);
}

RT_TEST(defaults_are_those_of_the_table) {
  Options options;
  RT_CHECK_OK(Options::Parse("", &options));
  RT_CHECK_EQ(options.algorithm, std::string("auto"));
  RT_CHECK_EQ(options.fusion_threshold_bytes, int64_t{64} << 20);
  RT_CHECK_EQ(options.stall_warning_seconds, 30.0);
  RT_CHECK_EQ(options.spin_microseconds, int64_t{-1});
  RT_CHECK_EQ(options.timeline, std::string());
}

RT_TEST(ranks_agree_on_the_options_that_the_table_says) {
  Options options;
  RT_CHECK_OK(Options::Parse("chunk_bytes=64\njoin_divisor=initial\ndead_after_seconds=2.5\ntimeline=x", &options));
  const auto agreed = options.Agreed();
  const auto value = [&](const std::string& name) {
    for (const auto& pair : agreed)
      if (pair.first == name) return pair.second;
    return std::string("-");
  };
  RT_CHECK_EQ(value("RINGTRAIN_CHUNK_BYTES"), std::string("64"));
  RT_CHECK_EQ(value("RINGTRAIN_JOIN_DIVISOR"), std::string("initial"));
  RT_CHECK_EQ(value("RINGTRAIN_DEAD_AFTER_SECONDS"), std::string("2.500000"));
  RT_CHECK_EQ(value("RINGTRAIN_ALGORITHM"), std::string("auto"));
  RT_CHECK_EQ(value("RINGTRAIN_TIMELINE"), std::string("-"));
}

RT_TEST(lines_override_defaults_and_earlier_lines) {
  Options options;
  RT_CHECK_OK(Options::Parse(
      "cache_capacity=5\n\nalgorithm=ring\ncache_capacity=6\ntimeline=/tmp/a=b {rank}\nstall_abort_seconds=0.5",
      &options));
  RT_CHECK_EQ(options.cache_capacity, int64_t{6});
  RT_CHECK_EQ(options.algorithm, std::string("ring"));
  RT_CHECK_EQ(options.timeline, std::string("/tmp/a=b {rank}"));
  RT_CHECK_EQ(options.stall_abort_seconds, 0.5);
}

RT_TEST(wrong_values_are_refused_by_name) {
  RT_CHECK_EQ(Parse("cache_capacity=-1").message(),
              std::string("option cache_capacity: expected a number in [0, 1048576] but found '-1'."));
  RT_CHECK_EQ(Parse("cache_capacity=2.5").message(),
              std::string("option cache_capacity: expected a whole number but found '2.5'."));
  RT_CHECK_EQ(Parse("algorithm=Ring").message(),
              std::string("option algorithm: expected one of auto|shared_memory|ring|hierarchical but found 'Ring'."));
  RT_CHECK_EQ(Parse("no_such_option=1").message(),
              std::string("option 'no_such_option' does not exist; docs/options.md lists them."));
  RT_CHECK_EQ(Parse("cache_capacity").message(),
              std::string("options: expected name=value but found 'cache_capacity'."));
  for (const char* line :
       {"cache_capacity=", "cache_capacity=abc", "cache_capacity=5x", "cache_capacity=nan", "stall_warning_seconds=inf",
        "stall_warning_seconds=0", "algorithm=", "algorithm=auto|ring", "join_divisor=none", "=5", " cache_capacity=5"})
    RT_CHECK_EQ(Parse(line).code(), StatusCode::kInvalidArgument);
}

RT_TEST(limits_themselves_are_allowed) {
  for (const char* line :
       {"cache_capacity=0", "cache_capacity=1048576", "spin_microseconds=-1", "fusion_threshold_bytes=4294967296",
        "shutdown_timeout_seconds=0", "start_timeout_seconds=0.1"})
    RT_CHECK_OK(Parse(line));
}

}  // namespace
}  // namespace ringtrain
