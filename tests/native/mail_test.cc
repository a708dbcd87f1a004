// Mail between ranks that are threads: frames of all sizes, in order for each pair, through mailboxes that are full
// most of the time.
#include "transport/mail.h"

#include <chrono>
#include <random>

#include "check.h"
#include "meeting.h"

namespace ringtrain {
namespace {

struct Rank {
  std::unique_ptr<Transport> transport;
  std::unique_ptr<HostMemory> memory;
  std::unique_ptr<Mail> mail;

  std::string Receive(int* from) {
    std::string frame;
    bool arrived = false;
    for (const Nanoseconds deadline = DeadlineAfter(60); !arrived && Now() < deadline;)
      RT_REQUIRE_OK(mail->Receive(from, &frame, &arrived));
    RT_REQUIRE(arrived);
    return frame;
  }
};

std::vector<Rank> Open(const std::vector<int>& layout) {
  std::vector<Meeting> meetings = MeetAll(std::make_shared<Hub>(layout));
  std::vector<Rank> ranks;
  for (int host_ranks : layout) {
    std::vector<int> locals;
    for (int local = 0; local < host_ranks; ++local) locals.push_back(static_cast<int>(ranks.size()) + local);
    for (int rank : locals) {
      Rank opened;
      Meeting& meeting = meetings[static_cast<size_t>(rank)];
      opened.transport = std::move(meeting.transport);
      opened.memory = std::move(meeting.memory);
      opened.mail = std::make_unique<Mail>(*opened.transport, opened.memory.get(), locals);
      ranks.push_back(std::move(opened));
    }
  }
  return ranks;
}

// The frame that `from` sends to `to` as its number `index`, which both can make.
std::string FrameOf(int from, int to, int index) {
  constexpr size_t kSizes[] = {0, 1, 247, 248, 249, 496, 497, 5000, 31743, 31744, 100000};
  std::string frame(index % 3 == 0 ? kSizes[(from + to + index) % 11] : static_cast<size_t>(index % 60), ' ');
  for (size_t byte = 0; byte < frame.size(); ++byte)
    frame[byte] = static_cast<char>(from * 31 + to * 7 + index + byte * 13);
  return frame;
}

void Exchange(const std::vector<int>& layout) {
  std::vector<Rank> ranks = Open(layout);
  const int size = static_cast<int>(ranks.size()), frames = 100;
  check::RunRanks(size, [&](int me) {
    Mail& mail = *ranks[me].mail;
    std::vector<int> received(size, 0);
    int total = 0;
    auto receive = [&] {
      int from;
      std::string frame;
      bool arrived;
      RT_REQUIRE_OK(mail.Receive(&from, &frame, &arrived));
      if (!arrived) return false;
      RT_REQUIRE(frame == FrameOf(from, me, received[from]));
      ++received[from];
      ++total;
      return true;
    };
    std::mt19937_64 random(me);
    for (int index = 0; index < frames; ++index) {
      for (int to = 0; to < size; ++to) RT_REQUIRE_OK(mail.Send(to, FrameOf(me, to, index)));  // to itself, too
      if (random() % 3 == 0) receive();
    }
    for (const Nanoseconds deadline = DeadlineAfter(100); (total < size * frames || mail.Busy()) && Now() < deadline;)
      if (!receive()) std::this_thread::yield();
    RT_CHECK_EQ(total, size * frames);
    for (int from = 0; from < size; ++from) RT_CHECK_EQ(received[from], frames);
  });
}

RT_TEST(frames_arrive_whole_and_in_order_within_a_host) { Exchange({4}); }
RT_TEST(frames_arrive_whole_and_in_order_between_hosts) { Exchange({2, 2}); }
RT_TEST(one_rank_alone_writes_to_itself) { Exchange({1}); }

RT_TEST(full_mailbox_keeps_the_rest_for_later) {
  std::vector<Rank> ranks = Open({2});
  constexpr int kFrames = 3 * static_cast<int>(Mailbox::kCells);
  for (int index = 0; index < kFrames; ++index) RT_REQUIRE_OK(ranks[0].mail->Send(1, std::to_string(index)));
  RT_CHECK(ranks[0].mail->Busy());
  for (int index = 0; index < kFrames; ++index) {
    int from = -1;
    bool arrived = false;
    std::string frame;
    for (int turns = 0; turns < 3 && !arrived; ++turns) {
      RT_REQUIRE_OK(ranks[1].mail->Receive(&from, &frame, &arrived));
      if (arrived) break;
      bool none;
      std::string nothing;
      RT_REQUIRE_OK(ranks[0].mail->Receive(&from, &nothing, &none));  // moves what waits
      RT_CHECK(!none);
    }
    RT_REQUIRE(arrived);
    RT_REQUIRE_EQ(frame, std::to_string(index));
    RT_CHECK_EQ(from, 0);
  }
  RT_CHECK(!ranks[0].mail->Busy());
}

RT_TEST(a_forgotten_rank_gets_nothing_more) {
  std::vector<Rank> ranks = Open({2});
  for (uint64_t index = 0; index < 2 * Mailbox::kCells; ++index) RT_REQUIRE_OK(ranks[0].mail->Send(1, "frame"));
  RT_CHECK(ranks[0].mail->Busy());
  ranks[0].mail->Forget(1);
  RT_CHECK(!ranks[0].mail->Busy());
}

RT_TEST(arrival_wakes_the_receiver) {
  std::vector<Rank> ranks = Open({2});
  check::RunRanks(2, [&](int me) {
    if (me == 0) {
      for (int index = 0; index < 2000; ++index) {
        RT_REQUIRE_OK(ranks[0].mail->Send(1, "ping"));
        int from;
        RT_REQUIRE_EQ(ranks[0].Receive(&from), std::string("pong"));
      }
      return;
    }
    Doorbell& doorbell = ranks[1].memory->doorbell(1);
    for (int index = 0; index < 2000; ++index) {
      int from;
      std::string frame;
      bool arrived = false;
      while (!arrived) {
        const uint32_t ticket = doorbell.PrepareSleep();
        RT_REQUIRE_OK(ranks[1].mail->Receive(&from, &frame, &arrived));
        if (arrived) {
          doorbell.CancelSleep();
          continue;
        }
        // A ring that is lost would leave this asleep: the deadline is far beyond any honest wait.
        const Nanoseconds deadline = DeadlineAfter(60);
        doorbell.Sleep(ticket, deadline);
        RT_REQUIRE(Now() < deadline);
      }
      RT_REQUIRE_OK(ranks[1].mail->Send(0, "pong"));
    }
  });
}

}  // namespace
}  // namespace ringtrain
