// Connections: those of a rank, and whoever moves bytes over them. Two threads may:
//
//   the driver    calls in, and moves what there is to move while it is awake: no switch of threads lies between a
//                 packet and whoever waits for it;
//   the watcher   sleeps in Door::Wait. While the driver sleeps, or large messages are under way, it is woken by what
//                 arrives, moves it, and rings the driver's doorbell when something is complete.
//
// One of them at a time: the one that holds mutex_. Who finds it held leaves word (left_word_), and the holder sees to
// it that somebody looks once more. So no call of the driver waits for a copy of the other.
//
// Sockets are in an epoll set of their own, edge-triggered: a call asks it for news without sleeping. The watcher
// sleeps on the door's set, in which this one takes part only after Arm: else each packet would wake both threads.
#ifndef RINGTRAIN_TRANSPORT_TCP_CONNECTIONS_H_
#define RINGTRAIN_TRANSPORT_TCP_CONNECTIONS_H_

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/doorbell.h"
#include "base/log.h"
#include "base/mutex.h"
#include "transport/tcp/arrivals.h"
#include "transport/tcp/door.h"
#include "transport/tcp/orders.h"
#include "transport/tcp/peer.h"
#include "transport/wire.h"

namespace ringtrain {

class Connections final : private Door::Owner {
 public:
  Connections(const TcpPlan& plan, std::vector<Socket> listeners);
  ~Connections();
  // Starts the watcher.
  Status Open();

  // The driver's.
  void SendFrame(int to, std::string frame);
  void Start(Message* message);
  // Moves what there is to move.
  void Attend() { Attend(false); }
  bool TakeFrame(int* from, std::string* frame) { return arrivals_.TakeFrame(from, frame); }
  bool TakeLost(LostPeer* lost) { return arrivals_.TakeLost(lost); }
  // Whether frames wait to be given to the kernel.
  bool unsent() const { return unsent_.load(std::memory_order_relaxed) > 0; }
  // What whoever moved bytes has lacked since this was asked last, so that of what has come some may be lost: an errno,
  // kMemory, or 0.
  static constexpr int kMemory = -1;
  int TakeLack() { return lack_.load() == 0 ? 0 : lack_.exchange(0); }
  // Lets go of all messages; none is sent or received any more, frames are.
  void Abandon();
  void SetDoorbell(Doorbell* doorbell);
  void SetLog(Log* log) { log_.store(log); }
  // Any thread's. Of the ranks that this one is connected with, in seconds; and what is known of each that it has sent
  // tensors to, as rt_lines has it.
  double LongestRoundTrip();
  std::string Lines();
  // Ends the watcher and all connections. `leaves`: tells the others before, who know it by the deadline if they can be
  // reached; else they lose this rank.
  void Close(bool leaves, Nanoseconds deadline);

 private:
  void Opened(Connection connection) override;
  void Unreachable(int peer, std::string cause) override;
  void Notice(std::string line) override;

  void Watch();
  void Attend(bool watches);
  // All return whether there is more to do at once.
  bool MoveAll() RT_REQUIRES(mutex_);
  bool MoveWhatThereIs() RT_REQUIRES(mutex_);
  void NoteLackOfMemory() RT_REQUIRES(mutex_);
  void NoteLack(Peer* peer, int error) RT_REQUIRES(mutex_);
  bool Receive() RT_REQUIRES(mutex_);
  bool FlushDirty() RT_REQUIRES(mutex_);

  void TakeOrders() RT_REQUIRES(mutex_);
  void Obey(Order* order) RT_REQUIRES(mutex_);
  void AddLane(Connection connection) RT_REQUIRES(mutex_);
  void LookForEvents() RT_REQUIRES(mutex_);
  bool Flush(Peer* peer) RT_REQUIRES(mutex_);
  void Count(Peer* peer) RT_REQUIRES(mutex_);
  bool FlushControl(Peer* peer) RT_REQUIRES(mutex_);
  void CallData(Peer* peer) RT_REQUIRES(mutex_);
  void MarkDirty(Peer* peer) RT_REQUIRES(mutex_);
  void Signal(Peer* peer, bool sends, size_t lane, uint32_t events) RT_REQUIRES(mutex_);
  void MarkReadable(Peer* peer, size_t lane) RT_REQUIRES(mutex_);
  void Release();
  void Lose(Peer* peer, const std::string& cause, bool loses_large = false) RT_REQUIRES(mutex_);
  void LoseSending(Peer* peer, size_t lane, const LaneMove& move) RT_REQUIRES(mutex_);
  void Arm() RT_REQUIRES(mutex_);

  const TcpPlan plan_;
  Door door_;
  std::thread watcher_;
  std::atomic<Log*> log_{nullptr};

  Orders orders_;
  std::atomic<bool> left_word_{false};
  std::atomic<bool> fired_{false};  // the watcher was woken, and is no longer armed

  Mutex mutex_;  // held by whoever moves bytes
  Socket events_ RT_GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<Peer>> peers_ RT_GUARDED_BY(mutex_);        // by rank
  std::vector<Peer*> dirty_ RT_GUARDED_BY(mutex_);                        // with something to send, perhaps
  std::vector<Peer*> flushed_ RT_GUARDED_BY(mutex_);                      // those that FlushDirty has taken
  std::vector<std::pair<Peer*, size_t>> readable_ RT_GUARDED_BY(mutex_);  // lanes with something to receive, perhaps
  int engaged_ RT_GUARDED_BY(mutex_) = 0;  // peers to whom something waits to be sent, or with large messages
  bool armed_ RT_GUARDED_BY(mutex_) = false;
  bool news_ RT_GUARDED_BY(mutex_) = false;
  bool abandoned_ RT_GUARDED_BY(mutex_) = false;
  Doorbell* doorbell_ RT_GUARDED_BY(mutex_) = nullptr;
  std::atomic<int> unsent_{0};  // peers to whom frames wait to be sent
  std::atomic<int> lack_{0};

  Arrivals arrivals_;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_TRANSPORT_TCP_CONNECTIONS_H_
