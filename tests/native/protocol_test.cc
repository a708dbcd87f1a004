// The end of a world as one rank sees it. What ranks do together is in tests/simulation.
#include "core/protocol.h"

#include <utility>
#include <vector>

#include "check.h"

namespace ringtrain {
namespace {

// A rank of a world in which everybody lives and nothing is submitted; it notes what it is told to send.
class QuietRank : public Performer {
 public:
  void Send(int, Frame frame) override { sent.push_back(frame.type); }
  void Start(int, const effect::Execute&) override {}
  bool Busy(int) const override { return false; }
  void Finish(int, const effect::Execute&) override {}
  void Fail(int, const std::string&, const Status&) override {}
  void AddProcessSet(int, const std::vector<int>&) override {}
  void RemoveProcessSet(int) override {}
  void Warn(const std::string&) override {}
  void Count(int, const effect::Count&) override {}
  void ShowStacks(const std::string&) override {}
  void Beat() override {}
  Status NoteCause(const Status& cause) override { return cause; }
  void Wake(int) override {}
  void End(const Status& cause) override { ended = cause; }

  bool Left(int) const override { return false; }
  bool Died(int) const override { return false; }
  uint64_t Beats(int) const override { return 0; }
  uint64_t Arrivals(int) const override { return 0; }

  std::vector<FrameType> sent;
  Status ended;
};

// The lowest of two ranks of one host, once it has said goodbye and heard itself.
struct LeavingRank : QuietRank {
  LeavingRank() {
    protocol.SayGoodbye(0);
    Hear(0, FrameType::kGoodbye, false);
  }

  void Hear(int from, FrameType type, bool flag) {
    Frame frame;
    frame.type = type;
    frame.flag = flag;
    protocol.Arrived(0, from, std::move(frame));
  }

  const World world = TwoRanks();
  const Options options = Defaults();
  Protocol protocol{world, options, this};

 private:
  static World TwoRanks() {
    World world;
    world.size = 2;
    world.host_names = {"here", "here"};
    GroupByHost(world.host_names, &world);
    return world;
  }

  static Options Defaults() {
    Options options;
    RT_REQUIRE_OK(Options::Parse("", &options));
    return options;
  }
};

}  // namespace

RT_TEST(a_world_in_which_all_say_goodbye_ends_clean) {
  LeavingRank rank;
  RT_CHECK(!rank.protocol.released());
  rank.Hear(1, FrameType::kGoodbye, false);
  RT_CHECK(rank.sent.back() == FrameType::kAllGoodbye);
  rank.Hear(0, FrameType::kAllGoodbye, true);
  RT_CHECK(rank.protocol.released());
  RT_CHECK(rank.protocol.clean());
}

// As on a rank that was stopped: it wakes, reads in the host's notice that it was given up, and finds goodbyes in its mail.
RT_TEST(goodbyes_behind_a_failure_make_no_clean_end) {
  LeavingRank rank;
  rank.protocol.Abort(Status::PeerLost("rank 0 was silent"));
  rank.Hear(1, FrameType::kGoodbye, false);
  rank.Hear(0, FrameType::kAllGoodbye, true);
  RT_CHECK(!rank.protocol.clean());
  RT_CHECK_EQ(rank.ended.message(), std::string("rank 0 was silent"));
}

}  // namespace ringtrain
