// The in-process transport does what every transport must do, between threads.
#include "transport/in_process.h"

#include <sched.h>

#include <atomic>

#include "check.h"
#include "transport_conformance.h"

using namespace ringtrain;

namespace {

std::unique_ptr<Rendezvous> Join(const std::shared_ptr<Hub>& hub, int rank) {
  std::unique_ptr<Rendezvous> rendezvous;
  RT_REQUIRE_OK(Hub::Join(hub, rank, &rendezvous));
  return rendezvous;
}

Meeting Meet(Rendezvous& rendezvous) {
  Meeting meeting;
  meeting.world.rank = rendezvous.rank();
  RT_REQUIRE_OK(rendezvous.Meet([](const World&) { return size_t{1} << 16; }, DeadlineAfter(60), &meeting));
  return meeting;
}

}  // namespace

RT_TEST(conforms_for_each_world_and_layout) {
  for (const std::vector<int>& layout : {std::vector<int>{1}, {2}, {3}, {2, 2}, {3, 1}}) {
    auto hub = std::make_shared<Hub>(layout);
    if (check::kThreadSanitizer && hub->size() < 3) continue;  // of no other threads than those of the larger ones
    check::RunRanks(hub->size(), [&hub](int rank) {
      const Meeting meeting = Meet(*Join(hub, rank));
      RT_CHECK_EQ(meeting.transport->rank(), rank);
      RT_CHECK_EQ(meeting.transport->size(), hub->size());
      Conformance(*meeting.transport).All();
      meeting.transport->Close(true, 5.0);
    });
  }
}

// Lets all ranks go on when all have come.
class Barrier {
 public:
  explicit Barrier(int ranks) : ranks_(ranks) {}
  void Wait() {
    const int round = come_.fetch_add(1) / ranks_;
    while (come_.load() < (round + 1) * ranks_) sched_yield();
  }

 private:
  const int ranks_;
  std::atomic<int> come_{0};
};

RT_TEST(a_rank_that_is_cut_off_is_lost_to_all_and_all_to_it) {
  for (int lost = 0; lost < 3; ++lost) {
    auto hub = std::make_shared<Hub>(std::vector<int>{1, 1, 1});
    Barrier barrier(3);
    check::RunRanks(3, [&](int rank) {
      const Meeting meeting = Meet(*Join(hub, rank));
      const auto cut = [&] {
        barrier.Wait();
        if (rank == lost) hub->CutOff(lost, "the cable was pulled");
        barrier.Wait();
      };
      Conformance(*meeting.transport).LosesAPeer(lost, cut, true);
      barrier.Wait();
    });
  }
}

RT_TEST(a_rank_that_closes_is_not_lost) {
  auto hub = std::make_shared<Hub>(std::vector<int>{1, 1, 1});
  Barrier barrier(3);
  check::RunRanks(3, [&](int rank) {
    const Meeting meeting = Meet(*Join(hub, rank));
    Conformance(*meeting.transport).OnePeerCloses(1, [&] { barrier.Wait(); });
    barrier.Wait();
  });
}

RT_TEST(ranks_find_each_other_in_any_order_and_their_hosts_by_the_layout) {
  auto hub = std::make_shared<Hub>(std::vector<int>{2, 1});
  check::RunRanks(3, [&hub](int rank) {
    const auto rendezvous = Join(hub, rank);
    for (int round = 0; round < 100; ++round) {
      std::vector<std::string> all;
      const std::string text = std::to_string(round) + "." + std::to_string(rank);
      RT_REQUIRE_OK(rendezvous->Allgather(text, DeadlineAfter(60), &all));
      for (int other = 0; other < 3; ++other)
        RT_CHECK_EQ(all[static_cast<size_t>(other)], std::to_string(round) + "." + std::to_string(other));
    }
    const Meeting meeting = Meet(*rendezvous);
    RT_CHECK(meeting.world.hosts == (std::vector<std::vector<int>>{{0, 1}, {2}}));
    RT_CHECK_EQ(meeting.memory->local_rank(), rank % 2);
    RT_CHECK_EQ(meeting.memory->local_size(), rank == 2 ? 1 : 2);
  });
}

RT_TEST(whoever_does_not_come_is_named_to_all_who_have) {
  auto hub = std::make_shared<Hub>(std::vector<int>{4});
  check::RunRanks(4, [&hub](int rank) {
    if (rank == 0 || rank == 2) return;
    std::vector<std::string> all;
    const Status status = Join(hub, rank)->Allgather("here", DeadlineAfter(1), &all);
    RT_CHECK_EQ(status.code(), StatusCode::kTimeout);
    RT_CHECK_EQ(status.message(), RanksMissing(4, {0, 2}).message());
  });
}

RT_TEST(a_rank_joins_once_and_within_the_world) {
  auto hub = std::make_shared<Hub>(std::vector<int>{2});
  const auto first = Join(hub, 0);
  std::unique_ptr<Rendezvous> again;
  for (int rank : {0, -1, 2}) RT_CHECK_EQ(Hub::Join(hub, rank, &again).code(), StatusCode::kInvalidArgument);
}

RT_TEST(layouts_are_parsed_and_must_add_up) {
  std::vector<int> layout;
  RT_REQUIRE_OK(ParseLayout("2+1", 3, &layout));
  RT_CHECK(layout == (std::vector<int>{2, 1}));
  RT_REQUIRE_OK(ParseLayout("", 3, &layout));
  RT_CHECK(layout == std::vector<int>{3});
  for (const char* text : {"2+2", "3+0", "1++2", "+3", "a", "-1+4", "3 "})
    RT_CHECK_EQ(ParseLayout(text, 3, &layout).code(), StatusCode::kInvalidArgument);
}
