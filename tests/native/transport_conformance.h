// What every Transport must do, as steps that each rank of a world runs at the same time: Conformance(transport).All().
//
// Contents are made from (sender, receiver, number), so a byte that went astray is seen. Waits have a deadline: a transport that
// loses something fails a test instead of hanging it. A rank may be a step ahead of another, so frames are taken by sender.
#ifndef RINGTRAIN_TESTS_NATIVE_TRANSPORT_CONFORMANCE_H_
#define RINGTRAIN_TESTS_NATIVE_TRANSPORT_CONFORMANCE_H_

#include <sched.h>

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
    const std::vector<size_t> sizes = {0, 1,       (64 << 10) - 1, 64 << 10,       (64 << 10) + 1,
                                       0, 1 << 20, 17,             (64 << 10) - 8, (64 << 10) - 7};
    for (size_t number = 0; number < sizes.size(); ++number)
      for (int to = 0; to < ranks_; ++to) RT_REQUIRE_OK(transport_.SendFrame(to, Content(me_, to, number, sizes[number])));
    for (int from = 0; from < ranks_; ++from)
      for (size_t number = 0; number < sizes.size(); ++number) {
        const std::string frame = AwaitFrame(from);
        RT_REQUIRE_EQ(frame.size(), sizes[number]);
        RT_CHECK(frame == Content(from, me_, number, sizes[number]));
      }
  }

  // Messages of many sizes and tags, both ways between all pairs at once. Those of one tag match in order; the receives of
  // different tags are posted in another order than the sends.
  void MessagesMatchByTagAndOrder() {
    const std::vector<size_t> sizes = {0, 1, 7, 4096, (64 << 10) + 3, 1 << 20, check::kThreadSanitizer ? 1 << 18 : 3 << 20};
    const int tags[] = {Transport::kMaxTag - 1, 1, 2};
    std::vector<std::vector<std::string>> received(static_cast<size_t>(ranks_)), sent = received;
    std::vector<Transport::Ticket> tickets;
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
    for (Transport::Ticket ticket : tickets) AwaitMessage(ticket);
    for (int peer = 0; peer < ranks_; ++peer)
      for (size_t number = 0; number < sizes.size(); ++number)
        RT_CHECK(received[static_cast<size_t>(peer)][number] == Content(peer, me_, number, sizes[number]));
  }

  // Frames get through while a message that nobody receives yet is under way.
  void FramesPassMessages() {
    constexpr size_t kBytes = 4 << 20;
    const int to = (me_ + 1) % ranks_, from = (me_ + ranks_ - 1) % ranks_;
    const std::string sent = Content(me_, to, 0, kBytes);
    std::string received(kBytes, '\0');
    Transport::Ticket send, receive;
    RT_REQUIRE_OK(transport_.StartSend(to, 5, sent.data(), sent.size(), &send));
    Meet();
    RT_REQUIRE_OK(transport_.StartReceive(from, 5, &received[0], received.size(), &receive));
    AwaitMessage(receive);
    AwaitMessage(send);
    RT_CHECK(received == Content(from, me_, 0, kBytes));
  }

  // After all that, nothing is under way and nothing arrives.
  void NothingIsLeft() {
    Meet();
    Await([this] {
      RT_REQUIRE_OK(transport_.Drive());
      return !transport_.Busy();
    });
    Meet();
    for (const auto& frames : arrived_) RT_CHECK(frames.empty());
  }

  // The next frame from that rank.
  std::string AwaitFrame(int from) {
    auto& frames = arrived_[static_cast<size_t>(from)];
    Await([&] {
      int sender = -1;
      std::string frame;
      bool arrived = false;
      if (frames.empty()) RT_REQUIRE_OK(transport_.ReceiveFrame(&sender, &frame, &arrived));
      RT_REQUIRE(!arrived || (sender >= 0 && sender < ranks_));
      if (arrived) arrived_[static_cast<size_t>(sender)].push_back(std::move(frame));
      return !frames.empty();
    });
    std::string frame = std::move(frames.front());
    frames.pop_front();
    return frame;
  }

  void AwaitMessage(Transport::Ticket ticket) {
    Await([&] {
      bool complete = false;
      RT_REQUIRE_OK(transport_.Test(ticket, &complete));
      return complete;
    });
  }

  static std::string Content(int from, int to, size_t number, size_t bytes) {
    std::string content(bytes, '\0');
    auto state = static_cast<uint32_t>(from * 7919 + to * 104729) + static_cast<uint32_t>(number) * 1299709u;
    for (char& byte : content) {
      state = state * 1664525u + 1013904223u;
      byte = static_cast<char>(state >> 24);
    }
    return content;
  }

 private:
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
