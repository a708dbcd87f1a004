// The TCP transport does what every transport must do, over the loopback of this machine, and what it alone has: full
// buffers, ranks that end in the middle of something, strangers.
#include "transport/tcp.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cstring>
#include <limits>

#include "base/doorbell.h"
#include "base/log.h"
#include "check.h"
#include "transport/tcp/socket.h"
#include "transport_conformance.h"

using namespace ringtrain;

namespace {

constexpr double kPatienceSeconds = 60;
constexpr uint8_t kSecret[32] = {1, 2, 3}, kOtherSecret[32] = {1, 2, 4};

// The listeners of a world, all in this process; each rank opens its transport in its own thread.
class Listeners {
 public:
  explicit Listeners(int size, const std::string& addresses = "127.0.0.1:0") {
    for (int rank = 0; rank < size; ++rank) {
      listeners_.emplace_back();
      RT_REQUIRE_OK(TcpListener::Open(addresses, &listeners_.back()));
      world_.peers.push_back(listeners_.back()->addresses());
    }
    world_.epoch = 99;
    world_.secret = kSecret;
  }

  TcpWorld& world() { return world_; }
  std::unique_ptr<Transport> Open(int rank) { return Open(rank, world_); }
  std::unique_ptr<Transport> Open(int rank, TcpWorld world) {
    world.rank = rank;
    std::unique_ptr<Transport> transport;
    RT_REQUIRE_OK(OpenTcpTransport(listeners_[static_cast<size_t>(rank)].get(), world, &transport));
    return transport;
  }

  // Has one rank listen in a child, which keeps none of our listeners; there it runs the body, whose end is Die.
  pid_t Fork(int rank, const std::function<void()>& body) {
    std::string& address = world_.peers[static_cast<size_t>(rank)];
    int told[2];
    RT_REQUIRE_EQ(pipe(told), 0);
    const pid_t child = fork();
    if (child == 0) {
      try {
        std::unique_ptr<TcpListener>& listener = listeners_[static_cast<size_t>(rank)];
        RT_REQUIRE_OK(TcpListener::Open("127.0.0.1:0", &listener));
        address = listener->addresses();
        RT_REQUIRE_EQ(write(told[1], address.data(), address.size()), static_cast<ssize_t>(address.size()));
        close(told[1]);
        body();
      } catch (const check::RequirementFailed&) {
      }
      _exit(1);
    }
    close(told[1]);
    char text[64];
    const ssize_t bytes = read(told[0], text, sizeof text);
    close(told[0]);
    RT_REQUIRE(bytes > 0);
    address.assign(text, static_cast<size_t>(bytes));
    return child;
  }

  // One rank's only address, for those who are not of the world.
  sockaddr_in AddressOf(int rank) const {
    const std::string& text = world_.peers[static_cast<size_t>(rank)];
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<uint16_t>(std::stoi(text.substr(text.rfind(':') + 1))));
    return address;
  }

 private:
  std::vector<std::unique_ptr<TcpListener>> listeners_;
  TcpWorld world_;
};

template <typename Done>
void Await(Done done, double seconds = kPatienceSeconds) {
  const Nanoseconds deadline = DeadlineAfter(seconds);
  while (!done()) {
    RT_REQUIRE(Now() < deadline);
    sched_yield();
  }
}

// Frames that have come from any rank before the loss of one; its cause.
std::string AwaitLoss(Transport& transport, int rank, std::vector<std::string>* frames = nullptr,
                      bool* loses_large = nullptr) {
  LostPeer lost;
  Await([&] {
    int from = -1;
    std::string frame;
    bool arrived = false;
    RT_REQUIRE_OK(transport.ReceiveFrame(&from, &frame, &arrived));
    if (arrived && frames != nullptr) frames->push_back(frame);
    return transport.TakeLostPeer(&lost);
  });
  RT_CHECK_EQ(lost.rank, rank);
  if (loses_large != nullptr) *loses_large = lost.loses_large;
  return lost.cause;
}

bool Contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// A socket that has connected, unless nobody listens there any more.
int ConnectTo(const sockaddr_in& address) {
  const int stranger = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  [[maybe_unused]] const int result = connect(stranger, reinterpret_cast<const sockaddr*>(&address), sizeof address);
  return stranger;
}

}  // namespace

RT_TEST(conforms_for_each_world_and_family) {
  const std::pair<const char*, int> worlds[] = {{"127.0.0.1:0", 1},
                                                {"127.0.0.1:0", 4},
                                                {"[::1]:0", 2},
                                                {"127.0.0.1:0,127.0.0.2:0", 3},  // two links
                                                {"127.0.0.1:0,[::1]:0", 2}};
  for (const auto& [addresses, size] : worlds) {
    if (check::kThreadSanitizer && size < 3) continue;  // of no other threads than those of the larger ones
    Listeners listeners(size, addresses);
    check::RunRanks(size, [&, ranks = size](int rank) {
      const std::unique_ptr<Transport> transport = listeners.Open(rank);
      RT_CHECK_EQ(transport->rank(), rank);
      RT_CHECK_EQ(transport->size(), ranks);
      RT_CHECK(transport->RingsDoorbell());
      Conformance(*transport).All();
      transport->Close(true, 5.0);
    });
  }
}

RT_TEST(several_streams_carry_a_message) {
  Listeners listeners(3);
  listeners.world().streams = 3;
  check::RunRanks(3, [&](int rank) {
    const std::unique_ptr<Transport> transport = listeners.Open(rank);
    Conformance(*transport).All();
    transport->Close(true, 5.0);
  });
}

RT_TEST(large_messages_go_both_ways_at_once) {
  constexpr size_t kBytes = check::kThreadSanitizer ? 8 << 20 : 24 << 20;
  for (int streams : {1, 2}) {
    Listeners listeners(2);
    listeners.world().streams = streams;
    check::RunRanks(2, [&](int rank) {
      const std::unique_ptr<Transport> transport = listeners.Open(rank);
      Conformance conformance(*transport);
      const int peer = 1 - rank;
      std::vector<std::string> sent, received(2, std::string(kBytes, '\0'));
      std::vector<Wire::Ticket> tickets(4);
      for (size_t number : {0, 1}) sent.push_back(Conformance::Content(rank, peer, number, kBytes));
      for (size_t number : {0, 1})
        RT_REQUIRE_OK(
            transport->StartSend(peer, static_cast<int>(number), sent[number].data(), kBytes, &tickets[number]));
      for (size_t number : {1, 0})
        RT_REQUIRE_OK(transport->StartReceive(peer, static_cast<int>(number), &received[number][0], kBytes,
                                              &tickets[2 + number]));
      for (Wire::Ticket ticket : tickets) conformance.AwaitMessage(ticket);
      for (size_t number : {0, 1}) RT_CHECK(received[number] == Conformance::Content(peer, rank, number, kBytes));
      conformance.Meet();
      transport->Close(true, 5.0);
    });
  }
}

// The receiver does not look for a while: what does not fit into the kernel's buffers waits, and nobody takes that for
// an end.
RT_TEST(a_rank_that_does_not_look_for_a_while_gets_everything) {
  constexpr size_t kFrames = check::Rounds(40), kBytes = 1 << 20;
  Listeners listeners(2);
  std::atomic<bool> all_sent{false};
  check::RunRanks(2, [&](int rank) {
    const std::unique_ptr<Transport> transport = listeners.Open(rank);
    Conformance conformance(*transport);
    Doorbell doorbell;  // nobody sleeps on it, so the watcher leaves the looking to us
    transport->SetDoorbell(&doorbell);
    conformance.Meet();
    if (rank == 0) {
      for (size_t number = 0; number < kFrames; ++number)
        RT_REQUIRE_OK(transport->SendFrame(1, Conformance::Content(0, 1, number, kBytes)));
      RT_CHECK(transport->Busy());
      all_sent = true;
    } else {
      Await([&] {
        usleep(100000);
        return all_sent.load();
      });
      for (size_t number = 0; number < kFrames; ++number)
        RT_CHECK(conformance.AwaitFrame(0) == Conformance::Content(0, 1, number, kBytes));
    }
    conformance.Meet();
    transport->Close(true, 5.0);
  });
}

RT_TEST(what_arrives_wakes_a_driver_that_sleeps) {
  Listeners listeners(2);
  check::RunRanks(2, [&](int rank) {
    const std::unique_ptr<Transport> transport = listeners.Open(rank);
    Conformance conformance(*transport);
    Doorbell doorbell;
    transport->SetDoorbell(&doorbell);
    conformance.Meet();
    // Sleeps as the context's driver does, until `done`; how often it woke.
    const auto sleep_until = [&](const std::function<bool()>& done) {
      int wakeups = 0;
      const Nanoseconds deadline = DeadlineAfter(kPatienceSeconds);
      for (;;) {
        const uint32_t ticket = doorbell.PrepareSleep();
        if (done()) break;
        RT_REQUIRE(Now() < deadline);
        doorbell.Sleep(ticket, deadline);
        ++wakeups;
      }
      doorbell.CancelSleep();
      return wakeups;
    };
    int from = -1;
    std::string frame;
    bool arrived = false, complete = false;
    const auto frame_arrived = [&] {
      RT_REQUIRE_OK(transport->ReceiveFrame(&from, &frame, &arrived));
      return arrived;
    };
    const size_t sizes[] = {1, 100000, 5 << 20};
    for (int round = 0; round < 50; ++round) {
      const bool speaks = round % 2 == rank;
      if (round < 4) usleep(50000);  // now the other certainly sleeps
      if (speaks) {
        RT_REQUIRE_OK(transport->SendFrame(1 - rank, "wake up"));
      } else {
        RT_CHECK(sleep_until(frame_arrived) < 20);
        RT_CHECK_EQ(frame, std::string("wake up"));
      }
    }
    for (size_t bytes : sizes) {
      std::string sent = Conformance::Content(rank, 1 - rank, bytes, bytes), received(bytes, '\0');
      Wire::Ticket send, receive;
      if (rank == 0) usleep(20000);
      RT_REQUIRE_OK(transport->StartReceive(1 - rank, 3, &received[0], bytes, &receive));
      RT_REQUIRE_OK(transport->StartSend(1 - rank, 3, sent.data(), bytes, &send));
      for (Wire::Ticket ticket : {send, receive}) {
        const int wakeups = sleep_until([&] {
          RT_REQUIRE_OK(transport->Test(ticket, &complete));
          return complete;
        });
        RT_CHECK(wakeups < 20);
      }
      RT_CHECK(received == Conformance::Content(1 - rank, rank, bytes, bytes));
    }
    conformance.Meet();
    transport->Close(true, 5.0);
  });
}

// ---- ranks that end ----

namespace {

void Die() { kill(getpid(), SIGKILL); }

// Rank 1 of two in a process of its own; its `body` ends with Die.
pid_t StartRankOne(Listeners& listeners, const std::function<void(Transport&)>& body) {
  return listeners.Fork(1, [&] { body(*listeners.Open(1)); });
}

}  // namespace

RT_TEST(a_rank_killed_within_a_message_is_lost_after_all_its_frames) {
  constexpr size_t kBytes = 128 << 20;
  Listeners listeners(2);
  const pid_t child = StartRankOne(listeners, [&](Transport& transport) {
    for (int number = 0; number < 200; ++number) RT_REQUIRE_OK(transport.SendFrame(0, std::to_string(number)));
    RT_CHECK_EQ(Conformance(transport).AwaitFrame(0), std::string("begin"));
    const std::string sent(kBytes, 'x');
    Wire::Ticket ticket;
    RT_REQUIRE_OK(transport.StartSend(0, 1, sent.data(), kBytes, &ticket));
    for (int look = 0; look < 20 && transport.Drive().ok(); ++look) usleep(500);
    Die();
  });
  const std::unique_ptr<Transport> transport = listeners.Open(0);
  std::string received(kBytes, '\0');
  Wire::Ticket ticket;
  RT_REQUIRE_OK(transport->StartReceive(1, 1, &received[0], kBytes, &ticket));
  std::vector<std::string> frames;
  Conformance conformance(*transport);
  while (frames.size() < 199) frames.push_back(conformance.AwaitFrame(1));
  RT_REQUIRE_OK(transport->SendFrame(1, "begin"));
  const std::string cause = AwaitLoss(*transport, 1, &frames);
  if (!Contains(cause, "connection ") || !Contains(cause, " by 127.0.0.1:") || !Contains(cause, "(rank 1)"))
    RT_CHECK_EQ(cause, std::string("connection … by 127.0.0.1:… (rank 1)"));
  RT_REQUIRE_EQ(frames.size(), size_t{200});
  for (size_t number = 0; number < frames.size(); ++number) RT_CHECK_EQ(frames[number], std::to_string(number));
  // It is reported once; what is for it goes nowhere and is no error; its message never completes.
  LostPeer again;
  RT_CHECK(!transport->TakeLostPeer(&again));
  RT_REQUIRE_OK(transport->SendFrame(1, "to nobody"));
  bool complete = true;
  RT_REQUIRE_OK(transport->Test(ticket, &complete));
  RT_CHECK(!complete);
  Wire::Ticket late;
  RT_REQUIRE_OK(transport->StartSend(1, 2, received.data(), 10, &late));
  RT_REQUIRE_OK(transport->Test(late, &complete));
  RT_CHECK(!complete);
  transport->Abandon();
  RT_CHECK(!transport->Busy());
  transport->Close(false, 1.0);
  int status = 0;
  RT_CHECK_EQ(waitpid(child, &status, 0), child);
  RT_CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

RT_TEST(a_rank_that_is_killed_is_lost_to_all) {
  Listeners listeners(3);
  int life_line[2];
  RT_REQUIRE_EQ(pipe(life_line), 0);
  const pid_t child = listeners.Fork(2, [&] {
    const std::unique_ptr<Transport> transport = listeners.Open(2);
    const auto die = [&] {
      for (int look = 0; look < 500 && transport->Drive().ok(); ++look) usleep(2000);  // the last frames leave
      Die();
    };
    Conformance(*transport).LosesAPeer(2, die, false);
  });
  close(life_line[1]);
  check::RunRanks(2, [&](int rank) {
    const std::unique_ptr<Transport> transport = listeners.Open(rank);
    char byte;
    Conformance(*transport).LosesAPeer(2, [&] { RT_CHECK_EQ(read(life_line[0], &byte, 1), ssize_t{0}); }, true);
    transport->Close(false, 1.0);
  });
  close(life_line[0]);
  waitpid(child, nullptr, 0);
}

// Nobody has looked meanwhile: the end is seen together with the frames, on another connection.
RT_TEST(frames_that_nobody_had_looked_for_come_before_the_loss) {
  Listeners listeners(2);
  const pid_t child = StartRankOne(listeners, [&](Transport& transport) {
    Conformance(transport).Meet();
    for (int number = 0; number < 200; ++number) RT_REQUIRE_OK(transport.SendFrame(0, std::to_string(number)));
    for (int look = 0; look < 50 && transport.Drive().ok(); ++look) usleep(2000);  // they leave
    Die();
  });
  const std::unique_ptr<Transport> transport = listeners.Open(0);
  Doorbell doorbell;  // nobody sleeps on it, so the watcher leaves the looking to us
  transport->SetDoorbell(&doorbell);
  Conformance(*transport).Meet();
  RT_CHECK_EQ(waitpid(child, nullptr, 0), child);
  std::vector<std::string> frames;
  AwaitLoss(*transport, 1, &frames);
  RT_CHECK_EQ(frames.size(), size_t{200});
  transport->Close(false, 1.0);
}

// Of a rank to which nothing was ever sent: the one connection that there is has its last frame and its end together.
RT_TEST(an_end_that_comes_with_the_last_bytes_is_seen) {
  Listeners listeners(2);
  int life_line[2];  // of the child, which a byte from here lets go on
  RT_REQUIRE_EQ(pipe(life_line), 0);
  const pid_t child = listeners.Fork(1, [&] {
    const std::unique_ptr<Transport> transport = listeners.Open(1);
    for (const char* frame : {"first", "last"}) {
      char byte;
      RT_REQUIRE_EQ(read(life_line[0], &byte, 1), ssize_t{1});
      RT_REQUIRE_OK(transport->SendFrame(0, frame));
      Await([&] { return transport->Drive().ok() && !transport->Busy(); });
    }
    Die();
  });
  const std::unique_ptr<Transport> transport = listeners.Open(0);
  Doorbell doorbell;  // nobody sleeps on it, so the watcher leaves the looking to us
  transport->SetDoorbell(&doorbell);
  RT_REQUIRE_EQ(write(life_line[1], "1", 1), ssize_t{1});
  RT_CHECK_EQ(Conformance(*transport).AwaitFrame(1), std::string("first"));
  RT_REQUIRE_EQ(write(life_line[1], "2", 1), ssize_t{1});
  RT_CHECK_EQ(waitpid(child, nullptr, 0), child);
  std::vector<std::string> frames;
  AwaitLoss(*transport, 1, &frames);
  RT_CHECK_EQ(frames.size(), size_t{1});
  transport->Close(false, 1.0);
  close(life_line[0]);
  close(life_line[1]);
}

RT_TEST(a_connection_that_comes_after_the_end_of_messages_is_no_loss) {
  Listeners listeners(2);
  check::RunRanks(2, [&](int rank) {
    const std::unique_ptr<Transport> transport = listeners.Open(rank);
    Conformance conformance(*transport);
    if (rank == 0) transport->Abandon();
    conformance.Meet();
    Wire::Ticket ticket;
    if (rank == 1) RT_REQUIRE_OK(transport->StartSend(0, 1, "x", 1, &ticket));
    if (rank == 1) conformance.AwaitMessage(ticket);  // the connection is there
    for (int round = 0; round < 100; ++round) conformance.Meet();
    LostPeer lost;
    RT_CHECK(!transport->TakeLostPeer(&lost));
    transport->Close(false, 1.0);
  });
}

RT_TEST(one_rank_closes_and_the_others_go_on) {
  for (int closes = 0; closes < 3; ++closes) {
    Listeners listeners(3);
    std::atomic<int> waiting{0};
    const auto wait_for_all = [&] {
      ++waiting;
      Await([&] { return waiting.load() == 3; });
    };
    check::RunRanks(3, [&](int rank) {
      const std::unique_ptr<Transport> transport = listeners.Open(rank);
      Conformance(*transport).OnePeerCloses(closes, wait_for_all);
      transport->Close(true, 5.0);
    });
  }
}

RT_TEST(a_driver_that_sleeps_hears_of_a_loss_at_once) {
  Listeners listeners(2);
  const pid_t child = StartRankOne(listeners, [&](Transport& transport) {
    Conformance(transport).Meet();
    usleep(200000);
    Die();
  });
  const std::unique_ptr<Transport> transport = listeners.Open(0);
  Doorbell doorbell;
  transport->SetDoorbell(&doorbell);
  Conformance(*transport).Meet();
  LostPeer lost;
  const Nanoseconds begin = Now();
  for (bool found = false; !found;) {
    RT_REQUIRE(Now() < begin + INT64_C(30000000000));
    const uint32_t ticket = doorbell.PrepareSleep();
    RT_REQUIRE_OK(transport->Drive());
    found = transport->TakeLostPeer(&lost);
    if (!found) doorbell.Sleep(ticket, begin + INT64_C(30000000000));
  }
  RT_CHECK_EQ(lost.rank, 1);
  transport->Close(false, 1.0);
  waitpid(child, nullptr, 0);
}

// A data loader's worker, say, that outlives the rank by which it was forked.
RT_TEST(a_rank_is_lost_while_a_child_of_it_lives) {
  Listeners listeners(2);
  int life_line[2];  // of the child's child
  RT_REQUIRE_EQ(pipe(life_line), 0);
  const pid_t child = StartRankOne(listeners, [&](Transport& transport) {
    Conformance(transport).Meet();
    const pid_t worker = fork();
    if (worker == 0) {
      close(life_line[1]);
      char byte;
      _exit(static_cast<int>(read(life_line[0], &byte, 1)));
    }
    close(life_line[0]);
    // The rank is not disturbed by its having a child, nor by what that does with its descriptors.
    Conformance(transport).Meet();
    Die();
  });
  close(life_line[0]);
  const std::unique_ptr<Transport> transport = listeners.Open(0);
  Conformance conformance(*transport);
  conformance.Meet();
  conformance.Meet();
  LostPeer lost;
  Await([&] { return transport->TakeLostPeer(&lost); }, 10);
  RT_CHECK_EQ(lost.rank, 1);
  transport->Close(false, 1.0);
  close(life_line[1]);
  waitpid(child, nullptr, 0);
}

// It has no connection and no listener, and what it closes are not the files that it has opened since.
RT_TEST(a_forked_child_keeps_no_socket) {
  Listeners listeners(2);
  std::unique_ptr<TcpListener> spare;
  RT_REQUIRE_OK(TcpListener::Open("127.0.0.1:0,127.0.0.1:0", &spare));
  check::RunRanks(2, [&](int rank) {
    std::unique_ptr<Transport> transport = listeners.Open(rank);
    Conformance conformance(*transport);
    conformance.Meet();
    if (rank == 0) {
      const pid_t child = fork();
      if (child == 0) {
        int sockets = 0, mine[40];
        for (int number = 0; number < 1024; ++number) {
          sockaddr_storage address;
          socklen_t length = sizeof address;
          sockets += getsockname(number, reinterpret_cast<sockaddr*>(&address), &length) == 0 &&
                             (address.ss_family == AF_INET || address.ss_family == AF_INET6)
                         ? 1
                         : 0;
        }
        for (int& each : mine) each = dup(STDIN_FILENO);
        spare.reset();
        int closed = 0;
        for (int each : mine) closed += fcntl(each, F_GETFD) < 0 ? 1 : 0;
        _exit(sockets + closed);
      }
      int status = -1;
      RT_CHECK_EQ(waitpid(child, &status, 0), child);
      RT_CHECK_EQ(status, 0);
    }
    conformance.Meet();
    transport->Close(true, 5.0);
  });
}

// Whoever calls Close has left, also for those to whom it has never sent anything.
RT_TEST(a_rank_that_closes_is_not_lost) {
  for (bool clean : {true, false}) {
    Listeners listeners(3);
    std::atomic<int> closed{0};
    check::RunRanks(3, [&](int rank) {
      const std::unique_ptr<Transport> transport = listeners.Open(rank);
      Conformance conformance(*transport);
      if (rank == 2) {
        RT_CHECK_EQ(conformance.AwaitFrame(0), std::string("only one way"));
      } else {
        if (rank == 0) RT_REQUIRE_OK(transport->SendFrame(2, "only one way"));
        RT_REQUIRE_OK(transport->SendFrame(1 - rank, "both ways"));
        RT_CHECK_EQ(conformance.AwaitFrame(1 - rank), std::string("both ways"));
      }
      if (rank == 0) {
        Await([&] { return closed.load() == 2; });
        for (int look = 0; look < 100; ++look) {
          RT_REQUIRE_OK(transport->Drive());
          LostPeer lost;
          if (transport->TakeLostPeer(&lost)) RT_CHECK_EQ(lost.cause, std::string("nobody is lost"));
          usleep(1000);
        }
      }
      transport->Close(clean, 5.0);
      ++closed;
    });
  }
}

RT_TEST(a_rank_that_never_comes_is_lost_when_the_time_is_over) {
  Listeners listeners(2);
  listeners.world().connect_seconds = 0.3;
  const std::unique_ptr<Transport> transport = listeners.Open(0);  // the other listens, and never opens
  RT_REQUIRE_OK(transport->SendFrame(1, "hello?"));
  const std::string cause = AwaitLoss(*transport, 1);
  if (!Contains(cause, "no connection: no answer from 127.0.0.1:") || !Contains(cause, "(rank 1)"))
    RT_CHECK_EQ(cause, std::string("no connection: no answer from 127.0.0.1:… (rank 1)"));
  RT_CHECK(!transport->Busy());
}

RT_TEST(a_rank_of_another_job_or_epoch_is_not_heard) {
  for (bool other_epoch : {false, true}) {
    Listeners listeners(2);
    listeners.world().connect_seconds = 0.5;
    TcpWorld strange = listeners.world();
    if (other_epoch)
      ++strange.epoch;
    else
      strange.secret = kOtherSecret;
    Log log;  // which a transport uses to its end
    const std::unique_ptr<Transport> transport = listeners.Open(0), stranger = listeners.Open(1, strange);
    transport->SetLog(&log);
    RT_REQUIRE_OK(stranger->SendFrame(0, "obey"));
    const std::string cause = AwaitLoss(*stranger, 0);
    if (!Contains(cause, "no proof of this job's secret"))
      RT_CHECK_EQ(cause, std::string("no proof of this job's secret"));
    int from = -1;
    std::string frame, line;
    bool arrived = true;
    RT_REQUIRE_OK(transport->ReceiveFrame(&from, &frame, &arrived));
    RT_CHECK(!arrived);
    RT_CHECK(log.Next(&line));
    RT_CHECK(Contains(line, "warning|rank 0: connections must be of this job, but 1 turned away were not"));
    RT_CHECK(Contains(line, other_epoch ? "belongs to another epoch" : "does not know the secret of this job"));
    RT_CHECK(!log.Next(&line));  // one line for all attempts
  }
}

RT_TEST(abandoned_memory_is_left_alone_and_frames_go_on) {
  constexpr size_t kBytes = check::Rounds(24) << 20;
  Listeners listeners(2);
  check::RunRanks(2, [&](int rank) {
    const std::unique_ptr<Transport> transport = listeners.Open(rank);
    Conformance conformance(*transport);
    conformance.Meet();
    auto sent = std::make_unique<std::string>(kBytes, 'x'), received = std::make_unique<std::string>(kBytes, '\0');
    Wire::Ticket send, receive;
    RT_REQUIRE_OK(transport->StartReceive(1 - rank, 1, &(*received)[0], kBytes, &receive));
    RT_REQUIRE_OK(transport->StartSend(1 - rank, 1, sent->data(), kBytes, &send));
    for (int look = 0; look < 3 + 20 * rank; ++look) RT_REQUIRE_OK(transport->Drive());
    transport->Abandon();
    RT_CHECK(!transport->Busy());
    sent.reset();
    received.reset();  // under AddressSanitizer, whoever still wrote would be seen
    for (int round = 0; round < 100; ++round) conformance.Meet();
    LostPeer lost;
    RT_CHECK(!transport->TakeLostPeer(&lost));
    transport->Close(false, 1.0);
  });
}

RT_TEST(a_message_longer_than_expected_is_an_error) {
  Listeners listeners(2);
  check::RunRanks(2, [&](int rank) {
    const std::unique_ptr<Transport> transport = listeners.Open(rank);
    const std::string sent(100, 'x');
    char received[50];
    Wire::Ticket ticket;
    if (rank == 0) RT_REQUIRE_OK(transport->StartSend(1, 9, sent.data(), sent.size(), &ticket));
    if (rank == 1) {
      RT_REQUIRE_OK(transport->StartReceive(0, 9, received, sizeof received, &ticket));
      Status status;
      bool complete = false;
      Await([&] {
        status = transport->Test(ticket, &complete);
        return complete || !status.ok();
      });
      RT_CHECK_EQ(status.code(), StatusCode::kInternal);
      RT_CHECK_EQ(status.message(),
                  std::string("receive a message of 50 bytes, tag 9, from rank 0: found 100 bytes. Run "
                              "the same ringtrain on all ranks."));
    }
    Conformance(*transport).Meet();
    RT_CHECK_EQ(transport->StartSend(0, 1, nullptr, (size_t{1} << 30) + 1, &ticket).code(),
                StatusCode::kInvalidArgument);
    transport->Close(true, 5.0);
  });
}

// ---- what a network does to connections ----

namespace {

// Stands between whoever calls a rank and the rank: passes bytes on, both ways, and does to connections what networks
// and hosts do. Neither end knows of it.
class Relay {
 public:
  enum class Deed { kPass, kReset, kHalfClose, kCut };

  // most: bytes that it passes on at a time, so that the ends read and write in parts.
  Relay(const sockaddr_in& to, size_t most) : to_(to), most_(most), listener_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in own{};
    own.sin_family = AF_INET;
    own.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof own;
    const int small = 4096;  // buffers that are full soon
    setsockopt(listener_, SOL_SOCKET, SO_RCVBUF, &small, sizeof small);
    RT_REQUIRE_EQ(bind(listener_, reinterpret_cast<const sockaddr*>(&own), length), 0);
    RT_REQUIRE_EQ(listen(listener_, 16), 0);
    RT_REQUIRE_EQ(getsockname(listener_, reinterpret_cast<sockaddr*>(&own), &length), 0);
    address_ = "127.0.0.1:" + std::to_string(ntohs(own.sin_port));
    thread_ = std::thread(&Relay::Pass, this);
  }
  ~Relay() {
    stop_ = true;
    thread_.join();
    close(listener_);
    for (const Way& way : ways_) close(way.from);
  }
  Relay(const Relay&) = delete;

  const std::string& address() const { return address_; }
  void Do(Deed deed) { deed_ = deed; }

 private:
  struct Way {
    int from, to;
    bool ended = false;
  };

  void Pass() {
    for (std::string bytes(most_, '\0'); !stop_;) {
      pollfd ready = {listener_, POLLIN, 0};
      if (poll(&ready, 1, 0) == 1 && deed_ == Deed::kPass) Accept();
      bool moved = false;
      for (Way& way : ways_) {
        const ssize_t got = way.ended || deed_ == Deed::kCut ? -1 : recv(way.from, &bytes[0], most_, MSG_DONTWAIT);
        moved |= got > 0;
        if (got == 0) way.ended = shutdown(way.to, SHUT_WR) == 0 || true;
        for (ssize_t sent = 0; sent < got && !stop_;) {
          const ssize_t now = send(way.to, &bytes[static_cast<size_t>(sent)], static_cast<size_t>(got - sent),
                                   MSG_DONTWAIT | MSG_NOSIGNAL);
          if (now > 0) sent += now;
          if (now < 0 && errno != EAGAIN) break;
        }
      }
      if (deed_ == Deed::kReset) End(true);
      if (deed_ == Deed::kHalfClose) End(false);
      if (!moved) usleep(100);
    }
  }

  void Accept() {
    const int from = accept(listener_, nullptr, nullptr), to = ConnectTo(to_);
    ways_.push_back({from, to});
    ways_.push_back({to, from});
  }

  void End(bool reset) {
    const linger at_once = {1, 0};
    for (Way& way : ways_) {
      if (std::exchange(way.ended, true)) continue;
      if (!reset) shutdown(way.from, SHUT_WR);  // both ends still may send
      if (!reset) continue;
      setsockopt(way.from, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
      const int none = socket(AF_INET, SOCK_STREAM, 0);
      dup2(none, way.from);  // closes it, and keeps the number
      close(none);
    }
  }

  const sockaddr_in to_;
  const size_t most_;
  const int listener_;
  std::string address_;
  std::vector<Way> ways_;
  std::atomic<bool> stop_{false};
  std::atomic<Deed> deed_{Deed::kPass};
  std::thread thread_;
};

// Two ranks, of which each reaches the other through a relay.
class Relayed {
 public:
  explicit Relayed(size_t most) : listeners_(2) {
    for (int rank : {0, 1}) relays_.push_back(std::make_unique<Relay>(listeners_.AddressOf(rank), most));
  }

  void Run(const std::function<void(int, Transport&)>& body) {
    check::RunRanks(2, [&](int rank) {
      TcpWorld world = listeners_.world();
      world.dead_after_seconds = 3;
      world.peers[static_cast<size_t>(1 - rank)] = relays_[static_cast<size_t>(1 - rank)]->address();
      const std::unique_ptr<Transport> transport = listeners_.Open(rank, world);
      body(rank, *transport);
    });
  }
  // When rank 0 has met rank 1, rank 1 has met rank 0: nothing of that is with the relay any more.
  static void Meet(int rank, Transport& transport, Conformance* conformance) {
    conformance->Meet();
    if (rank == 1) RT_REQUIRE_OK(transport.SendFrame(0, "met"));
    if (rank == 0) RT_REQUIRE_EQ(conformance->AwaitFrame(1), std::string("met"));
  }
  // To all connections that rank 0 has made.
  void Do(Relay::Deed deed) { relays_[1]->Do(deed); }

 private:
  Listeners listeners_;
  std::vector<std::unique_ptr<Relay>> relays_;
};

}  // namespace

RT_TEST(whatever_arrives_byte_by_byte_arrives) {
  for (size_t most : {1, 997}) {
    Relayed world(most);
    std::atomic<int> done{0};
    world.Run([&](int rank, Transport& transport) {
      Conformance conformance(transport);
      const int other = 1 - rank;
      for (size_t bytes : {size_t{0}, size_t{1}, size_t{31}, 33 + most, 90 * most, 700 * (most - 1)}) {
        const std::string sent = Conformance::Content(rank, other, bytes, bytes);
        std::string received(bytes, '\0');
        Wire::Ticket send, receive;
        RT_REQUIRE_OK(transport.SendFrame(other, sent));
        RT_REQUIRE_OK(transport.StartSend(other, 1, sent.data(), bytes, &send));
        RT_REQUIRE_OK(transport.StartReceive(other, 1, &received[0], bytes, &receive));
        for (Wire::Ticket ticket : {send, receive}) conformance.AwaitMessage(ticket);
        RT_CHECK(received == Conformance::Content(other, rank, bytes, bytes));
        RT_CHECK(conformance.AwaitFrame(other) == received);
      }
      // The relay confirms what it has not passed on, so the end of one connection may overtake the word on another.
      for (++done; done < 2;) sched_yield();
      transport.Close(true, 5.0);
    });
  }
}

// The word that it leaves overtakes, on a connection of its own, what is on its way on another.
RT_TEST(what_a_rank_has_sent_before_it_leaves_arrives) {
  constexpr size_t kBytes = 4 << 20;
  Relayed world(4096);
  world.Run([&](int rank, Transport& transport) {
    Conformance conformance(transport);
    conformance.Meet();
    std::string bytes = rank == 0 ? Conformance::Content(0, 1, 7, kBytes) : std::string(kBytes, '\0');
    Wire::Ticket ticket;
    RT_REQUIRE_OK(rank == 0 ? transport.StartSend(1, 1, bytes.data(), kBytes, &ticket)
                            : transport.StartReceive(0, 1, &bytes[0], kBytes, &ticket));
    conformance.AwaitMessage(ticket);
    RT_CHECK(bytes == Conformance::Content(0, 1, 7, kBytes));
    LostPeer lost;
    RT_CHECK(!transport.TakeLostPeer(&lost));
    transport.Close(true, 5.0);
  });
}

// Each ends the connections of one direction, in the middle of frames and messages: both ranks lose each other, once.
RT_TEST(connections_that_end_are_a_loss_to_both_ends) {
  for (Relay::Deed deed : {Relay::Deed::kReset, Relay::Deed::kHalfClose}) {
    Relayed world(1 << 16);
    world.Run([&](int rank, Transport& transport) {
      Conformance conformance(transport);
      world.Meet(rank, transport, &conformance);
      constexpr size_t kBytes = check::Rounds(24) << 20;
      const std::string sent(kBytes, 'x');
      std::string received(kBytes, '\0');
      Wire::Ticket send, receive;
      RT_REQUIRE_OK(transport.StartSend(1 - rank, 1, sent.data(), kBytes, &send));
      RT_REQUIRE_OK(transport.StartReceive(1 - rank, 1, &received[0], kBytes, &receive));
      if (rank == 0) world.Do(deed);
      const std::string cause = AwaitLoss(transport, 1 - rank);
      if (!Contains(cause, "connection closed by 127.0.0.1:") && !Contains(cause, "connection reset by 127.0.0.1:"))
        RT_CHECK_EQ(cause, std::string("connection closed by 127.0.0.1:…"));
      LostPeer again;
      for (int look = 0; look < 100; ++look, usleep(100)) RT_CHECK(!transport.TakeLostPeer(&again));
      bool complete = true;
      RT_REQUIRE_OK(transport.Test(receive, &complete));
      transport.Abandon();
      transport.Close(false, 1.0);
    });
  }
}

// Nothing arrives any more, and nothing says so: the kernel gives up what is not confirmed.
RT_TEST(connections_that_fall_silent_are_a_loss_while_something_is_sent) {
  Relayed world(1 << 16);
  world.Run([&](int rank, Transport& transport) {
    Conformance conformance(transport);
    world.Meet(rank, transport, &conformance);
    if (rank == 0) {
      world.Do(Relay::Deed::kCut);
      const std::string frame(16 << 20, 'x');  // more than buffers take
      RT_REQUIRE_OK(transport.SendFrame(1, frame));
      const Nanoseconds begin = Now();
      bool loses_large = true;
      const std::string cause = AwaitLoss(transport, 1, nullptr, &loses_large);
      RT_CHECK(Now() - begin > INT64_C(1000000000));
      RT_CHECK(!loses_large);  // nobody reads, but the kernel of the relay answers
      if (!Contains(cause, "timed out on the connection with 127.0.0.1:"))
        RT_CHECK_EQ(cause, std::string("… timed out on the connection with 127.0.0.1:…"));
    } else {
      AwaitLoss(transport, 0);
    }
    transport.Abandon();
    transport.Close(false, 1.0);
  });
}

RT_TEST(large_packets_are_lost_where_only_the_connection_that_sent_them_has_no_answer) {
  RT_CHECK(LosesLarge(15.1, 0.5, 15));
  RT_CHECK(!LosesLarge(7, 0.5, 15));      // the peer does not read, and its kernel says so
  RT_CHECK(!LosesLarge(15.1, 15.3, 15));  // nothing comes from there at all
  RT_CHECK(!LosesLarge(15.1, 0.5, 0));
  const double never = std::numeric_limits<double>::infinity();
  RT_CHECK(!LosesLarge(15.1, never, 15));  // there is no other connection on this link
}

// A line that is back is heard of soon, and not after as long a silence again.
RT_TEST(what_finds_no_answer_is_sent_again_at_bounded_intervals) {
  constexpr int kRtoMaxMs = 44;  // TCP_RTO_MAX_MS
  for (const auto& [seconds, expected] : {std::pair(30.0, 1500), {10.0, 1000}, {86400.0, 120000}}) {
    const Socket socket = NewSocket(LoopbackAddress());
    SetUp(socket, seconds);
    int bound = 0;
    socklen_t length = sizeof bound;
    if (getsockopt(socket.fd(), IPPROTO_TCP, kRtoMaxMs, &bound, &length) != 0) return;  // before Linux 6.15
    RT_CHECK_EQ(bound, expected);
  }
}

// ---- strangers ----

// Hundreds a second; fewer where each look at one takes a sanitizer ten times as long.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr useconds_t kStrangerPauseMicroseconds = 20000;
#else
constexpr useconds_t kStrangerPauseMicroseconds = 2000;
#endif

RT_TEST(strangers_cost_nothing) {
  Listeners listeners(2);
  std::atomic<bool> stop{false};
  std::thread strangers([&] {
    const sockaddr_in address = listeners.AddressOf(0);
    std::vector<int> silent;
    for (int number = 0; number < 200; ++number) silent.push_back(ConnectTo(address));  // say nothing, and stay
    for (int number = 0; !stop.load(); ++number) {
      const int stranger = ConnectTo(address);
      const std::string garbage = Conformance::Content(number, 0, 0, static_cast<size_t>(number % 300));
      send(stranger, garbage.data(), garbage.size(), MSG_NOSIGNAL);
      close(stranger);
      usleep(kStrangerPauseMicroseconds);
    }
    for (int stranger : silent) close(stranger);
  });
  usleep(50000);
  Log log;
  check::RunRanks(2, [&](int rank) {
    const std::unique_ptr<Transport> transport = listeners.Open(rank);
    if (rank == 0) transport->SetLog(&log);
    Conformance conformance(*transport);
    for (int round = 0; round < 3; ++round) conformance.All();
    LostPeer lost;
    RT_CHECK(!transport->TakeLostPeer(&lost));
    transport->Close(true, 5.0);
  });
  stop = true;
  strangers.join();
  std::string line;
  int lines = 0;
  while (log.Next(&line)) ++lines;
  RT_CHECK(lines <= 2);  // of the first, and of all others at the end
}

// Five seconds, and no more than there is room for. All are reset, since ranks may be among them, which come again.
RT_TEST(whoever_says_nothing_is_turned_away) {
  Listeners listeners(1);
  const std::unique_ptr<Transport> transport = listeners.Open(0);
  const sockaddr_in address = listeners.AddressOf(0);
  std::vector<int> silent;
  rlimit limit{};
  RT_REQUIRE_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  const int room = static_cast<int>(std::clamp<rlim_t>(limit.rlim_cur / 4, 64, 512));
  for (int number = 0; number < room + 16; ++number) silent.push_back(ConnectTo(address));
  const char slow[] = "rt-";
  for (int stranger : silent) send(stranger, slow, 1, MSG_NOSIGNAL);
  const Nanoseconds begin = Now();
  usleep(1000000);
  char byte;
  const auto is_reset = [&](int stranger, int flags) {
    return recv(stranger, &byte, 1, flags) < 0 && errno == ECONNRESET;  // not a byte was said to it
  };
  const auto rest =
      std::partition(silent.begin(), silent.end(), [&](int stranger) { return is_reset(stranger, MSG_DONTWAIT); });
  const auto early = std::distance(silent.begin(), rest);
  for (auto stranger = rest; stranger != silent.end(); ++stranger) RT_CHECK(is_reset(*stranger, 0));
  for (int stranger : silent) close(stranger);
  const double seconds = static_cast<double>(Now() - begin) * 1e-9;
  RT_CHECK(early > 8 && early <= 16);  // when there was no room
  RT_CHECK(seconds > 4.5 && seconds < 20);
}

// Of which it has none left: they are let in later, and the thread does not spin meanwhile.
RT_TEST(without_descriptors_whoever_comes_waits) {
  Listeners listeners(1);
  Log log;
  const std::unique_ptr<Transport> transport = listeners.Open(0);
  transport->SetLog(&log);
  const int stranger = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const sockaddr_in address = listeners.AddressOf(0);
  rlimit limit{}, lower{};
  RT_REQUIRE_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  lower = limit;
  lower.rlim_cur = static_cast<rlim_t>(stranger) + 1;
  RT_REQUIRE_EQ(setrlimit(RLIMIT_NOFILE, &lower), 0);
  std::vector<int> taken;  // those below it that were free
  for (int number = dup(stranger); number >= 0; number = dup(stranger)) taken.push_back(number);
  RT_CHECK_EQ(connect(stranger, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  const clock_t begin = clock();  // of the processor
  usleep(1000000);
  const clock_t used = clock() - begin;
  for (int number : taken) close(number);
  RT_REQUIRE_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  RT_CHECK(used < CLOCKS_PER_SEC / 5);
  std::string line;
  RT_REQUIRE(log.Next(&line));
  RT_CHECK(
      Contains(line, "warning|rank 0: whoever connects must find a free descriptor in this process, but: Too many "));
  RT_CHECK(
      Contains(line, "(the limit of this process is " + std::to_string(lower.rlim_cur) + "; ulimit -n raises it)"));
  RT_CHECK(!log.Next(&line));
  char byte;
  RT_CHECK_EQ(send(stranger, "GET / HTTP/1.1\r\nHost: 10.0.0.2\r\nAccept: */*\r\n", 46, MSG_NOSIGNAL), ssize_t{46});
  RT_CHECK(recv(stranger, &byte, 1, 0) <= 0);  // it was heard, and turned away
  close(stranger);
}

// ---- addresses ----

RT_TEST(listeners_take_exactly_the_addresses_that_are_given) {
  std::unique_ptr<TcpListener> first, second, third;
  RT_REQUIRE_OK(TcpListener::Open("127.0.0.1:0,[::1]:0", &first));
  const std::string both = first->addresses();
  RT_CHECK(both.find("127.0.0.1:") == 0);
  RT_CHECK(Contains(both, ",[::1]:"));
  const int port = std::stoi(both.substr(10));
  const std::string range = "127.0.0.1:" + std::to_string(port) + "-" + std::to_string(std::min(port + 50, 65535));
  RT_REQUIRE_OK(TcpListener::Open(range, &second));  // the first of the range is taken
  RT_CHECK(second->addresses() != "127.0.0.1:" + std::to_string(port));
  RT_CHECK_EQ(TcpListener::Open("127.0.0.1:" + std::to_string(port), &third).code(), StatusCode::kInvalidArgument);
  RT_CHECK_EQ(TcpListener::Open("192.0.2.1:0", &third).code(), StatusCode::kInvalidArgument);  // not of this host
  for (const char* text :
       {"", "localhost:1", "127.0.0.1", "127.0.0.1:", ":5", "127.0.0.1:65536", "127.0.0.1:9-8", "127.0.0.1:-",
        "127.0.0.1:x", "::1:5", "[127.0.0.1]:5", "[::1]", "0.0.0.0:0", "[::]:0", "127.0.0.1:0,", "127.0.0.1:0,x"}) {
    const Status status = TcpListener::Open(text, &third);
    if (std::strcmp(text, "127.0.0.1:0,") == 0) continue;  // an empty item at the end is none
    RT_CHECK_EQ(status.code(), StatusCode::kInvalidArgument);
    RT_CHECK(Contains(status.message(), "address '"));
  }
}

RT_TEST(a_world_that_makes_no_sense_is_refused) {
  Listeners listeners(2);
  TcpWorld world = listeners.world();
  std::unique_ptr<TcpListener> listener;
  std::unique_ptr<Transport> transport;
  RT_REQUIRE_OK(TcpListener::Open("127.0.0.1:0", &listener));
  for (int rank : {-1, 2}) {
    world.rank = rank;
    RT_CHECK_EQ(OpenTcpTransport(listener.get(), world, &transport).code(), StatusCode::kInvalidArgument);
  }
  world = listeners.world();
  RT_REQUIRE_OK(OpenTcpTransport(listener.get(), world, &transport));
  std::unique_ptr<Transport> again;
  RT_CHECK_EQ(OpenTcpTransport(listener.get(), world, &again).code(), StatusCode::kInvalidArgument);
  RT_REQUIRE_OK(TcpListener::Open("127.0.0.1:0", &listener));
  world.peers[1] = "127.0.0.1:0";  // nobody can be called there
  RT_CHECK_EQ(OpenTcpTransport(listener.get(), world, &again).code(), StatusCode::kInvalidArgument);
}
