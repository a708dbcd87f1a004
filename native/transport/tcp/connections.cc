#include "transport/tcp/connections.h"

#include <errno.h>
#include <pthread.h>
#include <sys/epoll.h>

#include <algorithm>
#include <new>

#include "base/threads.h"

namespace ringtrain {
namespace {

// What an event of the epoll set belongs to.
uint64_t IdOf(int peer, bool sends, size_t lane) {
  return static_cast<uint64_t>(peer) << 9 | uint64_t{sends} << 8 | lane;
}

}  // namespace

Connections::Connections(const TcpPlan& plan, std::vector<Socket> listeners)
    : plan_(plan), door_(plan_, std::move(listeners), this) {
  for (int rank = 0; rank < plan_.size(); ++rank) peers_.push_back(std::make_unique<Peer>(plan_, rank));
  dirty_.reserve(peers_.size());
  flushed_.reserve(peers_.size());
}

Connections::~Connections() { Close(false, 0); }

Status Connections::Open() {
  {
    MutexLock lock(mutex_);
    events_ = Socket::Made([] { return epoll_create1(EPOLL_CLOEXEC); });
    RT_TRY(door_.Open(events_));
  }
  return StartThread(plan_.rank, &watcher_, &Connections::Watch, this);
}

// ---- whoever moves bytes ----

void Connections::Watch() {
  pthread_setname_np(pthread_self(), "ringtrain wire");
  for (bool watched, open = true; open;) {
    watched = false;
    try {
      open = door_.Wait(&watched);
    } catch (const std::bad_alloc&) {
      {
        MutexLock lock(mutex_);
        NoteLackOfMemory();
      }
      SleepBriefly();
      door_.Wake();  // what it has not come to waits
    }
    if (watched) fired_.store(true);
    if (open) Attend(true);
  }
}

// The word is left before the lock is tried, and looked for after it was given back: one of the two sees the other.
void Connections::Attend(bool watches) {
  for (bool again = true; again;) {
    left_word_.store(true, std::memory_order_seq_cst);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (!mutex_.TryLock()) return;
    left_word_.store(false, std::memory_order_seq_cst);
    again = MoveAll();
    mutex_.Unlock();
    std::atomic_thread_fence(std::memory_order_seq_cst);
    again = again || left_word_.load(std::memory_order_seq_cst);
    if (again && !watches) return door_.Wake();  // the driver has other things to do
  }
}

// Nobody above could take an exception: the watcher's thread has nobody, and the other thread would never get the lock.
bool Connections::MoveAll() {
  try {
    return MoveWhatThereIs();
  } catch (const std::bad_alloc&) {
    NoteLackOfMemory();
    return false;
  }
}

// The driver ends the world, and tells the others why: what is to be sent must still go.
void Connections::NoteLackOfMemory() {
  lack_.store(kMemory);
  dirty_.clear();
  for (const auto& peer : peers_) {
    peer->dirty = true;
    dirty_.push_back(peer.get());  // for which there is room
  }
  if (doorbell_ != nullptr) doorbell_->Ring();
}

// Likewise, while a connection goes on.
void Connections::NoteLack(Peer* peer, int error) {
  lack_.store(error);
  MarkDirty(peer);
  if (doorbell_ != nullptr) doorbell_->Ring();
}

bool Connections::MoveWhatThereIs() {
  TakeOrders();
  bool more = FlushDirty();
  LookForEvents();
  more |= Receive();
  more |= FlushDirty();
  if (std::exchange(news_, false) && doorbell_ != nullptr) doorbell_->Ring();
  Arm();
  return more;
}

// The watcher watches while the driver cannot look itself, and while it has better things to do than to copy.
void Connections::Arm() {
  if (fired_.exchange(false)) armed_ = false;
  const bool wanted = doorbell_ == nullptr || doorbell_->owner_sleeps() || engaged_ > 0;
  if (wanted && !std::exchange(armed_, true)) door_.Watch();
}

void Connections::LookForEvents() {
  epoll_event events[64];
  int count;
  do {
    count = epoll_wait(events_.fd(), events, 64, 0);
    for (int i = 0; i < count; ++i) {
      const uint64_t id = events[i].data.u64;
      Signal(peers_[static_cast<size_t>(id >> 9)].get(), (id >> 8 & 1) != 0, static_cast<size_t>(id & 255),
             events[i].events);
    }
  } while (count == 64);
}

void Connections::Signal(Peer* peer, bool sends, size_t lane, uint32_t events) {
  if (peer->lost()) return;
  if (!sends) {
    MarkReadable(peer, lane);
    // The end of a connection may be told together with its last bytes, and is not told again.
    if ((events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) peer->NoteEnd(lane);
    return;
  }
  if (!peer->SendsOn(lane)) return;  // silent, or it has left
  if ((events & ~uint32_t{EPOLLOUT}) != 0) {
    const LaneMove move = peer->Listen(lane);
    if (move.lost) return LoseSending(peer, lane, move);
  }
  peer->NoteWritable(lane);
  MarkDirty(peer);
}

void Connections::MarkReadable(Peer* peer, size_t lane) {
  if (!peer->readable[lane]) readable_.emplace_back(peer, lane);
  peer->readable[lane] = true;
}

bool Connections::Receive() {
  bool more = false;
  std::vector<std::pair<Peer*, size_t>> lanes;
  lanes.swap(readable_);
  for (const auto& [peer, lane] : lanes) {
    peer->readable[lane] = false;
    if (peer->lost()) continue;
    const LaneMove move = peer->Receive(lane, &arrivals_, &news_);
    if (move.lack != 0) {
      NoteLack(peer, move.lack);
      continue;
    }
    if (move.lost) {
      Lose(peer, move.cause + " " + plan_.Name(peer->rank()));
      continue;
    }
    MarkDirty(peer);
    if (move.more) MarkReadable(peer, lane);
    more |= move.more;
  }
  return more;
}

// ---- sending ----

void Connections::MarkDirty(Peer* peer) {
  if (!std::exchange(peer->dirty, true)) dirty_.push_back(peer);
}

bool Connections::FlushDirty() {
  bool more = false;
  flushed_.clear();
  flushed_.swap(dirty_);
  for (Peer* peer : flushed_) {
    peer->dirty = false;
    const bool stopped = !peer->lost() && Flush(peer);
    if (stopped) MarkDirty(peer);
    more |= stopped;
    news_ |= peer->exchange().TakeNews();
    Count(peer);
  }
  return more;
}

bool Connections::Flush(Peer* peer) {
  if (peer->rank() == plan_.rank) {
    peer->MoveWithin();
    return false;
  }
  if (!FlushControl(peer)) return false;
  CallData(peer);
  return peer->SendPieces([&](size_t lane, const LaneMove& move)
                              RT_NO_THREAD_SAFETY { LoseSending(peer, lane, move); });
}

// False if the peer has been lost.
bool Connections::FlushControl(Peer* peer) {
  if (!peer->SendsOn(0)) {
    if (peer->HasControl() && peer->CallsControl()) door_.Call(peer->rank(), 0);
    return true;
  }
  LaneMove move;
  unsent_.fetch_sub(peer->SendControl(&move));
  if (move.lost) LoseSending(peer, 0, move);
  return !move.lost;
}

void Connections::CallData(Peer* peer) {
  if (!peer->exchange().sends() || abandoned_) return;
  peer->LookAtLine();
  if (!peer->CallsMore()) return;
  if (peer->CallsControl()) door_.Call(peer->rank(), 0);  // on which this rank will leave
  while (peer->CallsMore()) door_.Call(peer->rank(), peer->NextToCall());
}

// ---- lines ----

double Connections::LongestRoundTrip() {
  double longest = 0;
  {
    MutexLock lock(mutex_);
    for (const auto& peer : peers_) longest = std::max(longest, peer->RoundTrip());
  }
  Release();
  return longest;
}

std::string Connections::Lines() {
  std::string text;
  {
    MutexLock lock(mutex_);
    for (const auto& peer : peers_)
      if (peer->measured()) text += peer->LineText();
  }
  Release();
  return text;
}

void Connections::Count(Peer* peer) {
  const bool engaged = !peer->lost() && (peer->unsent() > 0 || peer->exchange().bulky());
  engaged_ += int{engaged} - int{peer->engaged};
  peer->engaged = engaged;
}

// ---- orders ----

void Connections::SendFrame(int to, std::string frame) {
  if (to == plan_.rank) return arrivals_.Put(to, std::move(frame));
  unsent_.fetch_add(1);
  orders_.Give({Order::kFrame, to, std::move(frame), nullptr, Connection()});
  Attend(false);
}

void Connections::Start(Message* message) {
  orders_.Give({Order::kMessage, message->peer, "", message, Connection()});
  Attend(false);
}

void Connections::Opened(Connection connection) {
  orders_.Give({Order::kConnection, 0, "", nullptr, std::move(connection)});
  Attend(true);
}

void Connections::Unreachable(int peer, std::string cause) {
  orders_.Give({Order::kUnreachable, peer, std::move(cause), nullptr, Connection()});
  Attend(true);
}

void Connections::Notice(std::string line) {
  Log* const log = log_.load();
  if (log != nullptr) log->Warning(line);
}

void Connections::TakeOrders() {
  for (Order& order : orders_.TakeAll()) Obey(&order);
}

void Connections::Obey(Order* order) {
  if (order->kind == Order::kConnection) return AddLane(std::move(order->connection));
  Peer* const peer = peers_[static_cast<size_t>(order->peer)].get();
  if (order->kind == Order::kUnreachable) return Lose(peer, order->text);
  if (order->kind == Order::kFrame) {
    if (peer->lost() || peer->left()) {
      unsent_.fetch_sub(1);
      return;
    }
    peer->AddFrame(std::move(order->text));
  } else {
    if (peer->lost() || abandoned_) return;
    if (order->message->receives)
      peer->exchange().StartReceive(order->message);
    else
      peer->exchange().StartSend(order->message);
  }
  MarkDirty(peer);
}

void Connections::AddLane(Connection connection) {
  const bool sends = static_cast<int>(connection.claim.from) == plan_.rank;
  Peer* const peer = peers_[sends ? connection.claim.to : connection.claim.from].get();
  const size_t lane = connection.claim.lane;
  const bool taken = !sends && peer->ReceivesOn(lane);  // to send on it is called once
  if (peer->lost() || taken) return;
  if (abandoned_ && lane > 0) return peer->KeepSilent(std::move(connection.socket));
  epoll_event event{};
  event.events = sends ? EPOLLOUT | EPOLLIN | EPOLLRDHUP | EPOLLET : EPOLLIN | EPOLLRDHUP | EPOLLET;
  event.data.u64 = IdOf(peer->rank(), sends, lane);
  if (epoll_ctl(events_.fd(), EPOLL_CTL_ADD, connection.socket.fd(), &event) != 0) {
    NoteLack(peer, errno);
    return peer->KeepSilent(std::move(connection.socket));  // its end would be told as that of this process
  }
  peer->AddLane(std::move(connection), sends);
  MarkDirty(peer);
}

// ---- the end of a peer, of messages, of all ----

// What it sent before is taken first. If it has left, some of that may be on its way still, on other connections, which
// end behind it.
void Connections::Lose(Peer* peer, const std::string& cause, bool loses_large) {
  if (peer->lost()) return;
  peer->TakeRest(&arrivals_, &news_);
  unsent_.fetch_sub(peer->StopSending());
  if (peer->AwaitsLast()) return;
  peer->Lose();
  news_ = true;
  MarkDirty(peer);  // to be counted
  if (!peer->left()) arrivals_.PutLost({peer->rank(), cause, loses_large});
}

// A lane on which this rank sends.
void Connections::LoseSending(Peer* peer, size_t lane, const LaneMove& move) {
  if (move.lack != 0) return NoteLack(peer, move.lack);
  const bool loses_large =
      move.timed_out && LosesLarge(peer->SinceAnswer(lane), peer->SinceAnswerBeside(lane), plan_.dead_after_seconds);
  Lose(peer, move.cause + " " + plan_.Name(peer->rank(), static_cast<int>(lane)), loses_large);
}

// Gives back the lock that was taken without leaving word.
void Connections::Release() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (left_word_.load(std::memory_order_seq_cst)) door_.Wake();
}

// The lanes for data stay open, so that no peer takes it for the end of this rank; nothing is read or written there.
void Connections::Abandon() {
  {
    MutexLock lock(mutex_);
    abandoned_ = true;
    for (const auto& peer : peers_) {
      peer->Abandon();
      Count(peer.get());
    }
    TakeOrders();
  }
  Release();
}

void Connections::SetDoorbell(Doorbell* doorbell) {
  {
    MutexLock lock(mutex_);
    doorbell_ = doorbell;
  }
  Release();
}

void Connections::Close(bool leaves, Nanoseconds deadline) {
  door_.Stop();
  if (watcher_.joinable()) watcher_.join();
  MutexLock lock(mutex_);
  try {
    for (const auto& peer : peers_)
      if (leaves) peer->SayLeave();  // on connections of which some may end before others
  } catch (const std::bad_alloc&) {  // to whom it has not said so it is lost
  }
  for (const auto& peer : peers_) peer->AwaitKernel(deadline);  // another connection's end must not overtake it
  doorbell_ = nullptr;
  peers_.clear();
  dirty_.clear();
  readable_.clear();
}

}  // namespace ringtrain
