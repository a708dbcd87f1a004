#include "transport/in_process.h"

#include <cstring>
#include <deque>
#include <map>
#include <numeric>
#include <utility>

#include "base/mutex.h"

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

// Where the traffic to one rank lies until it is fetched. Messages are copied once, straight from the sender's memory to the
// receiver's, by whichever side comes second.
struct Hub::Inbox {
  using Channel = std::pair<int, int>;  // sender, tag

  Mutex mutex;
  bool taken RT_GUARDED_BY(mutex) = false;
  Doorbell* doorbell RT_GUARDED_BY(mutex) = nullptr;
  std::deque<std::pair<int, std::string>> frames RT_GUARDED_BY(mutex);
  std::map<Channel, std::deque<MessagePointer>> sends RT_GUARDED_BY(mutex);     // without a receive yet
  std::map<Channel, std::deque<MessagePointer>> receives RT_GUARDED_BY(mutex);  // without a send yet
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
    inbox.frames.emplace_back(rank_, frame);
    if (inbox.doorbell != nullptr) inbox.doorbell->Ring();
    return {};
  }

  Status ReceiveFrame(int* from, std::string* frame, bool* arrived) override {
    Hub::Inbox& inbox = *hub_->inboxes_[rank_];
    MutexLock lock(inbox.mutex);
    *arrived = !inbox.frames.empty();
    if (!*arrived) return {};
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

  void RingDoorbellOf(int rank) {
    Hub::Inbox& inbox = *hub_->inboxes_[rank];
    MutexLock lock(inbox.mutex);
    if (inbox.doorbell != nullptr) inbox.doorbell->Ring();
  }

  const std::shared_ptr<Hub> hub_;
  const int rank_;
  std::vector<MessagePointer> messages_;  // by ticket
  std::vector<Ticket> free_tickets_;
};

Hub::Hub(std::vector<int> layout)
    : layout_(std::move(layout)), size_(std::accumulate(layout_.begin(), layout_.end(), 0)) {
  for (int ranks : layout_) hosts_.push_back(MakeProcessHost(ranks));
  for (int rank = 0; rank < size_; ++rank) inboxes_.push_back(std::make_unique<Inbox>());
}

Hub::~Hub() = default;

Status Hub::Join(const std::shared_ptr<Hub>& hub, int rank, std::unique_ptr<Transport>* transport,
                 std::unique_ptr<HostMemory>* memory) {
  if (rank < 0 || rank >= hub->size())
    return Status::InvalidArgument("rank must be in [0, " + std::to_string(hub->size()) + "), got " + std::to_string(rank) + ".");
  {
    MutexLock lock(hub->inboxes_[rank]->mutex);
    if (std::exchange(hub->inboxes_[rank]->taken, true))
      return Status::InvalidArgument("rank " + std::to_string(rank) + " has joined this hub already.");
  }
  int host = 0, local_rank = rank;
  while (local_rank >= hub->layout_[host]) local_rank -= hub->layout_[host++];
  *transport = std::make_unique<InProcessTransport>(hub, rank);
  *memory = OpenProcessMemory(hub->hosts_[host], local_rank);
  return {};
}

Status ParseLayout(const std::string& text, int size, std::vector<int>* layout) {
  layout->clear();
  if (text.empty()) {
    layout->push_back(size);
    return {};
  }
  int sum = 0;
  for (size_t begin = 0; begin <= text.size();) {
    size_t end = std::min(text.find('+', begin), text.size());
    std::string field = text.substr(begin, end - begin);
    bool digits = !field.empty() && field.size() < 7 && field.find_first_not_of("0123456789") == std::string::npos;
    int ranks = digits ? std::stoi(field) : 0;
    if (ranks == 0) break;
    layout->push_back(ranks);
    sum += ranks;
    begin = end + 1;
    if (end == text.size() && sum == size) return {};
  }
  return Status::InvalidArgument("option host_layout: expected ranks per host that sum to " + std::to_string(size) +
                                 ", such as 2+2, but found '" + text + "'.");
}

}  // namespace ringtrain
