// What every Transport must do, as steps that each rank of a world runs at the same time: Conformance(transport).All().
//
// Contents are made from (sender, receiver, number), so a byte that went astray is seen. Waits have a deadline: a
// transport that loses something fails a test instead of hanging it. A rank may be a step ahead of another, so frames
// are taken by sender.
//
// LosesAPeer and OnePeerCloses end the wire, so each needs a world of its own; a transport that can be made to lose a
// peer runs them too.
#ifndef RINGTRAIN_TESTS_NATIVE_TRANSPORT_CONFORMANCE_H_
#define RINGTRAIN_TESTS_NATIVE_TRANSPORT_CONFORMANCE_H_

#include <sched.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "check.h"
#include "transport/transport.h"

namespace ringtrain {

class Conformance {
 public:
  static constexpr double kPatienceSeconds = 60.0;

  explicit Conformance(Transport& transport)
      : transport_(transport), ranks_(transport.size()), me_(transport.rank()), arrived_(static_cast<size_t>(ranks_)) {}

  void All() {
    Meet();
    FramesArriveInOrder();
    MessagesMatchByTagAndOrder();
    FramesPassMessages();
    NothingIsLeft();
  }

  // Each rank sends a frame to every rank and waits for theirs, by which all have come this far.
  void Meet() {
    for (int to = 0; to < ranks_; ++to) RT_REQUIRE_OK(transport_.SendFrame(to, "met"));
    for (int from = 0; from < ranks_; ++from) RT_REQUIRE_EQ(AwaitFrame(from), std::string("met"));
  }

  // Frames of all sizes between all pairs, oneself included, arrive whole and in the order of sending.
  void FramesArriveInOrder() {
    const std::vector<size_t> sizes = {0,       1,  (64 << 10) - 1, 64 << 10,      (64 << 10) + 1, 0,
                                       1 << 20, 17, (64 << 10) - 8, (64 << 10) - 7};
    for (size_t number = 0; number < sizes.size(); ++number)
      for (int to = 0; to < ranks_; ++to)
        RT_REQUIRE_OK(transport_.SendFrame(to, Content(me_, to, number, sizes[number])));
    for (int from = 0; from < ranks_; ++from)
      for (size_t number = 0; number < sizes.size(); ++number) {
        const std::string frame = AwaitFrame(from);
        RT_REQUIRE_EQ(frame.size(), sizes[number]);
        RT_CHECK(frame == Content(from, me_, number, sizes[number]));
      }
  }

  // Messages of many sizes and tags, both ways between all pairs at once. Those of one tag match in order; the receives
  // of different tags are posted in another order than the sends.
  void MessagesMatchByTagAndOrder() {
    const std::vector<size_t> sizes = {0,
                                       1,
                                       7,
                                       4096,
                                       (64 << 10) + 3,
                                       check::kThreadSanitizer ? 1 << 17 : 1 << 20,
                                       check::kThreadSanitizer ? 1 << 18 : 3 << 20};
    const int tags[] = {Wire::kMaxTag - 1, 1, 2};
    std::vector<std::vector<std::string>> received(static_cast<size_t>(ranks_)), sent = received;
    std::vector<Wire::Ticket> tickets;
    for (int peer = 0; peer < ranks_; ++peer) {
      auto& into = received[static_cast<size_t>(peer)];
      for (size_t size : sizes) into.emplace_back(size, '\0');
      for (size_t tag : {2, 0, 1})
        for (size_t number = tag; number < sizes.size(); number += 3) {
          tickets.emplace_back();
          RT_REQUIRE_OK(transport_.StartReceive(peer, tags[tag], &into[number][0], sizes[number], &tickets.back()));
        }
    }
    RT_CHECK(transport_.Busy());
    for (int peer = 0; peer < ranks_; ++peer)
      for (size_t number = 0; number < sizes.size(); ++number)
        sent[static_cast<size_t>(peer)].push_back(Content(me_, peer, number, sizes[number]));
    for (int peer = 0; peer < ranks_; ++peer)
      for (size_t number = 0; number < sizes.size(); ++number) {
        const std::string& content = sent[static_cast<size_t>(peer)][number];
        tickets.emplace_back();
        RT_REQUIRE_OK(transport_.StartSend(peer, tags[number % 3], content.data(), content.size(), &tickets.back()));
      }
    for (Wire::Ticket ticket : tickets) AwaitMessage(ticket);
    for (int peer = 0; peer < ranks_; ++peer)
      for (size_t number = 0; number < sizes.size(); ++number)
        RT_CHECK(received[static_cast<size_t>(peer)][number] == Content(peer, me_, number, sizes[number]));
  }

  // Frames get through while a message that nobody receives yet is under way.
  void FramesPassMessages() {
    constexpr size_t kBytes = check::kThreadSanitizer ? 1 << 20 : 4 << 20;
    const int to = (me_ + 1) % ranks_, from = (me_ + ranks_ - 1) % ranks_;
    const std::string sent = Content(me_, to, 0, kBytes);
    std::string received(kBytes, '\0');
    Wire::Ticket send, receive;
    RT_REQUIRE_OK(transport_.StartSend(to, 5, sent.data(), sent.size(), &send));
    Meet();
    RT_REQUIRE_OK(transport_.StartReceive(from, 5, &received[0], received.size(), &receive));
    AwaitMessage(receive);
    AwaitMessage(send);
    RT_CHECK(received == Content(from, me_, 0, kBytes));
  }

  // After all that, nothing is under way, nothing arrives and nobody is lost.
  void NothingIsLeft() {
    Meet();
    Await([this] {
      RT_REQUIRE_OK(transport_.Drive());
      return !transport_.Busy();
    });
    Meet();
    for (const auto& frames : arrived_)  // whoever begins with All again may be ahead
      RT_CHECK(frames.empty() || (frames.size() == 1 && frames.front() == "met"));
    LostPeer lost;
    RT_CHECK(!transport_.TakeLostPeer(&lost));
  }

  // Rank `lost` loses its connections with all others. cut() is called by all ranks at one point; it returns when that
  // has happened, and all frames sent before it have arrived. The lost rank's side is looked at if it lives on.
  void LosesAPeer(int lost, const std::function<void()>& cut, bool lives_on) {
    constexpr int kFrames = 5;
    constexpr size_t kBytes = 1 << 20;
    std::vector<int> others;
    for (int rank = 0; rank < ranks_; ++rank)
      if (rank != me_ && (me_ == lost || rank == lost)) others.push_back(rank);
    const std::string sent = Content(me_, lost, 0, kBytes);
    std::string received(kBytes, '\0');
    std::vector<Wire::Ticket> tickets;
    const auto start_messages = [&](int tag_of_receives, int tag_of_sends) {
      for (int other : others) {
        tickets.resize(tickets.size() + 2);
        RT_REQUIRE_OK(
            transport_.StartReceive(other, tag_of_receives, &received[0], kBytes, &tickets[tickets.size() - 2]));
        RT_REQUIRE_OK(transport_.StartSend(other, tag_of_sends, sent.data(), kBytes, &tickets.back()));
      }
    };
    start_messages(7, 8);
    Meet();
    for (int number = 0; number < kFrames; ++number)
      for (int other : others) RT_REQUIRE_OK(transport_.SendFrame(other, Content(me_, other, number, 100)));
    cut();
    if (me_ == lost && !lives_on) return;

    // What had arrived comes first, then the loss, once. Some of it may have been taken in Meet.
    LostPeer peer;
    std::vector<int> told;
    while (told.size() < others.size()) {
      told.push_back(AwaitLostPeer(&peer));
      auto& frames = arrived_[static_cast<size_t>(told.back())];
      RT_CHECK_EQ(frames.size(), size_t{kFrames});
      for (size_t number = 0; number < frames.size(); ++number)
        RT_CHECK(frames[number] == Content(told.back(), me_, number, 100));
      frames.clear();
    }
    std::sort(told.begin(), told.end());
    RT_CHECK(told == others);
    for (int looks = 0; looks < 100; ++looks) RT_CHECK(!LooksForLostPeer(&peer));

    // Frames to it are dropped, messages with it never complete, those that are started now included.
    start_messages(8, 7);  // each would find its other half
    for (int other : others) RT_CHECK_OK(transport_.SendFrame(other, "to nobody"));
    if (me_ != lost) MeetWithout(lost);
    for (int looks = 0; looks < 100; ++looks, TakeFrame())
      for (Wire::Ticket ticket : tickets) {
        bool complete = true;
        RT_CHECK_OK(transport_.Test(ticket, &complete));
        RT_CHECK(!complete);
      }
    for (int other : others) RT_CHECK(arrived_[static_cast<size_t>(other)].empty());
    transport_.Abandon();
  }

  // A rank that closes its end has left: the others do not lose it.
  void OnePeerCloses(int closes, const std::function<void()>& wait_for_all) {
    Meet();
    if (me_ == closes) transport_.Close(false, 5.0);
    wait_for_all();
    if (me_ == closes) return;
    MeetWithout(closes);
    LostPeer peer;
    for (const Nanoseconds until = DeadlineAfter(0.2); Now() < until; sched_yield())
      RT_REQUIRE(!LooksForLostPeer(&peer));
  }

  // Meet among all but that rank.
  void MeetWithout(int gone) {
    for (int to = 0; to < ranks_; ++to)
      if (to != gone) RT_REQUIRE_OK(transport_.SendFrame(to, "met"));
    for (int from = 0; from < ranks_; ++from)
      if (from != gone) RT_REQUIRE_EQ(AwaitFrame(from), std::string("met"));
  }

  // The next peer that is lost.
  int AwaitLostPeer(LostPeer* peer) {
    Await([&] { return LooksForLostPeer(peer); });
    RT_CHECK(!peer->cause.empty() && peer->cause.back() != '.');
    return peer->rank;
  }

  // The next frame from that rank.
  std::string AwaitFrame(int from) {
    auto& frames = arrived_[static_cast<size_t>(from)];
    Await([&] {
      if (frames.empty()) TakeFrame();
      return !frames.empty();
    });
    std::string frame = std::move(frames.front());
    frames.pop_front();
    return frame;
  }

  void AwaitMessage(Wire::Ticket ticket) {
    Await([&] {
      bool complete = false;
      RT_REQUIRE_OK(transport_.Test(ticket, &complete));
      return complete;
    });
  }

  static std::string Content(int from, int to, size_t number, size_t bytes) {
    std::string content(bytes, '\0');
    auto state = static_cast<uint64_t>(from * 7919 + to * 104729) + number * 1299709u;
    for (size_t begin = 0; begin < bytes; begin += sizeof state) {  // eight at a time: a sanitizer looks at each write
      state = state * 6364136223846793005u + 1442695040888963407u;
      const uint64_t word = state ^ (state >> 29);
      std::memcpy(content.data() + begin, &word, std::min(sizeof word, bytes - begin));
    }
    return content;
  }

 private:
  void TakeFrame() {
    int sender = -1;
    std::string frame;
    bool arrived = false;
    RT_REQUIRE_OK(transport_.ReceiveFrame(&sender, &frame, &arrived));
    RT_REQUIRE(!arrived || (sender >= 0 && sender < ranks_));
    if (arrived) arrived_[static_cast<size_t>(sender)].push_back(std::move(frame));
  }

  bool LooksForLostPeer(LostPeer* peer) {
    TakeFrame();
    return transport_.TakeLostPeer(peer);
  }

  static void Await(const std::function<bool()>& done) {
    const Nanoseconds deadline = DeadlineAfter(kPatienceSeconds);
    while (!done()) {
      RT_REQUIRE(Now() < deadline);
      sched_yield();
    }
  }

  Transport& transport_;
  const int ranks_, me_;
  std::vector<std::deque<std::string>> arrived_;  // frames by sender, not yet asked for
};

}  // namespace ringtrain
#endif  // RINGTRAIN_TESTS_NATIVE_TRANSPORT_CONFORMANCE_H_
