#include "transport/in_process.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <map>
#include <numeric>
#include <utility>

#include "base/doorbell.h"
#include "base/mutex.h"
#include "transport/lost_peers.h"

namespace ringtrain {
namespace {

// One side's memory and completion; shared by its owner and the peer's inbox.
struct Message {
  void* data = nullptr;
  size_t bytes = 0;
  int from = -1;  // of a receive
  std::atomic<bool> complete{false};
};
using MessagePointer = std::shared_ptr<Message>;

}  // namespace

// Where the traffic to one rank lies until it is fetched. Messages are copied once, straight from the sender's memory
// to the receiver's, by whichever side comes second.
struct Hub::Inbox {
  using Channel = std::pair<int, int>;  // sender, tag

  Mutex mutex;
  bool taken RT_GUARDED_BY(mutex) = false;
  Doorbell* doorbell RT_GUARDED_BY(mutex) = nullptr;
  std::vector<LostPeer> lost RT_GUARDED_BY(mutex);  // and not heard of by the owner
  std::deque<std::pair<int, std::string>> frames RT_GUARDED_BY(mutex);
  std::map<Channel, std::deque<MessagePointer>> sends RT_GUARDED_BY(mutex);     // without a receive yet
  std::map<Channel, std::deque<MessagePointer>> receives RT_GUARDED_BY(mutex);  // without a send yet
  std::atomic<bool> cut_off{false};                                             // the owner
};

class InProcessTransport : public Transport {
 public:
  InProcessTransport(std::shared_ptr<Hub> hub, int rank) : hub_(std::move(hub)), rank_(rank) {}
  ~InProcessTransport() override { Close(false, 0); }

  int rank() const override { return rank_; }
  int size() const override { return hub_->size(); }

  Status SendFrame(int to, const std::string& frame) override {
    Hub::Inbox& inbox = *hub_->inboxes_[to];
    MutexLock lock(inbox.mutex);
    if (IsCutOffFrom(to)) return {};
    inbox.frames.emplace_back(rank_, frame);
    if (inbox.doorbell != nullptr) inbox.doorbell->Ring();
    return {};
  }

  Status ReceiveFrame(int* from, std::string* frame, bool* arrived) override {
    Hub::Inbox& inbox = *hub_->inboxes_[rank_];
    MutexLock lock(inbox.mutex);
    *arrived = !inbox.frames.empty();
    if (!*arrived) {
      HearOfLostPeers(&inbox.lost);
      return {};
    }
    *from = inbox.frames.front().first;
    *frame = std::move(inbox.frames.front().second);
    inbox.frames.pop_front();
    CountArrival(*from);
    return {};
  }

  Status StartSend(int to, int tag, const void* data, size_t bytes, Ticket* ticket) override {
    MessagePointer message = NewMessage(const_cast<void*>(data), bytes, ticket);
    Hub::Inbox& inbox = *hub_->inboxes_[to];
    MutexLock lock(inbox.mutex);
    if (IsCutOffFrom(to)) return {};
    auto& receives = inbox.receives[{rank_, tag}];
    if (receives.empty()) {
      inbox.sends[{rank_, tag}].push_back(std::move(message));
      return {};
    }
    Status status = Deliver(*message, *receives.front());
    receives.pop_front();
    if (inbox.doorbell != nullptr) inbox.doorbell->Ring();
    return status;
  }

  Status StartReceive(int from, int tag, void* data, size_t bytes, Ticket* ticket) override {
    MessagePointer message = NewMessage(data, bytes, ticket);
    message->from = from;
    Status status;
    {
      Hub::Inbox& inbox = *hub_->inboxes_[rank_];
      MutexLock lock(inbox.mutex);
      if (IsCutOffFrom(from)) return {};
      auto& sends = inbox.sends[{from, tag}];
      if (sends.empty()) {
        inbox.receives[{from, tag}].push_back(std::move(message));
        return {};
      }
      status = Deliver(*sends.front(), *message);
      sends.pop_front();
    }
    RingDoorbellOf(from);  // its send is complete
    return status;
  }

  Status Test(Ticket ticket, bool* complete) override {
    *complete = messages_[ticket]->complete.load(std::memory_order_acquire);
    if (!*complete) return {};
    if (messages_[ticket]->from >= 0) CountArrival(messages_[ticket]->from);
    messages_[ticket].reset();
    free_tickets_.push_back(ticket);
    return {};
  }

  bool TakeLostPeer(LostPeer* lost) override { return lost_peers_.Take(lost); }

  Status Drive() override { return {}; }
  bool Busy() const override { return messages_.size() != free_tickets_.size(); }
  bool RingsDoorbell() const override { return true; }

  void SetDoorbell(Doorbell* doorbell) override {
    Hub::Inbox& inbox = *hub_->inboxes_[rank_];
    MutexLock lock(inbox.mutex);
    inbox.doorbell = doorbell;
  }

  void Close(bool, double) override {
    SetDoorbell(nullptr);
    Abandon();
  }

  // A peer copies under the same locks, so none is at it when this returns.
  void Abandon() override {
    for (int to = 0; to < size(); ++to) {
      Hub::Inbox& inbox = *hub_->inboxes_[to];
      MutexLock lock(inbox.mutex);
      for (auto& channel : inbox.sends)
        if (channel.first.first == rank_) channel.second.clear();
      if (to != rank_) continue;
      for (auto& channel : inbox.receives) channel.second.clear();
    }
  }

  std::string Describe() const override { return "in process, " + std::to_string(size()) + " ranks"; }

 private:
  MessagePointer NewMessage(void* data, size_t bytes, Ticket* ticket) {
    auto message = std::make_shared<Message>();
    message->data = data;
    message->bytes = bytes;
    if (free_tickets_.empty()) {
      free_tickets_.push_back(static_cast<Ticket>(messages_.size()));
      messages_.emplace_back();
    }
    *ticket = free_tickets_.back();
    free_tickets_.pop_back();
    messages_[*ticket] = message;
    return message;
  }

  static Status Deliver(Message& send, Message& receive) {
    if (send.bytes != receive.bytes)
      return Status::Internal("in-process message of " + std::to_string(send.bytes) + " bytes where " +
                              std::to_string(receive.bytes) + " were expected.");
    if (send.bytes > 0) std::memcpy(receive.data, send.data, send.bytes);
    receive.complete.store(true, std::memory_order_release);
    send.complete.store(true, std::memory_order_release);
    return {};
  }

  bool IsCutOffFrom(int rank) const {
    return rank != rank_ && (hub_->inboxes_[rank]->cut_off.load() || hub_->inboxes_[rank_]->cut_off.load());
  }

  void HearOfLostPeers(std::vector<LostPeer>* lost) {
    if (lost->empty()) return;
    for (LostPeer& peer : *lost) lost_peers_.Add(peer.rank, std::move(peer.cause));
    lost->clear();
    lost_peers_.FramesAreTaken();
  }

  void RingDoorbellOf(int rank) {
    Hub::Inbox& inbox = *hub_->inboxes_[rank];
    MutexLock lock(inbox.mutex);
    if (inbox.doorbell != nullptr) inbox.doorbell->Ring();
  }

  const std::shared_ptr<Hub> hub_;
  const int rank_;
  std::vector<MessagePointer> messages_;  // by ticket
  std::vector<Ticket> free_tickets_;
  LostPeers lost_peers_;
};

// One exchange of texts: written under the hub's lock until it is complete, and read without it afterwards.
struct Hub::Round {
  explicit Round(int size)
      : texts(static_cast<size_t>(size)), present(static_cast<size_t>(size), false), missing(size) {}
  std::vector<std::string> texts;
  std::vector<bool> present;
  int missing;
  std::atomic<uint32_t> complete{0};
};

class InProcessRendezvous : public Rendezvous {
 public:
  InProcessRendezvous(std::shared_ptr<Hub> hub, int rank) : hub_(std::move(hub)), rank_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return hub_->size(); }

  Status Allgather(const std::string& mine, Nanoseconds deadline, std::vector<std::string>* all) override {
    const std::shared_ptr<Hub::Round> round = Put(mine);
    while (round->complete.load(std::memory_order_acquire) == 0) {
      if (Now() > deadline) return Missing(*round);
      FutexWait(&round->complete, 0, deadline);
    }
    *all = round->texts;
    return {};
  }

  Status Meet(const WindowSize&, Nanoseconds, Meeting* meeting) override {
    std::vector<std::string> keys;
    for (size_t host = 0; host < hub_->layout_.size(); ++host)
      keys.insert(keys.end(), static_cast<size_t>(hub_->layout_[host]), std::to_string(host));
    GroupByHost(keys, &meeting->world);
    const World& world = meeting->world;
    meeting->memory = OpenProcessMemory(hub_->hosts_[static_cast<size_t>(world.host_of[static_cast<size_t>(rank_)])],
                                        world.local_rank_of[static_cast<size_t>(rank_)]);
    meeting->transport = Hub::TransportOf(hub_, rank_);
    return {};
  }

 private:
  std::shared_ptr<Hub::Round> Put(const std::string& mine) {
    MutexLock lock(hub_->mutex_);
    const int number = rounds_++;
    std::shared_ptr<Hub::Round>& entry = hub_->rounds_[number];
    if (entry == nullptr) entry = std::make_shared<Hub::Round>(size());
    const std::shared_ptr<Hub::Round> round = entry;
    round->texts[static_cast<size_t>(rank_)] = mine;
    round->present[static_cast<size_t>(rank_)] = true;
    if (--round->missing > 0) return round;
    hub_->rounds_.erase(number);
    round->complete.store(1, std::memory_order_release);
    FutexWake(&round->complete, INT32_MAX);
    return round;
  }

  Status Missing(const Hub::Round& round) const {
    MutexLock lock(hub_->mutex_);
    std::vector<int> absent;
    for (int rank = 0; rank < size(); ++rank)
      if (!round.present[static_cast<size_t>(rank)]) absent.push_back(rank);
    return RanksMissing(size(), absent);
  }

  const std::shared_ptr<Hub> hub_;
  const int rank_;
  int rounds_ = 0;  // that this rank has taken part in
};

Hub::Hub(std::vector<int> layout)
    : layout_(std::move(layout)), size_(std::accumulate(layout_.begin(), layout_.end(), 0)) {
  for (int ranks : layout_) hosts_.push_back(MakeProcessHost(ranks));
  for (int rank = 0; rank < size_; ++rank) inboxes_.push_back(std::make_unique<Inbox>());
}

Hub::~Hub() = default;

Status Hub::Join(const std::shared_ptr<Hub>& hub, int rank, std::unique_ptr<Rendezvous>* rendezvous) {
  if (rank < 0 || rank >= hub->size())
    return Status::InvalidArgument("rank must be in [0, " + std::to_string(hub->size()) + "), got " +
                                   std::to_string(rank) + ".");
  {
    MutexLock lock(hub->inboxes_[rank]->mutex);
    if (std::exchange(hub->inboxes_[rank]->taken, true))
      return Status::InvalidArgument("rank " + std::to_string(rank) + " has joined this hub already.");
  }
  *rendezvous = std::make_unique<InProcessRendezvous>(hub, rank);
  return {};
}

void Hub::CutOff(int rank, const std::string& cause) {
  inboxes_[static_cast<size_t>(rank)]->cut_off.store(true);  // from here on nothing new comes into an inbox
  for (int other = 0; other < size_; ++other) {
    Inbox& inbox = *inboxes_[static_cast<size_t>(other)];
    MutexLock lock(inbox.mutex);
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == other || (peer != rank && other != rank)) continue;
      inbox.lost.push_back({peer, cause});
    }
    if (inbox.doorbell != nullptr) inbox.doorbell->Ring();
  }
}

std::unique_ptr<Transport> Hub::TransportOf(const std::shared_ptr<Hub>& hub, int rank) {
  return std::make_unique<InProcessTransport>(hub, rank);
}

}  // namespace ringtrain
