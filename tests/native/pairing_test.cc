// The pairing of sends and receives, without a wire: rules one by one, then random programs against the rule of MPI.
#include <cstring>
#include <functional>
#include <list>
#include <random>

#include "agree/pairing.h"
#include "check.h"

namespace ringtrain {
namespace {

constexpr size_t kSmall = 16, kLarge = Pairing::kMostInOffer + 8;

// Ranks that send and receive; frames travel when a test says so, tensors at once.
struct Ranks {
  explicit Ranks(int size) : pairings(static_cast<size_t>(size)) {}

  PairRequest Wanted(int rank, int other, int64_t tag, size_t bytes) {
    PairRequest request{++numbers, other, 0, tag, {DType::kUInt8, {static_cast<int64_t>(bytes)}}};
    request.subject = "operation of rank " + std::to_string(rank);
    for (int member = 0; member < static_cast<int>(pairings.size()); ++member)
      if (member != rank) request.members.push_back(member);
    return request;
  }

  uint64_t Send(int rank, int to, int64_t tag, size_t bytes, char fill = 'x') {
    PairRequest request = Wanted(rank, to, tag, bytes);
    contents[request.number] = std::string(bytes, fill);
    const uint64_t number = request.number;
    Run(rank,
        [&](PairEffects* effects) { pairings[rank].Send(now, std::move(request), contents[number].data(), effects); });
    return number;
  }

  uint64_t Receive(int rank, int from, int64_t tag, size_t bytes) {
    PairRequest request = Wanted(rank, from, tag, bytes);
    const uint64_t number = request.number;
    Run(rank, [&](PairEffects* effects) { pairings[rank].Receive(now, std::move(request), effects); });
    return number;
  }

  void Tick(int rank) {
    Run(rank, [&](PairEffects* effects) { pairings[rank].Tick(now, effects); });
  }
  void Leave(int rank) {
    Run(rank, [&](PairEffects* effects) { pairings[rank].Leave(effects); });
  }

  // The next frame from one rank to another; false if there is none.
  bool Carry(int from, int to) {
    std::list<Frame>& frames = on_the_way[{from, to}];
    if (frames.empty()) return false;
    Frame frame;
    RT_CHECK(Frame::Decode(frames.front().Encode(), &frame));
    frames.pop_front();
    Run(to, [&](PairEffects* effects) { pairings[to].Arrived(from, std::move(frame), effects); });
    return true;
  }

  void CarryAll() {
    for (bool moved = true; moved;) {
      moved = false;
      for (int from = 0; from < static_cast<int>(pairings.size()); ++from)
        for (int to = 0; to < static_cast<int>(pairings.size()); ++to) moved |= Carry(from, to);
    }
  }

  template <typename Action>
  void Run(int rank, Action action) {
    PairEffects effects;
    action(&effects);
    for (PairEffect& effect : effects) std::visit([&](auto& what) { Do(rank, what); }, effect);
  }

  void Do(int rank, pair_effect::Tell& tell) { on_the_way[{rank, tell.rank}].push_back(tell.frame); }
  void Do(int rank, pair_effect::StartSend& start) {
    streams[{rank, start.to}].push_back(start.send);
    Stream(rank, start.to);
  }
  void Do(int rank, pair_effect::StartReceive& start) {
    awaited[{start.from, rank}].push_back(start.receive);
    from_whom[start.receive] = start.from;
    Stream(start.from, rank);
  }
  void Stream(int from, int to) {
    auto &sent = streams[{from, to}], &wanted = awaited[{from, to}];
    while (!sent.empty() && !wanted.empty()) {
      received[wanted.front()] = contents[sent.front()];
      done.insert(sent.front());
      sent.pop_front();
      wanted.pop_front();
    }
  }
  void Do(int, pair_effect::Deliver& deliver) {
    received[deliver.receive] = deliver.bytes;
    from_whom[deliver.receive] = deliver.from;
  }
  void Do(int, pair_effect::Sent& sent) { done.insert(sent.send); }
  void Do(int, pair_effect::Keep& keep) { kept.insert(keep.send); }
  void Do(int, pair_effect::Fail& fail) { failed[fail.number] = fail.status; }

  std::vector<Pairing> pairings;
  Nanoseconds now = 0;
  uint64_t numbers = 0;
  std::map<std::pair<int, int>, std::list<Frame>> on_the_way;
  std::map<std::pair<int, int>, std::list<uint64_t>> streams, awaited;
  std::map<uint64_t, std::string> contents, received;
  std::map<uint64_t, int> from_whom;
  std::map<uint64_t, Status> failed;
  std::set<uint64_t> done, kept;
};

RT_TEST(a_small_tensor_is_sent_before_it_is_wanted_and_a_large_one_when_it_is) {
  for (const size_t bytes : {size_t{0}, kSmall, kLarge}) {
    Ranks ranks(2);
    const uint64_t send = ranks.Send(0, 1, 7, bytes);
    RT_CHECK_EQ(ranks.done.count(send), size_t{bytes < kLarge});
    ranks.CarryAll();
    const uint64_t receive = ranks.Receive(1, 0, 7, bytes);
    ranks.CarryAll();
    RT_CHECK_EQ(ranks.done.count(send), size_t{1});
    RT_CHECK(ranks.received.at(receive) == std::string(bytes, 'x'));
    RT_CHECK(!ranks.pairings[0].waits() && !ranks.pairings[1].waits());
  }
}

RT_TEST(tags_and_senders_are_told_apart_and_each_keeps_its_order) {
  Ranks ranks(3);
  ranks.Send(0, 2, 1, kLarge, 'a');
  ranks.Send(0, 2, 2, kSmall, 'b');
  ranks.Send(0, 2, 1, kLarge, 'c');
  ranks.Send(1, 2, 1, kLarge, 'd');
  const uint64_t second_tag = ranks.Receive(2, 0, 2, kSmall), other = ranks.Receive(2, 1, 1, kLarge),
                 first = ranks.Receive(2, 0, 1, kLarge), next = ranks.Receive(2, 0, 1, kLarge);
  ranks.CarryAll();
  RT_CHECK_EQ(ranks.received.at(second_tag)[0], 'b');
  RT_CHECK_EQ(ranks.received.at(other)[0], 'd');
  RT_CHECK_EQ(ranks.received.at(first)[0], 'a');
  RT_CHECK_EQ(ranks.received.at(next)[0], 'c');
}

RT_TEST(a_receive_from_any_takes_what_came_first_and_tells_from_whom) {
  Ranks ranks(3);
  ranks.Send(1, 2, 0, kSmall, 'a');
  ranks.CarryAll();
  ranks.Send(0, 2, 0, kLarge, 'b');
  ranks.CarryAll();
  const uint64_t first = ranks.Receive(2, kAnyRank, 0, kSmall), next = ranks.Receive(2, kAnyRank, 0, kLarge);
  ranks.CarryAll();
  RT_CHECK_EQ(ranks.from_whom.at(first), 1);
  RT_CHECK_EQ(ranks.from_whom.at(next), 0);
}

RT_TEST(of_receives_that_fit_the_one_posted_first_takes) {
  for (const bool any_first : {false, true}) {
    Ranks ranks(2);
    const uint64_t one = ranks.Receive(1, any_first ? kAnyRank : 0, 0, kSmall);
    const uint64_t other = ranks.Receive(1, any_first ? 0 : kAnyRank, 0, kSmall);
    ranks.Send(0, 1, 0, kSmall);
    ranks.CarryAll();
    RT_CHECK_EQ(ranks.received.count(one), size_t{1});
    RT_CHECK_EQ(ranks.received.count(other), size_t{0});
  }
}

RT_TEST(another_size_fails_on_both_in_the_same_words_and_what_follows_goes_on) {
  Ranks ranks(2);
  const uint64_t receive = ranks.Receive(1, 0, 3, kLarge + 1), next = ranks.Receive(1, 0, 3, kLarge);
  const uint64_t send = ranks.Send(0, 1, 3, kLarge);
  ranks.Send(0, 1, 3, kLarge, 'n');
  ranks.CarryAll();
  RT_CHECK_EQ(ranks.failed.at(send).code(), StatusCode::kMismatch);
  RT_CHECK_EQ(ranks.failed.at(send).message(), ranks.failed.at(receive).message());
  RT_CHECK(ranks.failed.at(send).message().find("rank 0 sends uint8[8200], where room is for uint8[8201] (tag 3)") !=
           std::string::npos);
  RT_CHECK_EQ(ranks.received.at(next)[0], 'n');
}

RT_TEST(what_travels_untaken_is_bounded) {
  Ranks ranks(2);
  const size_t most = Pairing::kMostUntaken / Pairing::kMostInOffer;
  for (size_t count = 0; count < most + 5; ++count) ranks.Send(0, 1, 0, Pairing::kMostInOffer);
  ranks.CarryAll();
  RT_CHECK_EQ(ranks.done.size(), most);
  for (size_t count = 0; count < most + 5; ++count) ranks.Receive(1, 0, 0, Pairing::kMostInOffer);
  ranks.CarryAll();
  RT_CHECK_EQ(ranks.received.size(), most + 5);
  RT_CHECK_EQ(ranks.done.count(ranks.Send(0, 1, 0, kSmall)), size_t{1});  // they were told to be taken
}

RT_TEST(a_send_that_waits_is_kept_once) {
  Ranks ranks(2);
  const uint64_t send = ranks.Send(0, 1, 0, kLarge);
  ranks.now = Pairing::kKeepAfter - 1;
  ranks.Tick(0);
  RT_CHECK(ranks.kept.empty());
  RT_CHECK_EQ(ranks.pairings[0].next_timer(), Pairing::kKeepAfter);
  ranks.now = Pairing::kKeepAfter;
  ranks.Tick(0);
  RT_CHECK_EQ(ranks.kept.count(send), size_t{1});
  ranks.kept.clear();
  ranks.now = 10 * Pairing::kAskAfter;
  ranks.Tick(0);
  RT_CHECK(ranks.kept.empty());
  RT_CHECK_EQ(ranks.pairings[0].next_timer(), kNever);
}

// However the question and the end meet.
RT_TEST(who_waits_for_one_that_leaves_is_told) {
  for (const bool asked_before : {true, false}) {
    Ranks ranks(3);
    const uint64_t receive = ranks.Receive(0, 1, 0, kSmall), any = ranks.Receive(0, kAnyRank, 0, kSmall),
                   send = ranks.Send(0, 1, 5, kLarge);
    if (!asked_before) ranks.Leave(1);
    ranks.now = Pairing::kAskAfter;
    ranks.Tick(0);
    ranks.CarryAll();
    if (asked_before) ranks.Leave(1);
    ranks.CarryAll();
    RT_CHECK_EQ(ranks.failed.at(receive).code(), StatusCode::kClosed);
    RT_CHECK(ranks.failed.at(receive).message().find("rank 1 has called shutdown(), and sends no more") !=
             std::string::npos);
    RT_CHECK(ranks.failed.at(send).message().find("rank 1 has called shutdown(), and receives no more") !=
             std::string::npos);
    RT_CHECK_EQ(ranks.failed.count(any), size_t{0});
    ranks.Leave(2);
    ranks.CarryAll();
    RT_CHECK(ranks.failed.at(any).message().find("every other rank has called shutdown()") != std::string::npos);
    RT_CHECK_EQ(ranks.failed.count(ranks.Receive(0, 2, 0, kSmall)), size_t{1});
    RT_CHECK(!ranks.pairings[0].waits());
  }
}

RT_TEST(what_was_sent_before_the_end_is_received_behind_it) {
  Ranks ranks(2);
  ranks.Send(1, 0, 0, kSmall);
  ranks.Leave(1);
  ranks.CarryAll();
  const uint64_t receive = ranks.Receive(0, 1, 0, kSmall);
  RT_CHECK_EQ(ranks.received.count(receive), size_t{1});
}

// Random programs, in which frames take any time: all sends are received, by the rule, and nothing is left.
RT_TEST(random_programs_are_paired_by_the_rule) {
  for (unsigned seed = 1; seed <= 400; ++seed) {
    std::mt19937 random(seed);
    const auto below = [&](int most) { return static_cast<int>(random() % static_cast<unsigned>(most)); };
    const int size = 2 + below(3);
    Ranks ranks(size);
    std::map<std::tuple<int, int, int>, std::list<uint64_t>> sends, receives;  // by sender, receiver and tag, in order
    std::vector<std::function<void()>> todo;
    // Of a tag all receives name the sender, or none does: else which of them takes what is a matter of time.
    for (int count = 10 + below(40); count > 0; --count) {
      const int from = below(size), to = (from + 1 + below(size - 1)) % size, tag = below(4);
      const size_t bytes = tag == 3 ? kSmall : (tag % 2 == 0 ? kSmall : kLarge);
      const bool any = tag == 3;
      todo.push_back([&, from, to, tag, bytes] {
        sends[{from, to, tag}].push_back(ranks.Send(from, to, tag, bytes, static_cast<char>(below(26) + 'a')));
      });
      todo.push_back([&, from, to, tag, bytes, any] {
        receives[{any ? kAnyRank : from, to, tag}].push_back(ranks.Receive(to, any ? kAnyRank : from, tag, bytes));
      });
    }
    std::shuffle(todo.begin(), todo.end(), random);
    for (auto& act : todo) {
      act();
      for (int frames = below(4); frames > 0; --frames) ranks.Carry(below(size), below(size));
    }
    ranks.CarryAll();
    RT_CHECK_EQ(ranks.failed.size(), size_t{0});
    for (const auto& [place, numbers] : receives) {
      const auto [from, to, tag] = place;
      if (from == kAnyRank) {  // each sender's in their order
        std::map<int, std::string> seen, expected;
        for (uint64_t number : numbers) seen[ranks.from_whom.at(number)] += ranks.received.at(number)[0];
        for (int sender = 0; sender < size; ++sender)
          for (uint64_t number : sends[{sender, to, tag}]) expected[sender] += ranks.contents.at(number)[0];
        RT_CHECK(seen == expected);
        continue;
      }
      auto send = sends[{from, to, tag}].begin();
      for (uint64_t number : numbers) RT_CHECK(ranks.received.at(number) == ranks.contents.at(*send++));
    }
    for (const Pairing& pairing : ranks.pairings) RT_CHECK(!pairing.waits());
  }
}

}  // namespace
}  // namespace ringtrain
