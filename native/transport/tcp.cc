#include "transport/tcp.h"

#include <errno.h>

#include <algorithm>
#include <deque>
#include <new>
#include <utility>

#include "base/clock.h"
#include "base/threads.h"
#include "transport/tcp/connections.h"

namespace ringtrain {
namespace {

constexpr size_t kMaxMessageBytes = size_t{1} << 30;
constexpr double kLeaveSeconds = 0.5;  // for the last words of a rank whose world has failed

std::string TextOf(const char* verb, int peer, int tag, size_t bytes) {
  return std::string(verb) + " a message of " + std::to_string(bytes) + " bytes, tag " + std::to_string(tag) + ", " +
         (*verb == 's' ? "to" : "from") + " rank " + std::to_string(peer);
}

class TcpTransport : public Transport {
 public:
  TcpTransport(const TcpPlan& plan, std::vector<Socket> listeners)
      : rank_(plan.rank), size_(plan.size()), connections_(plan, std::move(listeners)) {}
  // Of a world that has not come to be: the others lose this rank, and have what it has told them before.
  ~TcpTransport() override { End(false, false, kLeaveSeconds); }
  Status Open() { return connections_.Open(); }

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  Status SendFrame(int to, const std::string& frame) override {
    if (frame.size() > FrameJoiner::kMostBytes)
      return Status::InvalidArgument("a frame to rank " + std::to_string(to) + ": expected at most " +
                                     std::to_string(FrameJoiner::kMostBytes) + " bytes but found " +
                                     std::to_string(frame.size()) + ". Please report it.");
    connections_.SendFrame(to, frame);
    return {};
  }

  Status ReceiveFrame(int* from, std::string* frame, bool* arrived) override {
    const int lack = connections_.TakeLack();  // of the other thread, too, which nobody hears
    if (lack == Connections::kMemory) throw std::bad_alloc();
    if (lack != 0)
      return Status::Internal("rank " + std::to_string(rank_) +
                              ": its host must have what connections take, but: " + ErrorText(lack) +
                              ". Free memory there, or raise its limits (net.ipv4.tcp_mem, "
                              "fs.epoll.max_user_watches, ulimit -n).");
    *arrived = connections_.TakeFrame(from, frame);
    if (!*arrived) {
      connections_.Attend();
      *arrived = connections_.TakeFrame(from, frame);
    }
    if (*arrived) CountArrival(*from);
    return {};
  }

  Status StartSend(int to, int tag, const void* data, size_t bytes, Ticket* ticket) override {
    return Start(to, tag, const_cast<void*>(data), bytes, false, ticket);
  }

  Status StartReceive(int from, int tag, void* data, size_t bytes, Ticket* ticket) override {
    return Start(from, tag, data, bytes, true, ticket);
  }

  Status Test(Ticket ticket, bool* complete) override {
    Message& message = messages_[static_cast<size_t>(ticket)];
    if (message.state.load(std::memory_order_acquire) == Message::kUnderWay) connections_.Attend();
    const uint32_t state = message.state.load(std::memory_order_acquire);
    *complete = state == Message::kComplete;
    if (state == Message::kUnderWay) return {};
    free_tickets_.push_back(ticket);
    if (message.receives) CountArrival(message.peer);
    if (*complete) return {};
    return Status::Internal(TextOf("receive", message.peer, static_cast<int>(message.tag), message.bytes) + ": found " +
                            std::to_string(message.found) + " bytes. Run the same ringtrain on all ranks.");
  }

  bool TakeLostPeer(LostPeer* lost) override { return connections_.TakeLost(lost); }

  void Abandon() override {
    connections_.Abandon();
    messages_.clear();
    free_tickets_.clear();
  }

  Status Drive() override {
    connections_.Attend();
    return {};
  }
  bool Busy() const override { return connections_.unsent() || messages_.size() != free_tickets_.size(); }
  bool RingsDoorbell() const override { return true; }
  void SetDoorbell(Doorbell* doorbell) override { connections_.SetDoorbell(doorbell); }
  void SetLog(Log* log) override { connections_.SetLog(log); }

  // The others close too, each when it has what it waits for; what the kernel has been given still travels.
  void Close(bool clean, double timeout_seconds) override { End(clean, true, timeout_seconds); }
  std::string Describe() const override { return "TCP, " + std::to_string(size_) + " ranks"; }
  double LongestRoundTrip() override { return connections_.LongestRoundTrip(); }
  std::string Lines() override { return connections_.Lines(); }

 private:
  void End(bool clean, bool leaves, double timeout_seconds) {
    if (!std::exchange(open_, false)) return;
    const Nanoseconds deadline = DeadlineAfter(timeout_seconds);
    while ((connections_.unsent() || (clean && SendsLeft())) && Now() < deadline) {
      connections_.Attend();
      SleepBriefly();
    }
    connections_.Close(leaves, clean ? deadline : std::min(deadline, DeadlineAfter(kLeaveSeconds)));
  }

  Status Start(int peer, int tag, void* data, size_t bytes, bool receives, Ticket* ticket) {
    if (bytes > kMaxMessageBytes)
      return Status::InvalidArgument(TextOf(receives ? "receive" : "send", peer, tag, bytes) +
                                     ": expected at most 1 GiB. Split it.");
    if (free_tickets_.empty()) {
      free_tickets_.push_back(static_cast<Ticket>(messages_.size()));
      messages_.emplace_back();
    }
    *ticket = free_tickets_.back();
    free_tickets_.pop_back();
    Message& message = messages_[static_cast<size_t>(*ticket)];
    message.data = static_cast<char*>(data);
    message.bytes = static_cast<uint32_t>(bytes);
    message.peer = peer;
    message.tag = static_cast<uint32_t>(tag);
    message.receives = receives;
    message.on_credit = false;
    message.sequence = message.cut = message.moved = message.found = 0;
    message.state.store(Message::kUnderWay, std::memory_order_relaxed);
    connections_.Start(&message);
    return {};
  }

  bool SendsLeft() const {
    for (const Message& message : messages_)
      if (!message.receives && message.state.load(std::memory_order_acquire) == Message::kUnderWay) return true;
    return false;
  }

  const int rank_, size_;
  bool open_ = true;
  std::deque<Message> messages_;  // by ticket; they stay where they are
  std::vector<Ticket> free_tickets_;
  Connections connections_;
};

Status CheckCongestionControl(const std::string& name) {
  if (name == "auto" || name == "kernel") return {};
  const Socket socket = NewSocket(LoopbackAddress());
  if (!socket.open() || TakeCongestionControl(socket, name)) return {};
  return Status::InvalidArgument("option tcp_congestion: the kernel must have '" + name +
                                 "' and let this process take it, but refuses: " + ErrorText(errno) +
                                 ". Take one of net.ipv4.tcp_allowed_congestion_control, or auto.");
}

Status MakePlan(const TcpWorld& world, TcpPlan* plan) {
  plan->rank = world.rank;
  plan->epoch = world.epoch;
  plan->hello_key = HelloKey(world.secret);
  plan->streams = world.streams;
  plan->congestion = world.congestion;
  plan->connect_seconds = world.connect_seconds;
  plan->dead_after_seconds = world.dead_after_seconds;
  for (const std::string& addresses : world.peers) {
    plan->peers.emplace_back();
    RT_TRY(ParseAddresses(addresses, &plan->peers.back()));
  }
  RT_TRY(CheckCongestionControl(world.congestion));
  if (world.rank >= 0 && world.rank < plan->size()) return {};
  return Status::InvalidArgument("rank must be in [0, " + std::to_string(plan->size()) + "), got " +
                                 std::to_string(world.rank) + ".");
}

}  // namespace

Status TcpListener::Open(const std::string& addresses, std::unique_ptr<TcpListener>* listener) {
  auto opened = std::make_unique<TcpListener>();
  RT_TRY(ListenOn(addresses, &opened->sockets_));
  for (const Socket& socket : opened->sockets_) {
    const Address bound = BoundTo(socket);
    if (bound.length == 0)
      return Status::Internal("address '" + addresses + "': the kernel must say where this process listens, but: " +
                              ErrorText(errno) + ". Free memory on this host.");
    opened->addresses_ += (opened->addresses_.empty() ? "" : ",") + bound.Text();
  }
  *listener = std::move(opened);
  return {};
}

Status OpenTcpTransport(TcpListener* listener, const TcpWorld& world, std::unique_ptr<Transport>* transport) {
  TcpPlan plan;
  RT_TRY(MakePlan(world, &plan));
  if (listener->sockets_.empty())
    return Status::InvalidArgument(
        "init over TCP: the listener must not serve another world, but does. Open one for each world.");
  auto opened = std::make_unique<TcpTransport>(plan, std::move(listener->sockets_));
  RT_TRY(opened->Open());
  *transport = std::move(opened);
  return {};
}

Status OpenTcpRendezvous(TcpListener* listener, const TcpWorld& world, const std::string& layout,
                         std::unique_ptr<Rendezvous>* rendezvous) {
  std::vector<int> simulated;
  if (!layout.empty()) RT_TRY(ParseLayout(layout, static_cast<int>(world.peers.size()), &simulated));
  std::unique_ptr<Transport> transport;
  RT_TRY(OpenTcpTransport(listener, world, &transport));
  *rendezvous = MeetByFrames(std::move(transport), std::move(simulated));
  return {};
}

}  // namespace ringtrain
