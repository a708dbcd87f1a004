// How connections begin where ranks are many, or far away, or not alone: real doors, behind a line that delays.
//
//   door_test             worlds that every run can afford
//   door_test at_scale    those of thousands of ranks, and floods of strangers
#include "transport/tcp/door.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#define RT_CHECK_OWN_MAIN
#include "check.h"

using namespace ringtrain;

namespace {

// Of the connections that a door hands out: none is watched here.
const Socket& Watched() {
  static const Socket* const set = new Socket(Socket::Made([] { return epoll_create1(EPOLL_CLOEXEC); }));
  return *set;
}

constexpr uint8_t kSecret[32] = {1, 2, 3};
constexpr Nanoseconds kMillisecond = INT64_C(1000000);
bool at_scale = false;

Socket ListenAnywhere() {
  std::vector<Socket> sockets;
  RT_REQUIRE_OK(ListenOn("127.0.0.1:0", &sockets));
  return std::move(sockets[0]);
}

// A line between those who call and one listener: whatever goes through it, an end too, takes so long each way.
class Line {
 public:
  Line(const Address& to, Nanoseconds delay) : to_(to), delay_(delay), listener_(ListenAnywhere()) {
    address_ = BoundTo(listener_);
    events_ = Socket::Made([] { return epoll_create1(EPOLL_CLOEXEC); });
    Watch(0, listener_.fd());
    thread_ = std::thread([this] { Run(); });
  }
  ~Line() {
    stop_ = true;
    thread_.join();
    for (const auto& [number, end] : ends_) close(end.descriptor);
  }
  const Address& address() const { return address_; }

 private:
  struct End {
    int descriptor;
    uint64_t other;
  };
  struct Due {
    uint64_t end;
    std::string bytes;  // none: it ends here
    bool reset = false, connects = false;
  };

  void Watch(uint64_t number, int descriptor) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = number;
    epoll_ctl(events_.fd(), EPOLL_CTL_ADD, descriptor, &event);
  }

  void Run() {
    epoll_event ready[64];
    while (!stop_) {
      const Nanoseconds wait = due_.empty() ? 10 : (due_.begin()->first - Now()) / kMillisecond;
      const int count = epoll_wait(events_.fd(), ready, 64, static_cast<int>(std::clamp<Nanoseconds>(wait, 0, 10)));
      for (int i = 0; i < count; ++i) ready[i].data.u64 == 0 ? Accept() : Read(ready[i].data.u64);
      while (!due_.empty() && due_.begin()->first <= Now()) {
        Deliver(due_.begin()->second);
        due_.erase(due_.begin());
      }
    }
  }

  void Later(Due due) { due_.emplace(Now() + delay_, std::move(due)); }

  uint64_t Add(int descriptor, uint64_t other) {
    ends_[++last_] = {descriptor, other};
    return last_;
  }

  void Accept() {
    const int caller = accept4(listener_.fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (caller >= 0) Later({Add(caller, 0), "", false, true});
  }

  void Read(uint64_t number) {
    const auto end = ends_.find(number);
    if (end == ends_.end()) return;
    char bytes[4096];
    const ssize_t got = recv(end->second.descriptor, bytes, sizeof bytes, 0);
    if (got < 0 && errno == EAGAIN) return;
    if (got > 0) return Later({end->second.other, std::string(bytes, static_cast<size_t>(got))});
    epoll_ctl(events_.fd(), EPOLL_CTL_DEL, end->second.descriptor, nullptr);
    Later({end->second.other, "", got < 0});
  }

  void Deliver(const Due& due) {
    if (due.connects) return Connect(due.end);
    const auto end = ends_.find(due.end);
    if (end == ends_.end()) return;
    if (due.bytes.empty()) {
      Finish(due.end, due.reset);
    } else if (send(end->second.descriptor, due.bytes.data(), due.bytes.size(), MSG_NOSIGNAL) < 0 && errno == EAGAIN) {
      Later(due);  // it is not connected yet
    }
  }

  void Connect(uint64_t caller) {
    const int descriptor = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (connect(descriptor, to_.get(), to_.length) != 0 && errno != EINPROGRESS) {
      close(descriptor);
      return Finish(caller, true);
    }
    const uint64_t called = Add(descriptor, caller);
    ends_[caller].other = called;
    Watch(called, descriptor);
    Watch(caller, ends_[caller].descriptor);
  }

  // Of a connection of two ends, with all that was to come.
  void Finish(uint64_t number, bool reset) {
    for (const uint64_t each : {number, ends_[number].other}) {
      const auto end = ends_.find(each);
      if (end == ends_.end()) continue;
      const linger at_once = {1, 0};
      if (reset) setsockopt(end->second.descriptor, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
      close(end->second.descriptor);
      ends_.erase(end);
    }
  }

  const Address to_;
  const Nanoseconds delay_;
  Socket listener_, events_;
  Address address_;
  std::multimap<Nanoseconds, Due> due_;
  std::map<uint64_t, End> ends_;
  uint64_t last_ = 0;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

struct Counting final : Door::Owner {
  std::atomic<int> opened{0}, unreachable{0}, notices{0};
  std::mutex mutex;
  std::string last;

  void Opened(Connection) override { ++opened; }
  void Unreachable(int, std::string cause) override { Note(&unreachable, std::move(cause)); }
  void Notice(std::string line) override { Note(&notices, std::move(line)); }
  void Note(std::atomic<int>* count, std::string text) {
    std::lock_guard<std::mutex> lock(mutex);
    last = std::move(text);
    ++*count;
  }
};

// Rank 0's door, in a thread of its own, and a plan of a world in which all others call it through a line.
class World {
 public:
  World(int ranks, Nanoseconds delay)
      : listener_(ListenAnywhere()), address_(BoundTo(listener_)), line_(address_, delay) {
    plan_.hello_key = HelloKey(kSecret);
    plan_.peers.assign(static_cast<size_t>(ranks), {address_});
    std::vector<Socket> listeners;
    listeners.push_back(std::move(listener_));
    door_ = std::make_unique<Door>(plan_, std::move(listeners), &answered_);
    RT_REQUIRE_OK(door_->Open(Watched()));
    thread_ = std::thread([this] { Serve(*door_); });
  }
  ~World() {
    door_->Stop();
    thread_.join();
  }

  const Address& address() const { return address_; }
  Counting& answered() { return answered_; }
  void CallAs(int rank, Counting* all) {
    struct Caller final : Door::Owner {
      Counting* all;
      Door* door;
      void Opened(Connection connection) override {
        all->Opened(std::move(connection));
        door->Stop();
      }
      void Unreachable(int peer, std::string cause) override {
        all->Unreachable(peer, std::move(cause));
        door->Stop();
      }
      void Notice(std::string line) override { all->Notice(std::move(line)); }
    } caller;
    TcpPlan plan = plan_;
    plan.peers[0] = {line_.address()};
    plan.rank = rank;
    Door door(plan, {}, &caller);
    caller.all = all;
    caller.door = &door;
    if (!door.Open(Watched()).ok()) return all->Unreachable(0, "no descriptors");
    door.Call(0, 0);
    Serve(door);
  }

  static void Serve(Door& door) {
    bool watched = false;
    while (door.Wait(&watched)) {
    }
  }

  // All other ranks call at once; returns when each has been heard, or given up.
  void Call() {
    const Nanoseconds begin = Now();
    Counting callers;
    const int count = plan_.size() - 1;
    std::vector<std::thread> threads;
    for (int rank = 1; rank <= count; ++rank) threads.emplace_back([&, rank] { CallAs(rank, &callers); });
    for (std::thread& thread : threads) thread.join();
    std::printf("     %d ranks are in after %.2f s\n", answered_.opened.load(),
                static_cast<double>(Now() - begin) * 1e-9);
    RT_CHECK_EQ(callers.opened.load(), count);
    RT_CHECK_EQ(callers.last, std::string());
  }

 private:
  TcpPlan plan_;
  Socket listener_;
  const Address address_;
  Line line_;
  Counting answered_;
  std::unique_ptr<Door> door_;
  std::thread thread_;
};

// Strangers who come so often a second, say nothing or the first half of a hello, and stay.
class Flood {
 public:
  Flood(const Address& to, int silent_a_second, int half_a_second)
      : to_(to), rates_{silent_a_second, half_a_second}, thread_([this] { Run(); }) {}
  ~Flood() {
    stop_ = true;
    thread_.join();
    for (int end : ends_) close(end);
    std::printf("     beside %d strangers\n", came_);
  }

 private:
  void Run() {
    const Claim claim = {1, 0, 0, 0};
    const std::string greeting = HelloCaller(HelloKey(kSecret), claim, Nonce{}).Say();
    const Nanoseconds begin = Now();
    int come[2] = {0, 0};
    while (!stop_) {
      const double seconds = static_cast<double>(Now() - begin) * 1e-9;
      for (int kind = 0; kind < 2; ++kind)
        for (; come[kind] < rates_[kind] * seconds; ++come[kind]) Come(kind == 1 ? greeting : "");
      usleep(2000);
    }
    came_ = come[0] + come[1];
  }

  void Come(const std::string& greeting) {
    const int end = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (connect(end, to_.get(), to_.length) == 0 || errno == EINPROGRESS) [[maybe_unused]]
      const ssize_t sent = send(end, greeting.data(), greeting.size(), MSG_NOSIGNAL);
    ends_.push_back(end);
    if (ends_.size() < 4000) return;
    close(ends_.front());
    ends_.pop_front();
  }

  const Address to_;
  const int rates_[2];
  int came_ = 0;
  std::deque<int> ends_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

void AllAreIn(int ranks, int delay) {
  World world(ranks, delay * kMillisecond);
  world.Call();
  RT_CHECK_EQ(world.answered().opened.load(), ranks - 1);
  RT_CHECK_EQ(world.answered().last, std::string());  // none of them was taken for a stranger
}

RT_TEST(all_ranks_come_at_once_from_far_away) {
  if (!at_scale) return AllAreIn(check::kThreadSanitizer ? 20 : 150, 25);
  for (const auto& [ranks, delay] : {std::pair{2000, 20}, {1000, 5}, {1000, 20}, {2000, 2}, {600, 50}})
    AllAreIn(ranks, delay);
}

RT_TEST(ranks_come_beside_strangers) {
  for (const int delay : {5, 20}) {
    World world(9, delay * kMillisecond);
    const int rate = at_scale ? 5000 : check::kThreadSanitizer ? 200 : 1000;
    const Flood flood(world.address(), rate, rate);
    usleep(300000);  // the room is taken
    world.Call();
    if (!at_scale) break;
  }
}

// A firewall that opens late, or a queue that is full: nobody answers for longer than a connection may be silent.
RT_TEST(a_rank_that_does_not_answer_yet_is_called_again) {
  const Socket full = Socket::Made([] { return socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0); });
  sockaddr_in anywhere{};
  anywhere.sin_family = AF_INET;
  anywhere.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  RT_REQUIRE_EQ(bind(full.fd(), reinterpret_cast<sockaddr*>(&anywhere), sizeof anywhere), 0);
  RT_REQUIRE_EQ(listen(full.fd(), 0), 0);
  const Address address = BoundTo(full);
  std::vector<Socket> waiting;
  for (int i = 0; i < 4; ++i) {
    waiting.push_back(NewSocket(address));
    connect(waiting.back().fd(), address.get(), address.length);
  }
  TcpPlan plan;
  plan.hello_key = HelloKey(kSecret);
  plan.peers.assign(2, {address});
  plan.dead_after_seconds = 0.3;
  plan.rank = 1;
  Counting told;
  Door door(plan, {}, &told);
  RT_REQUIRE_OK(door.Open(Watched()));
  door.Call(0, 0);
  std::thread thread([&] { World::Serve(door); });
  usleep(at_scale ? 7000000 : 1500000);
  RT_CHECK_EQ(told.last, std::string());
  door.Stop();
  thread.join();
}

}  // namespace

int main(int argc, char** argv) {
  at_scale = argc > 1 && std::string(argv[1]) == "at_scale";
  return check::RunTests(at_scale ? 1 : argc, argv);
}
