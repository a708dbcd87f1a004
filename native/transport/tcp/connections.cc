#include "transport/tcp/connections.h"

#include <errno.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <time.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <new>

#include "base/threads.h"

namespace ringtrain {
namespace {

constexpr size_t kAheadAlone = 1 << 20;  // bytes that a data lane takes; of several each takes a piece
constexpr Nanoseconds kBetweenLooks = INT64_C(100000000);  // at a line that something is sent on

// What an event of the epoll set belongs to.
uint64_t IdOf(int peer, bool sends, size_t lane) {
  return static_cast<uint64_t>(peer) << 9 | uint64_t{sends} << 8 | lane;
}

void SleepBriefly() {
  const timespec pause = {0, 100000};
  nanosleep(&pause, nullptr);
}

// Not yet acknowledged by the peer's kernel.
int BytesUnderWay(int descriptor) {
  // Of a connection that is gone the kernel goes on counting what was never confirmed.
  tcp_info info{};
  socklen_t length = sizeof info;
  if (getsockopt(descriptor, IPPROTO_TCP, TCP_INFO, &info, &length) != 0 || info.tcpi_state == TCP_CLOSE) return 0;
  int bytes = 0;
  return ioctl(descriptor, SIOCOUTQ, &bytes) == 0 ? bytes : 0;
}

// Keeps the sockets of lanes and forgets what they were in the middle of.
template <typename Lane>
void Silence(std::vector<std::unique_ptr<Lane>>* lanes, std::vector<Socket>* sockets) {
  for (auto& lane : *lanes) {
    if (lane != nullptr) sockets->push_back(std::move(lane->socket()));
    lane.reset();
  }
}

}  // namespace

// Another rank, or this one: what travels between the two, and the lanes for it.
struct Connections::Peer {
  Peer(int number, uint64_t epoch, size_t lanes_out, size_t lanes_in)
      : rank(number), exchange(epoch), data_out(lanes_out), data_in(lanes_in), readable(lanes_in + 1) {
    silent.reserve(lanes_out + lanes_in + 2);
  }

  const int rank;
  Exchange exchange;
  std::deque<std::string> frames;  // to be sent once there is a lane
  int unsent = 0;                  // frames that are not yet in the kernel's hands
  FrameJoiner joiner;
  std::unique_ptr<ControlSender> control_out;
  std::unique_ptr<ControlReceiver> control_in;
  std::vector<std::unique_ptr<PieceSender>> data_out;  // by lane, from 1; those that it needs are called
  Line line;                                           // that these lie on
  size_t used = 0;                                     // how many of them, from the first
  uint32_t piece_bytes = Exchange::kPieceBytes;
  Nanoseconds look_again = 0;
  size_t turn = 0;                                      // of which of these it is
  std::vector<std::unique_ptr<PieceReceiver>> data_in;  // likewise
  std::vector<Socket> silent;                           // of data lanes that carry nothing any more
  std::vector<bool> readable;                           // by lane, from 0: stands in readable_
  bool dirty = false;                                   // stands in dirty_
  bool engaged = false;                                 // counts in engaged_
  bool called_control = false;
  size_t called_data = 0;  // how many lanes
  bool left = false;       // it has said so: the end of its connections is no loss
  bool lost = false;
};

Connections::Connections(const TcpPlan& plan, std::vector<Socket> listeners)
    : plan_(plan), door_(plan_, std::move(listeners), this) {
  for (int rank = 0; rank < plan_.size(); ++rank)
    peers_.push_back(std::make_unique<Peer>(rank, plan_.epoch, static_cast<size_t>(plan_.lanes(rank)),
                                            static_cast<size_t>(plan_.lanes(plan_.rank))));
  for (const auto& peer : peers_)
    peer->used = static_cast<size_t>(plan_.links(peer->rank) * std::max(plan_.streams, 1));
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
  if (peer->lost) return;
  if (!sends) return SignalIn(peer, lane, (events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0);
  const bool control = lane == 0;
  if (control ? peer->control_out == nullptr : peer->data_out[lane - 1] == nullptr) return;  // silent, or it has left
  if ((events & ~uint32_t{EPOLLOUT}) != 0) {
    const LaneMove move = control ? peer->control_out->Listen(&peer->left) : peer->data_out[lane - 1]->Listen();
    if (move.lost) return LoseSending(peer, lane, move);
  }
  (control ? peer->control_out->writable : peer->data_out[lane - 1]->writable) = true;
  MarkDirty(peer);
}

// The end of a connection may be told together with its last bytes, and is not told again.
void Connections::SignalIn(Peer* peer, size_t lane, bool ended) {
  if (!peer->readable[lane]) readable_.emplace_back(peer, lane);
  peer->readable[lane] = true;
  if (!ended) return;
  if (lane == 0 && peer->control_in != nullptr) peer->control_in->ended = true;
  if (lane > 0 && peer->data_in[lane - 1] != nullptr) peer->data_in[lane - 1]->ended = true;
}

bool Connections::Receive() {
  bool more = false;
  std::vector<std::pair<Peer*, size_t>> lanes;
  lanes.swap(readable_);
  for (const auto& [peer, lane] : lanes) {
    peer->readable[lane] = false;
    if (peer->lost) continue;
    const LaneMove move = MoveIn(peer, lane);
    if (move.lack != 0) {
      NoteLack(peer, move.lack);
      continue;
    }
    if (move.lost) {
      if (lane > 0) peer->data_in[lane - 1].reset();
      Lose(peer, move.cause + " " + plan_.Name(peer->rank));
      continue;
    }
    MarkDirty(peer);
    if (!move.more) continue;
    more = peer->readable[lane] = true;
    readable_.emplace_back(peer, lane);
  }
  return more;
}

LaneMove Connections::MoveIn(Peer* peer, size_t lane) {
  if (lane > 0) return peer->data_in[lane - 1] != nullptr ? peer->data_in[lane - 1]->Move() : LaneMove();
  if (peer->control_in == nullptr) return {};
  std::vector<ControlReceiver::Record> records;
  LaneMove move = peer->control_in->Move(&records);
  for (const ControlReceiver::Record& record : records) {
    const char* fault = TakeControl(peer, record.header, record.payload);
    if (fault != nullptr) return LaneMove::Fault(fault);
  }
  return move;
}

const char* Connections::TakeControl(Peer* peer, const RecordHeader& header, const std::string& payload) {
  if (header.type == RecordType::kLeave) peer->left = true;
  if (header.type == RecordType::kLeave) return nullptr;
  if (header.type != RecordType::kFrame) return peer->exchange.HearControl(header);
  std::string frame;
  bool whole = false;
  if (header.epoch != plan_.epoch || !peer->joiner.Add(header, payload, &frame, &whole)) return "cannot be read";
  if (!whole) return nullptr;
  PutFrame(peer->rank, std::move(frame));
  news_ = true;
  return nullptr;
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
    const bool stopped = !peer->lost && Flush(peer);
    if (stopped) MarkDirty(peer);
    more |= stopped;
    news_ |= peer->exchange.TakeNews();
    Count(peer);
  }
  return more;
}

bool Connections::Flush(Peer* peer) {
  if (peer->rank == plan_.rank) {
    FlushSelf(peer);
    return false;
  }
  if (!FlushControl(peer)) return false;
  CallData(peer);
  // Where there are several a piece each in turn: of what the first has room for, the others would get nothing. The
  // next time begins behind the lane of the last piece, or the first would have more of each message.
  const size_t lanes = std::max(peer->used, peer->called_data),
               most = lanes > 1 ? peer->piece_bytes : PieceSender::kBytesInTurn;
  bool more = true;
  for (size_t moved = 0; more && moved < PieceSender::kBytesInTurn; moved += most) {
    more = false;
    for (size_t i = 0, first = peer->turn; i < lanes && !peer->lost; ++i) {
      const size_t lane = (first + i) % lanes;
      if (peer->exchange.sends()) peer->turn = (lane + 1) % lanes;
      PieceSender* const sender = peer->data_out[lane].get();
      const LaneMove move = sender != nullptr ? sender->Move(most) : LaneMove();
      if (move.lost) LoseSending(peer, lane + 1, move);
      more |= move.more;
    }
  }
  return more && !peer->lost;
}

// False if the peer has been lost.
bool Connections::FlushControl(Peer* peer) {
  if (peer->control_out == nullptr) {
    if ((peer->unsent > 0 || peer->exchange.has_control()) && !std::exchange(peer->called_control, true))
      door_.Call(peer->rank, 0);
    return true;
  }
  ControlSender& sender = *peer->control_out;
  for (RecordHeader header; peer->exchange.NextControl(&header);) sender.Add(header, "");
  for (; !peer->frames.empty(); peer->frames.pop_front())
    CutFrame(peer->frames.front(), plan_.epoch,
             [&](const RecordHeader& header, const char* payload) { sender.Add(header, payload); });
  const LaneMove move = sender.Move();
  if (move.lost) {
    LoseSending(peer, 0, move);
    return false;
  }
  if (sender.empty()) unsent_.fetch_sub(std::exchange(peer->unsent, 0));
  return true;
}

void Connections::CallData(Peer* peer) {
  if (!peer->exchange.sends() || abandoned_) return;
  LookAtLine(peer);
  if (peer->called_data >= peer->used) return;
  if (!std::exchange(peer->called_control, true)) door_.Call(peer->rank, 0);  // on which this rank will leave
  while (peer->called_data < peer->used) door_.Call(peer->rank, static_cast<int>(++peer->called_data));
}

// ---- lines ----

// Measures the way to the peer from time to time, and gives it the connections that it needs.
void Connections::LookAtLine(Peer* peer) {
  const bool any =
      std::any_of(peer->data_out.begin(), peer->data_out.end(), [](const auto& lane) { return lane != nullptr; });
  const Nanoseconds now = Now();
  if (!any || now < peer->look_again) return;
  peer->look_again = now + kBetweenLooks;
  LineSample sample;
  std::string congestion;
  for (const auto& lane : peer->data_out) {
    if (lane == nullptr) continue;
    sample.Add(SampleOf(lane->socket()));
    if (congestion.empty()) congestion = CongestionControlOf(lane->socket());
  }
  peer->line.Note(sample, congestion);
  const int streams = plan_.streams > 0 ? plan_.streams : peer->line.streams();
  const size_t used = static_cast<size_t>(plan_.links(peer->rank) * streams);
  if (peer->line.is_long()) peer->exchange.NoteFar();
  const uint32_t piece_bytes = peer->line.PieceBytes(streams);
  if (used == peer->used && piece_bytes == peer->piece_bytes) return;
  peer->used = used;
  peer->piece_bytes = piece_bytes;
  peer->exchange.CutInto(piece_bytes);
  for (size_t place = 0; place < peer->data_out.size(); ++place) Tune(peer, place);
}

// Of several lanes each takes little ahead, so that the others get what it cannot send. Those that are not needed any
// more take nothing, and send what they have.
void Connections::Tune(Peer* peer, size_t place) {
  PieceSender* const lane = peer->data_out[place].get();
  if (lane == nullptr) return;
  const bool several = peer->used > 1;
  KeepLittleUnsent(lane->socket(), several ? 2 * static_cast<int>(peer->piece_bytes) : 0);
  lane->TakeAhead(place >= peer->used ? 0 : several ? peer->piece_bytes : kAheadAlone);
}

// The first lane has just been opened, and its kernel knows how long that took.
void Connections::ControlCongestion(const Peer& peer, const Socket& socket) const {
  const bool is_long = SampleOf(socket).round_trip >= kLongRoundTrip || peer.line.is_long();
  if (is_long) Pace(socket);
  if (plan_.congestion == "kernel") return;
  if (plan_.congestion != "auto")
    TakeCongestionControl(socket, plan_.congestion);
  else if (is_long)
    TakeCongestionControl(socket, "bbr");
}

double Connections::LongestRoundTrip() {
  double longest = 0;
  {
    MutexLock lock(mutex_);
    for (const auto& peer : peers_) {
      LineSample sample;
      if (peer->control_out != nullptr) sample.Add(SampleOf(peer->control_out->socket()));
      if (peer->control_in != nullptr) sample.Add(SampleOf(peer->control_in->socket()));
      longest = std::max(longest, sample.round_trip);
    }
  }
  Release();
  return longest;
}

std::string Connections::Lines() {
  std::string text;
  {
    MutexLock lock(mutex_);
    for (const auto& peer : peers_)
      if (peer->line.round_trip() > 0) text += LineText(*peer);
  }
  Release();
  return text;
}

std::string Connections::LineText(const Peer& peer) const {
  const size_t streams = peer.used / static_cast<size_t>(plan_.links(peer.rank));
  return std::to_string(peer.rank) + "|" + std::to_string(streams) + "|" + peer.line.congestion() + "|" +
         peer.line.Text() + "\n";
}

// What a rank sends to itself.
void Connections::FlushSelf(Peer* peer) {
  Exchange& exchange = peer->exchange;
  Piece piece;
  for (bool moved = true; moved;) {
    moved = false;
    for (RecordHeader header; exchange.NextControl(&header); moved = true) exchange.HearControl(header);
    while (exchange.NextPiece(&piece)) {
      moved = true;
      char* memory = nullptr;
      exchange.Place(piece.header, &memory);
      if (memory != nullptr && piece.header.length > 0) std::memcpy(memory, piece.data, piece.header.length);
      exchange.PieceArrived(piece.header);
      exchange.PieceLeft(piece);
    }
  }
}

void Connections::Count(Peer* peer) {
  const bool engaged = !peer->lost && (peer->unsent > 0 || peer->exchange.bulky());
  engaged_ += int{engaged} - int{peer->engaged};
  peer->engaged = engaged;
}

// ---- orders ----

void Connections::Give(Order order) {
  MutexLock lock(orders_mutex_);
  orders_.push_back(std::move(order));
}

void Connections::SendFrame(int to, std::string frame) {
  if (to == plan_.rank) return PutFrame(to, std::move(frame));
  unsent_.fetch_add(1);
  Give({Order::kFrame, to, std::move(frame), nullptr, Connection()});
  Attend(false);
}

void Connections::Start(Message* message) {
  Give({Order::kMessage, message->peer, "", message, Connection()});
  Attend(false);
}

void Connections::Opened(Connection connection) {
  Give({Order::kConnection, 0, "", nullptr, std::move(connection)});
  Attend(true);
}

void Connections::Unreachable(int peer, std::string cause) {
  Give({Order::kUnreachable, peer, std::move(cause), nullptr, Connection()});
  Attend(true);
}

void Connections::Notice(std::string line) {
  Log* const log = log_.load();
  if (log != nullptr) log->Warning(line);
}

void Connections::TakeOrders() {
  std::vector<Order> orders;
  {
    MutexLock lock(orders_mutex_);
    orders.swap(orders_);
  }
  for (Order& order : orders) Obey(&order);
}

void Connections::Obey(Order* order) {
  if (order->kind == Order::kConnection) return AddLane(std::move(order->connection));
  Peer* const peer = peers_[static_cast<size_t>(order->peer)].get();
  if (order->kind == Order::kUnreachable) return Lose(peer, order->text);
  if (order->kind == Order::kFrame) {
    if (peer->lost || peer->left) {
      unsent_.fetch_sub(1);
      return;
    }
    peer->frames.push_back(std::move(order->text));
    ++peer->unsent;
  } else {
    if (peer->lost || abandoned_) return;
    if (order->message->receives)
      peer->exchange.StartReceive(order->message);
    else
      peer->exchange.StartSend(order->message);
  }
  MarkDirty(peer);
}

void Connections::AddLane(Connection connection) {
  const bool sends = static_cast<int>(connection.claim.from) == plan_.rank;
  Peer* const peer = peers_[sends ? connection.claim.to : connection.claim.from].get();
  const size_t lane = connection.claim.lane;
  const bool taken = sends       ? false  // called once
                     : lane == 0 ? peer->control_in != nullptr
                                 : peer->data_in[lane - 1] != nullptr;
  if (peer->lost || taken) return;
  if (abandoned_ && lane > 0) return peer->silent.push_back(std::move(connection.socket));
  epoll_event event{};
  event.events = sends ? EPOLLOUT | EPOLLIN | EPOLLRDHUP | EPOLLET : EPOLLIN | EPOLLRDHUP | EPOLLET;
  event.data.u64 = IdOf(peer->rank, sends, lane);
  Socket& socket = connection.socket;
  if (epoll_ctl(events_.fd(), EPOLL_CTL_ADD, socket.fd(), &event) != 0) {
    NoteLack(peer, errno);
    return peer->silent.push_back(std::move(socket));  // its end would be told as that of this process
  }
  if (sends && lane > 0) ControlCongestion(*peer, socket);
  if (lane == 0 && sends)
    peer->control_out = std::make_unique<ControlSender>(std::move(socket), connection.record_key);
  else if (lane == 0)
    peer->control_in = std::make_unique<ControlReceiver>(std::move(socket), connection.record_key);
  else if (sends)
    AddSender(peer, lane, std::move(socket));
  else
    peer->data_in[lane - 1] = std::make_unique<PieceReceiver>(std::move(socket), &peer->exchange);
  MarkDirty(peer);
}

void Connections::AddSender(Peer* peer, size_t lane, Socket socket) {
  auto& sender = peer->data_out[lane - 1];
  sender = std::make_unique<PieceSender>(std::move(socket), &peer->exchange, kAheadAlone);
  peer->look_again = 0;
  LookAtLine(peer);
  Tune(peer, lane - 1);
}

// ---- what has come ----

void Connections::PutFrame(int from, std::string frame) {
  MutexLock lock(arrived_mutex_);
  frames_.emplace_back(from, std::move(frame));
  arrived_.fetch_add(1, std::memory_order_release);
}

bool Connections::TakeFrame(int* from, std::string* frame) {
  if (arrived_.load(std::memory_order_acquire) == 0) return false;
  MutexLock lock(arrived_mutex_);
  if (frames_.empty()) return false;
  *from = frames_.front().first;
  *frame = std::move(frames_.front().second);
  frames_.pop_front();
  arrived_.fetch_sub(1);
  return true;
}

// After the last of its frames.
bool Connections::TakeLost(LostPeer* told) {
  if (!any_lost_.load(std::memory_order_acquire)) return false;
  MutexLock lock(arrived_mutex_);
  for (auto lost = lost_.begin(); lost != lost_.end(); ++lost) {
    bool heard = true;
    for (const auto& frame : frames_) heard &= frame.first != lost->rank;
    if (!heard) continue;
    *told = std::move(*lost);
    lost_.erase(lost);
    any_lost_.store(!lost_.empty());
    return true;
  }
  return false;
}

// ---- the end of a peer, of messages, of all ----

// What it sent before is taken first. If it has left, some of that may be on its way still, on other connections, which
// end behind it.
void Connections::Lose(Peer* peer, const std::string& cause, bool loses_large) {
  if (peer->lost) return;
  for (LaneMove move = {true, false, "", false, 0}; peer->control_in != nullptr && move.more;) {
    move = MoveIn(peer, 0);
    if (move.lost) peer->control_in.reset();
  }
  if (peer->control_out != nullptr) peer->control_out->Listen(&peer->left);
  StopSending(peer);
  const bool sends_still =
      std::any_of(peer->data_in.begin(), peer->data_in.end(), [](const auto& lane) { return lane != nullptr; });
  if (peer->left && (peer->control_in != nullptr || (sends_still && peer->exchange.receives()))) return;
  peer->lost = true;
  peer->exchange.Abandon();
  peer->control_in.reset();
  for (auto& lane : peer->data_in) lane.reset();
  peer->silent.clear();
  news_ = true;
  MarkDirty(peer);  // to be counted
  if (peer->left) return;
  MutexLock lock(arrived_mutex_);
  lost_.push_back({peer->rank, cause, loses_large});
  any_lost_.store(true, std::memory_order_release);
}

// A lane on which this rank sends.
void Connections::LoseSending(Peer* peer, size_t lane, const LaneMove& move) {
  if (move.lack != 0) return NoteLack(peer, move.lack);
  const bool loses_large =
      move.timed_out && LosesLarge(SinceAnswer(*peer, lane), SinceAnswerBeside(*peer, lane), plan_.dead_after_seconds);
  Lose(peer, move.cause + " " + plan_.Name(peer->rank, static_cast<int>(lane)), loses_large);
}

double Connections::SinceAnswer(const Peer& peer, size_t lane) {
  return SecondsSinceAnswer(lane == 0 ? peer.control_out->socket() : peer.data_out[lane - 1]->socket());
}

// Over the same link: another one's packets have a way of their own.
double Connections::SinceAnswerBeside(const Peer& peer, size_t lane) const {
  const int rank = peer.rank;
  const Address& address = plan_.peers[static_cast<size_t>(rank)][plan_.link(rank, static_cast<int>(lane))];
  double seconds = std::numeric_limits<double>::infinity();
  const auto hear = [&](const auto& other) {
    if (other != nullptr && PeerOf(other->socket()).IsSameHost(address))
      seconds = std::min(seconds, SecondsSinceAnswer(other->socket()));
  };
  if (lane > 0) hear(peer.control_out);
  hear(peer.control_in);
  for (size_t other = 1; other <= peer.data_out.size(); ++other)
    if (other != lane) hear(peer.data_out[other - 1]);
  for (const auto& other : peer.data_in) hear(other);
  return seconds;
}

void Connections::StopSending(Peer* peer) {
  peer->frames.clear();
  unsent_.fetch_sub(std::exchange(peer->unsent, 0));
  peer->control_out.reset();
  for (auto& lane : peer->data_out) lane.reset();
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
      peer->exchange.Abandon();
      Silence(&peer->data_out, &peer->silent);
      Silence(&peer->data_in, &peer->silent);
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

// Says so to all, on connections of which some may end before others.
void Connections::Leave() {
  for (const auto& peer : peers_) {
    if (peer->control_in != nullptr) peer->control_in->SayLeave();
    if (peer->control_out == nullptr || !peer->control_out->empty()) continue;
    RecordHeader header;
    header.type = RecordType::kLeave;
    header.epoch = plan_.epoch;
    peer->control_out->Add(header, "");
    peer->control_out->Move();
  }
}

// Until the others' kernels have what was said: another connection's end must not overtake it.
void Connections::AwaitKernels(Nanoseconds deadline) {
  const auto await = [&](const Socket& socket) {
    while (BytesUnderWay(socket.fd()) > 0 && Now() < deadline) SleepBriefly();
  };
  for (const auto& peer : peers_) {
    if (peer->control_in != nullptr) await(peer->control_in->socket());
    if (peer->control_out != nullptr && peer->control_out->empty()) await(peer->control_out->socket());
  }
}

void Connections::Close(bool leaves, Nanoseconds deadline) {
  door_.Stop();
  if (watcher_.joinable()) watcher_.join();
  MutexLock lock(mutex_);
  try {
    if (leaves) Leave();
  } catch (const std::bad_alloc&) {  // to whom it has not said so it is lost
  }
  AwaitKernels(deadline);
  doorbell_ = nullptr;
  peers_.clear();
  dirty_.clear();
  readable_.clear();
}

}  // namespace ringtrain
