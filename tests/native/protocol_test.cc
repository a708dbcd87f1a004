// The effects of one rank's protocol: the end of a world, and process sets that go. What ranks do together is in
// tests/simulation.
#include "world/protocol.h"

#include <algorithm>
#include <utility>
#include <variant>
#include <vector>

#include "check.h"

namespace ringtrain {
namespace {

// Of ranks of one host.
World WorldOf(int size) {
  World world;
  world.size = size;
  world.host_names.assign(static_cast<size_t>(size), "here");
  GroupByHost(world.host_names, &world);
  return world;
}

Options Defaults() {
  Options options;
  RT_REQUIRE_OK(Options::Parse("", &options));
  return options;
}

// The lowest of two ranks of one host, once it has said goodbye and heard itself.
struct LeavingRank {
  LeavingRank() {
    protocol.Begin(0, &effects);
    protocol.SayGoodbye(0, &effects);
    Hear(0, FrameType::kGoodbye, false);
  }

  void Hear(int from, FrameType type, bool flag) {
    Frame frame;
    frame.type = type;
    frame.flag = flag;
    protocol.Arrived(0, from, std::move(frame), &effects);
  }

  const World world = WorldOf(2);
  const Options options = Defaults();
  Protocol protocol{world, options};
  RankEffects effects;
};

// Ranks on hosts of that many.
World WorldOnHosts(int size, int on_each) {
  World world;
  world.size = size;
  for (int rank = 0; rank < size; ++rank) world.host_names.push_back("host " + std::to_string(rank / on_each));
  GroupByHost(world.host_names, &world);
  return world;
}

// Those to whom a rank sends that the world has ended, once it has lost the dead one.
std::vector<int> ToldBy(int rank, int dead, World world) {
  world.rank = rank;
  const Options options = Defaults();
  Protocol protocol(world, options);
  RankEffects effects;
  protocol.Begin(0, &effects);
  effects.clear();
  protocol.ConnectionLost({dead, "connection reset by peer"}, &effects);
  protocol.CauseNoted(Status::PeerLost("it is over"), &effects);
  std::vector<int> told;
  for (const RankEffect& effect : effects)
    if (const auto* send = std::get_if<rank_effect::Send>(&effect)) told.push_back(send->rank);
  return told;
}

// How many ranks but the dead one hear of an end that one of them has found. Those of a host read what one has heard.
int HearOfEnd(int found_by, int dead, const World& world) {
  std::vector<bool> hears(static_cast<size_t>(world.size));
  std::vector<int> left;
  const auto hear = [&](int heard_by) {
    if (heard_by == dead) return;
    for (int rank : world.hosts[static_cast<size_t>(world.host_of[static_cast<size_t>(heard_by)])]) {
      if (rank == dead || hears[static_cast<size_t>(rank)]) continue;
      hears[static_cast<size_t>(rank)] = true;
      left.push_back(rank);
    }
  };
  for (hear(found_by); !left.empty();) {
    const int rank = left.back();
    left.pop_back();
    for (int told : ToldBy(rank, dead, world)) hear(told);
  }
  return static_cast<int>(std::count(hears.begin(), hears.end(), true));
}

}  // namespace

RT_TEST(a_world_in_which_all_say_goodbye_ends_clean) {
  LeavingRank rank;
  RT_CHECK(!rank.protocol.released());
  rank.Hear(1, FrameType::kGoodbye, false);
  RT_CHECK(std::get<rank_effect::Send>(rank.effects.back()).frame.type == FrameType::kAllGoodbye);
  rank.Hear(0, FrameType::kAllGoodbye, true);
  RT_CHECK(rank.protocol.released());
  RT_CHECK(rank.protocol.clean());
}

// As on a rank that was stopped: it wakes, reads in the host's notice that it was given up, and finds goodbyes in its
// mail.
RT_TEST(goodbyes_behind_a_failure_make_no_clean_end) {
  LeavingRank rank;
  rank.protocol.Abort(Status::PeerLost("rank 0 was silent"), &rank.effects);
  rank.Hear(1, FrameType::kGoodbye, false);
  rank.Hear(0, FrameType::kAllGoodbye, true);
  RT_CHECK(!rank.protocol.clean());
}

RT_TEST(the_cause_that_was_written_down_first_is_told_to_peers_and_then_to_submitters) {
  LeavingRank rank;
  rank.effects.clear();
  rank.protocol.Abort(Status::PeerLost("the second cause"), &rank.effects);
  RT_CHECK(rank.protocol.aborted());
  RT_CHECK_EQ(rank.effects.size(), size_t{1});
  RT_CHECK_EQ(std::get<rank_effect::NoteCause>(rank.effects[0]).cause.message(), "the second cause");
  rank.effects.clear();
  rank.protocol.CauseNoted(Status::PeerLost("the first cause"), &rank.effects);
  RT_REQUIRE(rank.effects.size() == 3);
  RT_CHECK_EQ(std::get<rank_effect::Wake>(rank.effects[0]).rank, 1);
  RT_CHECK(std::get<rank_effect::Send>(rank.effects[1]).frame.type == FrameType::kAbort);  // behind its verdicts
  RT_CHECK_EQ(std::get<rank_effect::End>(rank.effects[2]).cause.message(), "the first cause");
  rank.effects.clear();
  rank.protocol.Abort(Status::PeerLost("a third cause"), &rank.effects);
  RT_CHECK(rank.effects.empty());
}

// Two ranks on two hosts, as the first sees it.
struct DistantRank {
  DistantRank() {
    protocol.Begin(0, &effects);
    effects.clear();
  }

  void Hear(FrameType type, bool flag) {
    Frame frame;
    frame.type = type;
    frame.flag = flag;
    protocol.Arrived(0, 1, std::move(frame), &effects);
  }
  // Whether the loss of the other ends the world.
  bool LosesTheOther() {
    effects.clear();
    protocol.ConnectionLost({1, "connection reset by peer"}, &effects);
    return protocol.aborted();
  }

  World world = [] {
    World made;
    made.size = 2;
    made.host_names = {"here", "there"};
    GroupByHost(made.host_names, &made);
    return made;
  }();
  const Options options = Defaults();
  Protocol protocol{world, options};
  RankEffects effects;
};

// As by Ctrl-Z of the whole job, and fg: the other rank was stopped before it could submit.
RT_TEST(time_in_which_this_process_was_stopped_makes_no_operation_stall) {
  DistantRank rank;
  SignsOfLife signs(2);
  Request request;
  request.name = "x";
  request.operation = Operation::kBarrier;
  Nanoseconds now = kSecond;
  rank.protocol.Submitted(now, 0, request, &rank.effects);
  const auto stalled = [&](int seconds) {  // as the driver steps
    rank.effects.clear();
    for (const Nanoseconds end = now + seconds * kSecond; now < end; now += kSecond) {
      ++signs[1].count;
      rank.protocol.Look(now, signs, &rank.effects);
      rank.protocol.Tick(now, &rank.effects);
    }
    return std::any_of(rank.effects.begin(), rank.effects.end(),
                       [](const RankEffect& effect) { return std::holds_alternative<rank_effect::Fail>(effect); });
  };
  RT_CHECK(!stalled(10));
  now += 5000 * kSecond;
  RT_CHECK(!stalled(599));
  RT_CHECK(stalled(2));
}

RT_TEST(a_lost_connection_ends_the_world_with_the_name_of_the_rank) {
  DistantRank rank;
  RT_CHECK(rank.LosesTheOther());
  RT_REQUIRE(rank.effects.size() == 1);
  const Status& cause = std::get<rank_effect::NoteCause>(rank.effects[0]).cause;
  RT_CHECK_EQ(cause.code(), StatusCode::kPeerLost);
  RT_CHECK_EQ(cause.message().find("rank 1 on host 'there': the connection to it must last"), size_t{0});
}

RT_TEST(a_rank_that_has_said_that_it_leaves_is_not_lost) {
  for (FrameType last : {FrameType::kGoodbye, FrameType::kBeat}) {
    DistantRank rank;
    rank.Hear(last, true);
    RT_CHECK(!rank.LosesTheOther());
    RT_CHECK(rank.effects.empty());
  }
}

// It still serves the others until it says so.
RT_TEST(a_rank_that_will_only_submit_no_more_is_lost) {
  DistantRank rank;
  rank.Hear(FrameType::kGoodbye, false);
  RT_CHECK(rank.LosesTheOther());
}

RT_TEST(after_all_goodbyes_a_rank_is_lost_only_while_a_batch_is_under_way) {
  for (bool busy : {false, true}) {
    DistantRank rank;
    if (busy) {
      Request request;
      request.name = "sum";
      request.tensors = {{DType::kFloat32, {4}}};
      rank.protocol.Submitted(0, 0, request, &rank.effects);
      Frame ready;
      ready.type = FrameType::kReady;
      ready.requests = {request};
      rank.protocol.Arrived(0, 1, std::move(ready), &rank.effects);
      rank.protocol.Tick(0, &rank.effects);
      const auto is_start = [](const RankEffect& effect) { return std::holds_alternative<rank_effect::Start>(effect); };
      RT_CHECK(std::any_of(rank.effects.begin(), rank.effects.end(), is_start));
      RT_CHECK(!rank.protocol.pending());
    }
    rank.Hear(FrameType::kAllGoodbye, true);
    RT_CHECK_EQ(rank.LosesTheOther(), busy);
  }
}

// The second of two ranks of one host, which waits for the first one's verdict when it hears of the world's end.
struct WaitingRank {
  explicit WaitingRank(bool waits = true) {
    world.rank = 1;
    protocol.Begin(0, &effects);
    Request request;
    request.name = "sum";
    if (waits) protocol.Submitted(0, 0, request, &effects);
    protocol.Tick(0, &effects);
    protocol.HearEnd(Status::PeerLost("rank 0 ended"), &effects);
    effects.clear();
    protocol.CauseNoted(Status::PeerLost("rank 0 ended"), &effects);
  }
  void Hear(FrameType type) {
    Frame frame;
    frame.type = type;
    if (type == FrameType::kVerdicts) frame.verdicts = {{{}, {}, {"sum", StatusCode::kMismatch, "dtype must be"}}};
    protocol.Arrived(0, 0, std::move(frame), &effects);
  }
  bool HasEnded(Nanoseconds now = 1000) {
    protocol.MailTaken(now, &effects);
    return !effects.empty() && std::holds_alternative<rank_effect::End>(effects.back());
  }

  World world = WorldOf(2);
  const Options options = Defaults();
  Protocol protocol{world, options};
  RankEffects effects;
};

RT_TEST(what_was_decided_before_the_end_is_told_before_it) {
  WaitingRank rank;
  RT_CHECK(!rank.HasEnded() && rank.protocol.awaits_last_words());
  rank.Hear(FrameType::kGoodbye);  // changes nothing any more
  RT_CHECK(!rank.HasEnded());
  rank.Hear(FrameType::kVerdicts);
  RT_CHECK_EQ(std::get<rank_effect::Fail>(rank.effects.back()).status.message(), "dtype must be");
  RT_CHECK(rank.HasEnded() && !rank.protocol.awaits_last_words());
}

RT_TEST(nobody_waits_for_last_words_that_cannot_come) {
  WaitingRank told, lost, died, leaves, raises, idle(false);
  told.Hear(FrameType::kAbort);
  RT_CHECK(told.HasEnded());
  lost.protocol.ConnectionLost({0, "reset"}, &lost.effects);
  RT_CHECK(lost.HasEnded());
  RT_CHECK_EQ(died.protocol.next_look(), Nanoseconds{0});
  SignsOfLife signs(2);
  died.protocol.Look(0, signs, &died.effects);
  RT_CHECK(!died.HasEnded());
  signs[0].ended = true;
  died.protocol.Look(0, signs, &died.effects);
  RT_CHECK(died.HasEnded());
  leaves.protocol.SayGoodbye(0, &leaves.effects);
  RT_CHECK(leaves.HasEnded());
  raises.protocol.Abort(Status::PeerLost("rank 1 ended too"), &raises.effects);
  RT_CHECK(raises.HasEnded());
  RT_CHECK_EQ(std::get<rank_effect::End>(raises.effects.back()).cause.message(), "rank 0 ended");
  RT_CHECK(idle.HasEnded());
}

RT_TEST(last_words_are_waited_for_a_quarter_of_a_second) {
  WaitingRank rank;
  RT_CHECK(!rank.HasEnded(1000));
  rank.protocol.Look(0, SignsOfLife(2), &rank.effects);
  RT_CHECK_EQ(rank.protocol.next_timer(), Nanoseconds{250001000});
  RT_CHECK(!rank.HasEnded(250000999));
  RT_CHECK(rank.HasEnded(250001000));
}

// Between hosts each tells few: with all of them a world of 1,000 ranks would open half a million connections at its
// end.
RT_TEST(all_hear_of_an_end_by_few_frames_whoever_has_died) {
  for (int on_each : {1, 4}) {
    const World world = WorldOnHosts(64, on_each);
    for (int dead : {0, 1, 17, 63})
      for (int found_by : {2, 31, 62}) RT_CHECK_EQ(HearOfEnd(found_by, dead, world), 63);
    for (int rank = 1; rank < 64; ++rank) RT_CHECK(ToldBy(rank, 0, world).size() <= 7);
    RT_CHECK_EQ(ToldBy(0, 9, world).size(), size_t{63});  // who waits for its verdicts
  }
}

// Rank 0 of three, of which two are in process set 1.
struct DecidingRank {
  DecidingRank() {
    protocol.Begin(0, &effects);
    Request add;
    add.name = "add";
    add.operation = Operation::kAddProcessSet;
    add.splits = {0, 2};
    Hear(1, Ready(add));
    Hear(2, Ready(add));
    protocol.Submitted(0, 0, add, &effects);
    protocol.Tick(0, &effects);
    RT_REQUIRE(protocol.Knows(1));
    effects.clear();
  }

  static Frame Ready(Request request) {
    Frame frame;
    frame.requests = {std::move(request)};
    return frame;
  }
  void Hear(int from, Frame frame) { protocol.Arrived(0, from, std::move(frame), &effects); }
  // The cause of the world's end, "" if it goes on.
  std::string CauseAfter(int from, Frame frame) {
    Hear(from, std::move(frame));
    for (const RankEffect& effect : effects)
      if (const auto* end = std::get_if<rank_effect::NoteCause>(&effect)) return end->cause.message();
    return "";
  }

  const World world = WorldOf(3);
  const Options options = Defaults();
  Protocol protocol{world, options};
  RankEffects effects;
};

Request RequestOf(Operation operation, std::vector<int64_t> shape, std::vector<int64_t> splits = {}) {
  Request request;
  request.name = "x";
  request.operation = operation;
  request.tensors = {{DType::kFloat32, std::move(shape)}};
  request.splits = std::move(splits);
  return request;
}

Frame Verdicts(Response response, std::vector<int> joined = {}) {
  Frame frame;
  frame.type = FrameType::kVerdicts;
  frame.verdicts.resize(1);
  frame.verdicts[0].batch = {{7, false, std::move(response)}};
  frame.verdicts[0].joined = std::move(joined);
  return frame;
}

// The second of two ranks of one host.
struct WorldOfTwo {
  WorldOfTwo() { protocol.Begin(0, &effects); }

  const World world = [] {
    World made = WorldOf(2);
    made.rank = 1;
    return made;
  }();
  const Options options = Defaults();
  Protocol protocol{world, options};
  RankEffects effects;
};

// As of a build with other tables: what they name would lie outside of what there is here.
RT_TEST(frames_that_do_not_fit_end_the_world) {
  constexpr char kText[] =
      "a frame from rank 1 must fit process set 0, but does not. Run the same ringtrain on all ranks.";
  Request no_member = RequestOf(Operation::kBroadcast, {4}), strange_set = RequestOf(Operation::kAddProcessSet, {});
  no_member.root = 3;
  strange_set.tensors.clear();
  strange_set.splits = {0, 3};
  Request two = RequestOf(Operation::kAlltoall, {3}, {1, 1, 1});
  two.tensors.push_back(two.tensors[0]);
  for (const Request& request : {no_member, strange_set, two, RequestOf(Operation::kAlltoall, {3}, {1, 2}),
                                 RequestOf(Operation::kAlltoall, {4}, {1, 1, 1}), RequestOf(Operation::kAllgather, {}),
                                 RequestOf(Operation::kAllreduce, {-1})}) {
    DecidingRank rank;
    RT_CHECK_EQ(rank.CauseAfter(1, DecidingRank::Ready(request)), std::string(kText));
  }
  Response gathered, exchanged, weighted, placed, plain;
  gathered.request = RequestOf(Operation::kAllgather, {4});
  gathered.rows = {4, 4};
  exchanged.request = RequestOf(Operation::kAlltoall, {3}, {1, 1, 1});
  exchanged.rows = {1, 1, 1};  // and the most of a host
  weighted.request = placed.request = plain.request = RequestOf(Operation::kAllreduce, {4});
  weighted.weights = {1, 2};
  placed.devices = {0, 0, 0, 0};
  plain.rows = {1};
  for (const Response& response : {gathered, exchanged, weighted, placed, plain}) {
    DecidingRank rank;
    RT_CHECK_EQ(rank.CauseAfter(1, Verdicts(response)), std::string(kText));
  }
  plain.rows.clear();
  for (int joined : {-1, 3}) {
    DecidingRank rank;
    RT_CHECK_EQ(rank.CauseAfter(1, Verdicts(plain, {joined})), std::string(kText));
  }
  DecidingRank rank;
  Frame of_a_stranger = DecidingRank::Ready(plain.request);
  of_a_stranger.process_set = 1;
  RT_CHECK_EQ(
      rank.CauseAfter(1, of_a_stranger),
      std::string("a frame from rank 1 must fit process set 1, but does not. Run the same ringtrain on all ranks."));
}

RT_TEST(what_fits_is_heard) {
  DecidingRank rank;
  for (const Request& request :
       {RequestOf(Operation::kAlltoall, {3}, {1, 1, 1}), RequestOf(Operation::kAllgather, {0, 7})}) {
    Request named = request;
    named.name = Text(request.operation);
    RT_CHECK_EQ(rank.CauseAfter(1, DecidingRank::Ready(named)), std::string());
  }
  Request broadcast = RequestOf(Operation::kBroadcast, {4});
  broadcast.root = 2;
  Frame frame = DecidingRank::Ready(broadcast);
  frame.process_set = 1;
  RT_CHECK_EQ(rank.CauseAfter(2, frame), std::string());
}

// It has memory for what it has submitted, and for nothing else.
RT_TEST(a_verdict_that_a_rank_has_not_asked_for_ends_the_world) {
  for (int64_t elements : {4, 5, -1}) {
    WorldOfTwo rank;
    if (elements > 0) rank.protocol.Submitted(0, 0, RequestOf(Operation::kAllreduce, {elements}), &rank.effects);
    Response response;
    response.request = RequestOf(Operation::kAllreduce, {4});
    rank.effects.clear();
    rank.protocol.Arrived(0, 0, Verdicts(response), &rank.effects);
    RT_REQUIRE(!rank.effects.empty());
    const auto* end = std::get_if<rank_effect::NoteCause>(&rank.effects.back());
    RT_CHECK_EQ(end == nullptr ? "" : end->cause.message(),
                std::string(elements == 4 ? "" : "rank 1 is to run allreduce 'x' otherwise than it has submitted it."));
  }
}

// A rank alone decides for itself: what it submits is agreed on at its next tick.
struct LonelyRank {
  LonelyRank() { protocol.Begin(0, &effects); }

  void Run(Operation operation, const std::string& name, std::vector<int64_t> ranks_or_set) {
    Request request;
    request.name = name;
    request.operation = operation;
    request.splits = std::move(ranks_or_set);
    effects.clear();
    protocol.Submitted(0, 0, request, &effects);
    protocol.Tick(0, &effects);
  }
  template <typename Wanted>
  const Wanted* Find() const {
    for (const RankEffect& effect : effects)
      if (auto found = std::get_if<Wanted>(&effect)) return found;
    return nullptr;
  }

  const World world = WorldOf(1);
  const Options options = Defaults();
  Protocol protocol{world, options};
  RankEffects effects;
};

RT_TEST(a_process_set_is_added_before_its_addition_is_finished) {
  LonelyRank rank;
  RT_CHECK_EQ(rank.Find<rank_effect::AddProcessSet>()->process_set, 0);
  rank.Run(Operation::kAddProcessSet, "add", {0});
  RT_REQUIRE(rank.Find<rank_effect::AddProcessSet>() != nullptr && rank.Find<rank_effect::Finish>() != nullptr);
  RT_CHECK_EQ(rank.Find<rank_effect::AddProcessSet>()->process_set, 1);
  RT_CHECK(rank.effects.back().index() == RankEffect(rank_effect::Finish{}).index());
  RT_CHECK(rank.protocol.Knows(1));
}

RT_TEST(a_removal_is_finished_when_the_set_is_gone_here) {
  LonelyRank rank;
  rank.Run(Operation::kAddProcessSet, "add", {0});
  rank.Run(Operation::kRemoveProcessSet, "remove", {1});
  RT_REQUIRE(rank.Find<rank_effect::RemoveProcessSet>() != nullptr);
  RT_CHECK_EQ(rank.Find<rank_effect::RemoveProcessSet>()->process_set, 1);
  RT_CHECK(rank.Find<rank_effect::Finish>() == nullptr);  // one of its batches may be under way
  RT_CHECK(rank.protocol.Knows(1));
  rank.effects.clear();
  rank.protocol.ProcessSetRemoved(0, 1, &rank.effects);
  RT_REQUIRE(rank.Find<rank_effect::Finish>() != nullptr);
  RT_CHECK_EQ(rank.Find<rank_effect::Finish>()->control.responses[0].request.name, "remove");
  RT_CHECK(!rank.protocol.Knows(1));
}

RT_TEST(a_set_is_added_behind_a_removal_that_was_decided_before) {
  LonelyRank rank;
  rank.Run(Operation::kAddProcessSet, "first", {0});
  rank.Run(Operation::kRemoveProcessSet, "remove", {1});
  rank.Run(Operation::kAddProcessSet, "second", {0});
  RT_CHECK(rank.Find<rank_effect::AddProcessSet>() == nullptr);  // else its lane could be another than on other ranks
  rank.protocol.ProcessSetRemoved(0, 1, &rank.effects);
  RT_REQUIRE(rank.Find<rank_effect::AddProcessSet>() != nullptr);
  RT_CHECK_EQ(rank.Find<rank_effect::AddProcessSet>()->process_set, 2);
  RT_CHECK_EQ(std::get<rank_effect::Finish>(rank.effects.back()).control.responses[0].request.name, "second");
  RT_CHECK(rank.protocol.Knows(2) && !rank.protocol.Knows(1));
}

}  // namespace ringtrain
