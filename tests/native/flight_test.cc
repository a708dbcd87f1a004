// The memory of what has ended: the newest stay, pending ones are never lost, and a record is written in bounded time.
#include "observe/flight.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <thread>

#include "check.h"
#include "observe/flight_record.h"
#include "observe/traffic.h"
#include "run/submission.h"

using namespace ringtrain;

namespace {

std::shared_ptr<Submission> Named(const std::string& name) {
  auto submission = std::make_shared<Submission>();
  submission->request.name = name;
  submission->request.tensors = {{DType::kFloat32, {2, 3, 4, 5, 6, 7, 8}}};
  submission->submitted = Now();
  return submission;
}

std::vector<std::string> NamesOf(const std::vector<FlownOperation>& operations) {
  std::vector<std::string> names;
  for (const FlownOperation& each : operations) names.push_back(each.name);
  return names;
}

std::string NewFolder() {
  char path[] = "/tmp/ringtrain-flight-XXXXXX";
  RT_REQUIRE(mkdtemp(path) != nullptr);
  return path;
}

std::string ContentOf(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace

RT_TEST(the_newest_that_ended_and_all_that_wait) {
  SubmissionTable table(3);
  const auto waiting = Named("waiting");
  RT_REQUIRE(table.Add(waiting).ok());
  for (int i = 0; i < 7; ++i) {
    const auto submission = Named(std::to_string(i));
    RT_REQUIRE(table.Add(submission).ok());
    table.Finish(submission, i == 5 ? Status::Mismatch("x") : Status());
  }
  const auto flown = table.Flown();
  RT_CHECK(NamesOf(flown) == (std::vector<std::string>{"waiting", "4", "5", "6"}));
  RT_CHECK(flown[0].status == StatusCode::kPending && flown[0].finished == 0);
  RT_CHECK(flown[1].status == StatusCode::kOk && flown[1].finished >= flown[1].submitted);
  RT_CHECK(flown[2].status == StatusCode::kMismatch);
  RT_CHECK_EQ(flown[3].number, 8u);
  RT_CHECK_EQ(flown[3].dimensions, 7);
  RT_CHECK_EQ(flown[3].extents[5], 7);
  RT_CHECK(table.Oldest() == waiting);
  table.Close(Status::PeerLost("the end"));
  RT_CHECK(table.Oldest() == nullptr);
  const auto closed = table.Flown();
  RT_CHECK(NamesOf(closed) == (std::vector<std::string>{"waiting", "5", "6"}));
  RT_CHECK(closed[0].status == StatusCode::kPeerLost);
}

RT_TEST(nothing_is_remembered_where_nothing_is_to_be) {
  SubmissionTable table(0);
  const auto submission = Named("x");
  RT_REQUIRE(table.Add(submission).ok());
  RT_CHECK_EQ(table.Flown().size(), 1u);  // it is pending
  table.Finish(submission, Status());
  RT_CHECK(table.Flown().empty());
}

RT_TEST(long_names_keep_their_end) {
  FlownOperation operation;
  for (size_t length : {0, 1, 126, 127, 128, 129, 5000}) {
    const std::string name = std::string(length, 'a') + "z";
    operation.SetName(name);
    const std::string kept = operation.name;
    if (name.size() < sizeof operation.name)
      RT_CHECK_EQ(kept, name);
    else
      RT_CHECK_EQ(kept, "..." + name.substr(name.size() - 124));
  }
}

RT_TEST(reading_beside_threads_that_submit_and_finish) {
  SubmissionTable table(16);
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 2; ++thread)
    threads.emplace_back([&table, thread] {
      for (int i = 0; i < 2000; ++i) {
        const auto submission = Named(std::to_string(thread));
        if (!table.Add(submission).ok()) continue;
        submission->announced.store(1);
        submission->agreed.store(1);
        table.Finish(submission, Status());
      }
    });
  std::thread reader([&] {
    while (!stop.load()) {
      uint64_t last = 0;
      for (const FlownOperation& each : table.Flown()) {
        RT_CHECK(each.number > last);
        last = each.number;
      }
    }
  });
  for (std::thread& thread : threads) thread.join();
  stop.store(true);
  reader.join();
  RT_CHECK_EQ(table.Flown().size(), 16u);
}

RT_TEST(the_file_is_replaced_as_a_whole) {
  Options options;
  RT_REQUIRE(Options::Parse("", &options).ok());
  RT_CHECK(!FlightFile(options, 0).wanted());
  RT_CHECK(FlightFile(options, 0).Prepare().ok());
  const std::string root = NewFolder();
  options.flight_record = root + "/of/some/depth";
  const FlightFile file(options, 3);
  RT_REQUIRE(file.Prepare().ok());
  Log log;
  Writer writer;
  for (const char* text : {"the first one\n", "next\n"}) {
    file.Write(text, &writer, &log);
    RT_CHECK_EQ(writer.Await(60), std::string());
  }
  std::string line;
  RT_CHECK(!log.Next(&line));
  RT_CHECK_EQ(ContentOf(options.flight_record + "/flight.3.json"), "next\n");
  RT_CHECK(ContentOf(options.flight_record + "/flight.3.json.growing").empty());
  std::system(("rm -r " + root).c_str());
}

RT_TEST(a_file_that_cannot_be_written_is_a_warning) {
  Options options;
  RT_REQUIRE(Options::Parse("", &options).ok());
  options.flight_record = NewFolder();
  RT_REQUIRE(mkdir((options.flight_record + "/flight.0.json").c_str(), 0700) == 0);
  Log log;
  Writer writer;
  FlightFile(options, 0).Write("x", &writer, &log);
  RT_CHECK_EQ(writer.Await(60), std::string());
  std::string line;
  RT_REQUIRE(log.Next(&line));
  RT_CHECK(line.find("warning|flight record '" + options.flight_record + "/flight.0.json': it must be") == 0);
  std::system(("rm -r " + options.flight_record).c_str());
}

// A pipe that nobody reads stands for a file system that hangs: opening it for writing does not return.
RT_TEST(a_file_system_that_hangs_keeps_nobody) {
  Options options;
  RT_REQUIRE(Options::Parse("", &options).ok());
  options.flight_record = NewFolder();
  const std::string pipe = options.flight_record + "/flight.0.json.growing";
  RT_REQUIRE(mkfifo(pipe.c_str(), 0600) == 0);
  const FlightFile file(options, 0);
  RT_REQUIRE(file.Prepare().ok());
  Log log;
  Writer writer;
  file.Write("x", &writer, &log);
  RT_CHECK_EQ(writer.Await(0), "flight record '" + options.flight_record + "/flight.0.json'");
  RT_CHECK_EQ(ContentOf(pipe), "x");  // which lets the thread go on
  RT_CHECK_EQ(writer.Await(60), std::string());
  std::system(("rm -r " + options.flight_record).c_str());
}

RT_TEST(sizes_have_classes) {
  RT_CHECK_EQ(TrafficTable::SizeClass(0), 0);
  RT_CHECK_EQ(TrafficTable::SizeClass(1), 1);
  RT_CHECK_EQ(TrafficTable::SizeClass(4095), 12);
  RT_CHECK_EQ(TrafficTable::SizeClass(4096), 13);
  RT_CHECK_EQ(TrafficTable::SizeClass(INT64_MAX), 63);
  TrafficTable table;
  table.Add({Operation::kBroadcast, 63, 1, 2, 3, 4, 5});
  table.Add({Operation::kBroadcast, 63, 1, 2, 3, 4, 5});
  RT_REQUIRE(table.All().size() == 1);
  RT_CHECK_EQ(table.All()[0].waiting, 10);
}
