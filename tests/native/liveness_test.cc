// Signs of life, and who is judged dead by them. Processes die for true here; time is the test's.
#include "world/liveness.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "check.h"
#include "transport/life_sign.h"

namespace ringtrain {
namespace {

constexpr double kBound = 15;

// A sign of life in memory that a forked child shares, and the child that has done `body` and waits for its end.
class Child {
 public:
  template <typename Body>
  explicit Child(Body body) {
    void* memory = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    life_ = static_cast<LifeSign*>(memory);
    int done[2];
    RT_REQUIRE_EQ(pipe(done), 0);
    process_ = fork();
    if (process_ == 0) {
      body(*life_);
      if (write(done[1], "", 1) != 1) _exit(1);
      for (;;) pause();
    }
    char byte;
    RT_REQUIRE_EQ(read(done[0], &byte, 1), ssize_t{1});
    close(done[0]);
    close(done[1]);
  }
  ~Child() {
    Kill();
    munmap(life_, 4096);
  }
  void Kill() {
    kill(process_, SIGKILL);
    waitpid(process_, nullptr, 0);
  }
  LifeSign& life() { return *life_; }

 private:
  LifeSign* life_;
  pid_t process_;
};

RT_TEST(a_killed_process_has_died_for_everyone_who_looks) {
  Child child([](LifeSign& life) { life.Begin(); });
  RT_CHECK(!child.life().Died());
  child.Kill();
  for (int look = 0; look < 3; ++look) RT_CHECK(child.life().Died());
  RT_CHECK(!child.life().left());
}

RT_TEST(a_process_that_left_or_never_began_has_not_died) {
  Child left([](LifeSign& life) {
    life.Begin();
    life.End();
  });
  Child unborn([](LifeSign&) {});
  for (Child* child : {&left, &unborn}) {
    child->Kill();
    RT_CHECK(!child->life().Died());
  }
  RT_CHECK(left.life().left());
  RT_CHECK(!unborn.life().left());
}

// As ranks of one host do when one of them is killed: without a pause, so that some are interrupted within their look.
// A look that unlocks what it has not locked crashes at the first death.
RT_TEST(many_may_look_at_one_that_dies) {
  constexpr int kDeaths = 40, kWhoLook = 7;
  std::vector<std::unique_ptr<Child>> children;
  for (int death = 0; death < kDeaths; ++death)
    children.push_back(std::make_unique<Child>([](LifeSign& life) { life.Begin(); }));
  std::atomic<int> next{0};
  std::vector<std::atomic<int>> seen(kDeaths);
  std::vector<std::thread> lookers;
  for (int looker = 0; looker < kWhoLook; ++looker)
    lookers.emplace_back([&] {
      for (int death = 0; death < kDeaths; ++death) {
        while (next.load() < death) std::this_thread::yield();
        while (!children[death]->life().Died()) continue;
        ++seen[death];
      }
    });
  for (int death = 0; death < kDeaths; ++death) {
    next = death;
    children[death]->Kill();
    while (seen[death].load() < kWhoLook) std::this_thread::yield();
  }
  for (std::thread& looker : lookers) looker.join();
}

// The ranks of a world, each with its liveness; they see of each other what a test has had them do.
struct Ranks {
  explicit Ranks(const std::vector<int>& layout, double bound = kBound) {
    std::vector<std::string> keys;
    for (size_t host = 0; host < layout.size(); ++host)
      keys.insert(keys.end(), layout[host], "host" + std::to_string(host));
    world.resize(keys.size());
    beats.resize(keys.size());
    arrivals.resize(keys.size());
    for (size_t rank = 0; rank < keys.size(); ++rank) {
      world[rank].rank = static_cast<int>(rank);
      world[rank].size = static_cast<int>(keys.size());
      world[rank].host_names = keys;
      GroupByHost(keys, &world[rank]);
      liveness.emplace_back(world[rank], bound);
    }
  }

  SignsOfLife SeenBy(int viewer) const {
    SignsOfLife signs;
    for (size_t other = 0; other < world.size(); ++other) {
      const int rank = static_cast<int>(other);
      const bool local = world[viewer].host_of[rank] == world[viewer].host_of[viewer];
      signs.push_back({left.count(rank) > 0, ended.count(rank) > 0, local ? beats[rank] : arrivals[rank]});
    }
    return signs;
  }

  // Beats, between hosts too, and looks: what the protocol does in one go.
  Status Look(int rank, Nanoseconds now) {
    ++beats[rank];
    for (size_t i = 0; i < liveness[rank].listeners().size(); ++i) ++arrivals[rank];
    return liveness[rank].Look(now, SeenBy(rank));
  }

  std::vector<World> world;
  std::vector<Liveness> liveness;
  std::vector<uint64_t> beats, arrivals;  // by rank
  std::set<int> left, ended;
};

RT_TEST(a_rank_that_beats_lives_and_one_that_is_silent_is_named) {
  Ranks ranks({3});
  Nanoseconds now = 100 * kSecond;
  for (int second = 0; second < 60; ++second, now += kSecond)
    for (int rank : {1, 2, 0}) RT_CHECK_OK(ranks.Look(rank, now));
  const Nanoseconds stopped = now - kSecond;  // rank 1, from here on
  for (; now < stopped + 15 * kSecond; now += kSecond)
    for (int rank : {2, 0}) RT_CHECK_OK(ranks.Look(rank, now));
  for (int rank : {0, 2}) {
    const Status verdict = ranks.Look(rank, now);
    RT_CHECK_EQ(verdict.code(), StatusCode::kPeerLost);
    RT_CHECK(verdict.message().find(
                 "rank 1 on host 'host0': expected a sign of life every second but heard none for 15 s") == 0);
  }
}

// Rank 2 joins, and takes the state of the others, who stand still meanwhile; rank 1 is silent too.
RT_TEST(ranks_that_take_the_state_over_are_given_up_sooner) {
  constexpr Nanoseconds kStopped = 100 * kSecond;
  Ranks ranks({3});
  ranks.liveness[0].AwaitStateFrom(2);
  for (int rank : {1, 2}) RT_CHECK_OK(ranks.Look(rank, kStopped));
  Nanoseconds now = kStopped;
  for (; now < kStopped + 2 * kSecond; now += kSecond / 2) RT_CHECK_OK(ranks.Look(0, now));
  RT_CHECK_EQ(ranks.Look(0, now).message().find(
                  "rank 2 on host 'host0': expected a sign of life every second but heard none for 2 s"),
              size_t{0});
  RT_CHECK(ranks.liveness[0].Silent(now) == std::vector<int>({2}));
  ranks.liveness[0].AwaitStateFrom(3);
  RT_CHECK_OK(ranks.Look(0, now));
}

RT_TEST(whoever_was_stopped_itself_does_not_take_those_that_join_for_silent) {
  Ranks ranks({2});
  ranks.liveness[0].AwaitStateFrom(1);
  for (int rank : {1, 0}) RT_CHECK_OK(ranks.Look(rank, 100 * kSecond));
  RT_CHECK_OK(ranks.Look(0, 100 * kSecond + 5 * kSecond / 2));  // both were, for less than the bound of others
}

RT_TEST(whoever_was_stopped_itself_gives_the_others_the_time_once_more) {
  Ranks ranks({2});
  for (int rank : {0, 1}) RT_CHECK_OK(ranks.Look(rank, 100 * kSecond));
  const Nanoseconds resumed = 1000 * kSecond;  // both were stopped; rank 0 wakes first
  RT_CHECK_OK(ranks.Look(0, resumed));
  for (int second = 1; second < 15; ++second) RT_CHECK_OK(ranks.Look(0, resumed + second * kSecond));
  RT_CHECK(!ranks.Look(0, resumed + 15 * kSecond).ok());  // rank 1 never came back
}

RT_TEST(whoever_was_stopped_itself_says_so_for_as_long_as_others_may_take_it_for_silent) {
  Ranks ranks({2});
  for (int rank : {0, 1}) RT_CHECK_OK(ranks.Look(rank, 100 * kSecond));
  RT_CHECK(ranks.liveness[0].Unheard(100 * kSecond).empty());
  const Nanoseconds resumed = 108 * kSecond;
  for (int second = 0; second < 15; ++second) {
    for (int rank : {1, 0}) RT_CHECK_OK(ranks.Look(rank, resumed + second * kSecond));
    RT_CHECK(ranks.liveness[0].Unheard(resumed + second * kSecond) == std::vector<int>({0}));
  }
  RT_CHECK(ranks.liveness[0].Unheard(resumed + 15 * kSecond).empty());
}

RT_TEST(a_cut_between_hosts_is_seen_on_both_sides) {
  Ranks ranks({2, 1, 1, 1, 1});
  RT_CHECK(ranks.liveness[0].listeners() == std::vector<int>({2, 3, 5}));
  RT_CHECK(ranks.liveness[1].listeners().empty());  // the lowest rank speaks for its host
  const std::vector<int> all = {0, 1, 2, 3, 4, 5};
  Nanoseconds now = 100 * kSecond;
  for (int second = 0; second < 30; ++second, now += kSecond) {
    for (int rank : all) RT_CHECK_OK(ranks.Look(rank, now));
  }
  const int cut = 4;
  Ranks seen_by_cut = ranks;  // nothing comes to it any more
  std::vector<Status> verdicts(all.size());
  for (int second = 0; second < 20; ++second, now += kSecond) {
    for (int rank : all)
      if (rank != cut && verdicts[rank].ok()) verdicts[rank] = ranks.Look(rank, now);
    if (verdicts[cut].ok()) verdicts[cut] = ranks.liveness[cut].Look(now, seen_by_cut.SeenBy(cut));
  }
  RT_CHECK_EQ(verdicts[cut].code(), StatusCode::kPeerLost);
  for (int rank : {0, 3, 5})  // its listeners
    RT_CHECK(verdicts[rank].message().find("rank 4 on host 'host3': expected a sign of life") == 0);
  for (int rank : {1, 2}) RT_CHECK_OK(verdicts[rank]);  // they learn it from the others' abort
}

RT_TEST(tensors_are_signs_of_life_too) {
  Ranks ranks({1, 1});
  for (int second = 0; second < 60; ++second) {
    ++ranks.arrivals[1];
    RT_CHECK_OK(ranks.Look(0, (100 + second) * kSecond));
  }
}

RT_TEST(whoever_has_died_is_named_at_once_unless_it_had_left) {
  Ranks ranks({3});
  ranks.ended = {1, 2};
  ranks.left = {1};
  const Status verdict = ranks.Look(0, 100 * kSecond);
  RT_CHECK(verdict.message().find("rank 2 on host 'host0': expected it to live until shutdown()") == 0);
}

// As when a starter of ranks ends them all because one has.
RT_TEST(all_that_have_died_since_the_last_look_are_named) {
  Ranks ranks({2, 4});
  ranks.ended = {3, 4};
  const Status verdict = ranks.Look(2, 100 * kSecond);
  RT_CHECK(verdict.message().find("ranks 3, 4 on host 'host1': expected them to live until shutdown()") == 0);
}

RT_TEST(one_that_has_died_is_named_before_one_that_is_silent) {
  Ranks ranks({3});
  RT_CHECK_OK(ranks.Look(0, 100 * kSecond));
  for (int second = 1; second < 15; ++second) RT_CHECK_OK(ranks.Look(0, (100 + second) * kSecond));
  ranks.ended = {2};
  const Status verdict = ranks.Look(0, 115 * kSecond);
  RT_CHECK(verdict.message().find("rank 2 on host 'host0': expected it to live until shutdown()") == 0);
}

RT_TEST(a_lost_connection_is_told_with_rank_host_and_the_words_of_the_wire) {
  Ranks ranks({2, 1});
  const Status there = ranks.liveness[0].ConnectionLost({2, "connection reset by peer"});
  RT_CHECK_EQ(there.code(), StatusCode::kPeerLost);
  RT_CHECK_EQ(there.message(),
              "rank 2 on host 'host1': the connection to it must last until shutdown(), but was lost: connection reset "
              "by peer. It has ended, or the network to its host is cut: look for its own last words, and for its exit "
              "code or signal in what the launcher prints; if there are none, look at that host and at the network to "
              "it.");
  RT_CHECK_EQ(ranks.liveness[0].ConnectionLost({1, "connection reset by peer"}).message(),
              "rank 1 on host 'host0': the connection to it must last until shutdown(), but was lost: connection reset "
              "by peer. It runs on this host, so its process has ended: look for its own last words, and for its exit "
              "code or signal in what the launcher prints; after signal 9 look at the memory of this host (dmesg).");
}

RT_TEST(a_path_that_loses_large_packets_is_told_with_both_its_ends) {
  Ranks ranks({2, 1});
  const std::string said = ranks.liveness[0].ConnectionLost({2, "timed out", true}).message();
  RT_CHECK_EQ(said.find("rank 2 on host 'host1': "), size_t{0});
  RT_CHECK(said.find("was lost: timed out. Small packets pass between host 'host0' and it, large ones do not: MTU.") !=
           std::string::npos);
}

RT_TEST(a_host_that_has_left_is_not_listened_to) {
  Ranks ranks({1, 1});
  RT_CHECK_OK(ranks.Look(0, 100 * kSecond));
  ranks.liveness[0].Forget(1);
  for (int second = 0; second < 60; ++second) RT_CHECK_OK(ranks.Look(0, (100 + second) * kSecond));
}

RT_TEST(without_a_bound_silence_is_no_death) {
  Ranks ranks({2}, 0);
  for (int second = 0; second < 600; ++second) RT_CHECK_OK(ranks.Look(0, (100 + second) * kSecond));
}

}  // namespace
}  // namespace ringtrain
