// Ranks that meet by frames, as those of an MPI world do; here the frames travel between threads. in_process_test has
// the other form.
#include "transport/rendezvous.h"

#include "check.h"
#include "transport/in_process.h"

using namespace ringtrain;

namespace {

constexpr double kPatienceSeconds = 60;

Meeting Meet(Rendezvous& rendezvous) {
  Meeting meeting;
  meeting.world.rank = rendezvous.rank();
  meeting.world.size = rendezvous.size();
  const auto window = [](const World&) { return size_t{1} << 16; };
  RT_REQUIRE_OK(rendezvous.Meet(window, DeadlineAfter(kPatienceSeconds), &meeting));
  return meeting;
}

}  // namespace

RT_TEST(every_rank_hears_every_text) {
  auto hub = std::make_shared<Hub>(std::vector<int>{4});
  check::RunRanks(4, [&hub](int rank) {
    const auto rendezvous = MeetByFrames(Hub::TransportOf(hub, rank), {});
    RT_CHECK_EQ(rendezvous->rank(), rank);
    RT_CHECK_EQ(rendezvous->size(), 4);
    for (int round = 0; round < 20; ++round) {
      const std::string text(static_cast<size_t>(round * 1000), static_cast<char>('a' + rank));
      std::vector<std::string> all;
      RT_REQUIRE_OK(rendezvous->Allgather(text, DeadlineAfter(kPatienceSeconds), &all));
      for (int other = 0; other < 4; ++other)
        RT_CHECK(all[static_cast<size_t>(other)] ==
                 std::string(static_cast<size_t>(round * 1000), static_cast<char>('a' + other)));
    }
  });
}

RT_TEST(ranks_of_one_host_share_memory_and_those_of_a_pretended_one_do_not) {
  auto hub = std::make_shared<Hub>(std::vector<int>{3});
  std::atomic<int> hosts_with_two{0};
  check::RunRanks(3, [&](int rank) {
    const Meeting meeting = Meet(*MeetByFrames(Hub::TransportOf(hub, rank), {2, 1}));
    RT_CHECK(meeting.world.hosts == (std::vector<std::vector<int>>{{0, 1}, {2}}));
    RT_CHECK_EQ(meeting.memory->local_size(), rank == 2 ? 1 : 2);
    RT_CHECK_EQ(meeting.transport->rank(), rank);
    RT_CHECK(meeting.warnings.empty());
    // The same memory: what one writes, the other reads.
    if (rank == 0) meeting.memory->control().abort.state.store(AbortNotice::kSet);
    if (rank == 1) {
      const Nanoseconds deadline = DeadlineAfter(kPatienceSeconds);
      while (meeting.memory->control().abort.state.load() != AbortNotice::kSet && Now() < deadline) {
      }
      RT_CHECK_EQ(meeting.memory->control().abort.state.load(), uint32_t{AbortNotice::kSet});
      ++hosts_with_two;
    }
    if (rank == 2) RT_CHECK_EQ(meeting.memory->control().abort.state.load(), uint32_t{AbortNotice::kNone});
  });
  RT_CHECK_EQ(hosts_with_two.load(), 1);
}

// Hosts 0 1 | 2 | 3: rank 1 is on rank 0's.
RT_TEST(the_least_round_trip_is_that_of_rank_0_to_another_host) {
  World world;
  GroupByHost({"a", "a", "b", "c"}, &world);
  world.TakeRoundTrips({50, 1, 50, 40});
  RT_CHECK_EQ(world.round_trip, 50);
  RT_CHECK_EQ(world.least_round_trip, 40);
  world.TakeRoundTrips({50, 1, 50, 0});  // not known
  RT_CHECK_EQ(world.least_round_trip, 0);
  GroupByHost({"a", "a", "a", "a"}, &world);
  world.TakeRoundTrips({2, 1, 2, 1});
  RT_CHECK_EQ(world.least_round_trip, 0);
}

RT_TEST(a_rank_that_is_lost_while_the_others_wait_for_it_is_named_at_once) {
  for (int lost : {0, 2}) {
    auto hub = std::make_shared<Hub>(std::vector<int>{3});
    hub->CutOff(lost, "no route to host");
    const int waits = lost == 0 ? 1 : 0;  // rank 0 waits for all, the others for rank 0
    std::vector<std::string> all;
    const Status status =
        MeetByFrames(Hub::TransportOf(hub, waits), {})->Allgather("here", DeadlineAfter(kPatienceSeconds), &all);
    RT_CHECK_EQ(status.code(), StatusCode::kPeerLost);
    RT_CHECK_EQ(status.message(), "init: rank " + std::to_string(lost) +
                                      " must stay until all ranks have met, but the connection to it was lost: no "
                                      "route to host. Look for its error.");
  }
}

RT_TEST(the_root_names_the_ranks_that_do_not_come) {
  auto hub = std::make_shared<Hub>(std::vector<int>{3});
  check::RunRanks(3, [&hub](int rank) {
    if (rank == 2) return;
    std::vector<std::string> all;
    const Status status = MeetByFrames(Hub::TransportOf(hub, rank), {})->Allgather("here", DeadlineAfter(1), &all);
    RT_CHECK_EQ(status.code(), StatusCode::kTimeout);
    if (rank == 0) RT_CHECK_EQ(status.message(), RanksMissing(3, {2}).message());
  });
}
