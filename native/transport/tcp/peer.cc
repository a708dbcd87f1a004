#include "transport/tcp/peer.h"

#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>

#include <cstring>
#include <limits>

#include "base/threads.h"

namespace ringtrain {
namespace {

constexpr size_t kAheadAlone = 1 << 20;  // bytes that a data lane takes; of several each takes a piece
constexpr Nanoseconds kBetweenLooks = INT64_C(100000000);  // at a line that something is sent on

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

template <typename Lane>
bool Any(const std::vector<std::unique_ptr<Lane>>& lanes) {
  return std::any_of(lanes.begin(), lanes.end(), [](const auto& lane) { return lane != nullptr; });
}

}  // namespace

Peer::Peer(const TcpPlan& plan, int rank)
    : plan_(plan),
      rank_(rank),
      exchange_(plan.epoch),
      data_out_(static_cast<size_t>(plan.lanes(rank))),
      used_(static_cast<size_t>(plan.links(rank) * std::max(plan.streams, 1))),
      data_in_(static_cast<size_t>(plan.lanes(plan.rank))) {
  readable.resize(data_in_.size() + 1);
  silent_.reserve(data_out_.size() + data_in_.size() + 2);
}

// ---- lanes ----

void Peer::AddLane(Connection connection, bool sends) {
  const size_t lane = connection.claim.lane;
  Socket& socket = connection.socket;
  if (sends && lane > 0) ControlCongestion(socket);
  if (lane == 0 && sends) {
    control_out_ = std::make_unique<ControlSender>(std::move(socket), connection.record_key);
  } else if (lane == 0) {
    control_in_ = std::make_unique<ControlReceiver>(std::move(socket), connection.record_key);
  } else if (sends) {
    data_out_[lane - 1] = std::make_unique<PieceSender>(std::move(socket), &exchange_, kAheadAlone);
    look_again_ = 0;
    LookAtLine();
    Tune(lane - 1);
  } else {
    data_in_[lane - 1] = std::make_unique<PieceReceiver>(std::move(socket), &exchange_);
  }
}

LaneMove Peer::Listen(size_t lane) { return lane == 0 ? control_out_->Listen(&left_) : data_out_[lane - 1]->Listen(); }

void Peer::NoteEnd(size_t lane) {
  if (lane == 0 && control_in_ != nullptr) control_in_->ended = true;
  if (lane > 0 && data_in_[lane - 1] != nullptr) data_in_[lane - 1]->ended = true;
}

// ---- what travels ----

void Peer::AddFrame(std::string frame) {
  frames_.push_back(std::move(frame));
  ++unsent_;
}

int Peer::SendControl(LaneMove* move) {
  ControlSender& sender = *control_out_;
  for (RecordHeader header; exchange_.NextControl(&header);) sender.Add(header, "");
  for (; !frames_.empty(); frames_.pop_front())
    CutFrame(frames_.front(), plan_.epoch,
             [&](const RecordHeader& header, const char* payload) { sender.Add(header, payload); });
  *move = sender.Move();
  return !move->lost && sender.empty() ? std::exchange(unsent_, 0) : 0;
}

void Peer::MoveWithin() {
  Piece piece;
  for (bool moved = true; moved;) {
    moved = false;
    for (RecordHeader header; exchange_.NextControl(&header); moved = true) exchange_.HearControl(header);
    while (exchange_.NextPiece(&piece)) {
      moved = true;
      char* memory = nullptr;
      exchange_.Place(piece.header, &memory);
      if (memory != nullptr && piece.header.length > 0) std::memcpy(memory, piece.data, piece.header.length);
      exchange_.PieceArrived(piece.header);
      exchange_.PieceLeft(piece);
    }
  }
}

LaneMove Peer::Receive(size_t lane, Arrivals* arrivals, bool* news) {
  if (!ReceivesOn(lane)) return {};
  if (lane > 0) {
    const LaneMove move = data_in_[lane - 1]->Move();
    if (move.lost && move.lack == 0) data_in_[lane - 1].reset();
    return move;
  }
  std::vector<ControlReceiver::Record> records;
  LaneMove move = control_in_->Move(&records);
  for (const ControlReceiver::Record& record : records) {
    const char* fault = TakeControl(record.header, record.payload, arrivals, news);
    if (fault != nullptr) return LaneMove::Fault(fault);
  }
  return move;
}

const char* Peer::TakeControl(const RecordHeader& header, const std::string& payload, Arrivals* arrivals, bool* news) {
  if (header.type == RecordType::kLeave) left_ = true;
  if (header.type == RecordType::kLeave) return nullptr;
  if (header.type != RecordType::kFrame) return exchange_.HearControl(header);
  std::string frame;
  bool whole = false;
  if (header.epoch != plan_.epoch || !joiner_.Add(header, payload, &frame, &whole)) return "cannot be read";
  if (!whole) return nullptr;
  arrivals->Put(rank_, std::move(frame));
  *news = true;
  return nullptr;
}

// ---- the line ----

void Peer::LookAtLine() {
  const Nanoseconds now = Now();
  if (!Any(data_out_) || now < look_again_) return;
  look_again_ = now + kBetweenLooks;
  LineSample sample;
  std::string congestion;
  for (const auto& lane : data_out_) {
    if (lane == nullptr) continue;
    sample.Add(SampleOf(lane->socket()));
    if (congestion.empty()) congestion = CongestionControlOf(lane->socket());
  }
  const bool was_long = line_.is_long();
  line_.Note(sample, congestion);
  if (line_.is_long() && !was_long)
    for (const auto& lane : data_out_)
      if (lane != nullptr) ControlCongestion(lane->socket());
  const int streams = plan_.streams > 0 ? plan_.streams : line_.streams();
  const size_t used = static_cast<size_t>(plan_.links(rank_)) * static_cast<size_t>(streams);
  if (line_.is_long()) exchange_.NoteFar();
  const uint32_t piece_bytes = line_.PieceBytes(streams);
  if (used == used_ && piece_bytes == piece_bytes_) return;
  used_ = used;
  piece_bytes_ = piece_bytes;
  exchange_.CutInto(piece_bytes);
  for (size_t place = 0; place < data_out_.size(); ++place) Tune(place);
}

// Of several lanes each takes little ahead, so that the others get what it cannot send. Those that are not needed any
// more take nothing, and send what they have.
void Peer::Tune(size_t place) {
  PieceSender* const lane = data_out_[place].get();
  if (lane == nullptr) return;
  const bool several = used_ > 1;
  KeepLittleUnsent(lane->socket(), several ? 2 * static_cast<int>(piece_bytes_) : 0);
  lane->TakeAhead(place >= used_ ? 0 : several ? piece_bytes_ : kAheadAlone);
}

// The first lane has just been opened, and its kernel knows how long that took.
void Peer::ControlCongestion(const Socket& socket) const {
  const bool is_long = SampleOf(socket).round_trip >= kLongRoundTrip || line_.is_long();
  if (is_long) Pace(socket);
  if (plan_.congestion == "kernel") return;
  if (plan_.congestion != "auto")
    TakeCongestionControl(socket, plan_.congestion);
  else if (is_long)
    TakeCongestionControl(socket, "bbr");
}

std::string Peer::LineText() const {
  const size_t streams = used_ / static_cast<size_t>(plan_.links(rank_));
  return std::to_string(rank_) + "|" + std::to_string(streams) + "|" + line_.congestion() + "|" + line_.Text() + "\n";
}

double Peer::RoundTrip() {
  LineSample sample;
  if (control_out_ != nullptr) sample.Add(SampleOf(control_out_->socket()));
  if (control_in_ != nullptr) sample.Add(SampleOf(control_in_->socket()));
  return sample.round_trip;
}

double Peer::SinceAnswer(size_t lane) const {
  return SecondsSinceAnswer(lane == 0 ? control_out_->socket() : data_out_[lane - 1]->socket());
}

// Over the same link: another one's packets have a way of their own.
double Peer::SinceAnswerBeside(size_t lane) const {
  const Address& address = plan_.peers[static_cast<size_t>(rank_)][plan_.link(rank_, static_cast<int>(lane))];
  double seconds = std::numeric_limits<double>::infinity();
  const auto hear = [&](const auto& other) {
    if (other != nullptr && PeerOf(other->socket()).IsSameHost(address))
      seconds = std::min(seconds, SecondsSinceAnswer(other->socket()));
  };
  if (lane > 0) hear(control_out_);
  hear(control_in_);
  for (size_t other = 1; other <= data_out_.size(); ++other)
    if (other != lane) hear(data_out_[other - 1]);
  for (const auto& other : data_in_) hear(other);
  return seconds;
}

// ---- the end ----

void Peer::TakeRest(Arrivals* arrivals, bool* news) {
  for (LaneMove move = {true, false, "", false, 0}; control_in_ != nullptr && move.more;) {
    move = Receive(0, arrivals, news);
    if (move.lost) control_in_.reset();
  }
  if (control_out_ != nullptr) control_out_->Listen(&left_);
}

int Peer::StopSending() {
  frames_.clear();
  control_out_.reset();
  for (auto& lane : data_out_) lane.reset();
  return std::exchange(unsent_, 0);
}

bool Peer::AwaitsLast() const { return left_ && (control_in_ != nullptr || (Any(data_in_) && exchange_.receives())); }

void Peer::Lose() {
  lost_ = true;
  exchange_.Abandon();
  control_in_.reset();
  for (auto& lane : data_in_) lane.reset();
  silent_.clear();
}

void Peer::Abandon() {
  exchange_.Abandon();
  Silence(&data_out_, &silent_);
  Silence(&data_in_, &silent_);
}

void Peer::SayLeave() {
  if (control_in_ != nullptr) control_in_->SayLeave();
  if (control_out_ == nullptr || !control_out_->empty()) return;
  RecordHeader header;
  header.type = RecordType::kLeave;
  header.epoch = plan_.epoch;
  control_out_->Add(header, "");
  control_out_->Move();
}

void Peer::AwaitKernel(Nanoseconds deadline) {
  const auto await = [&](const Socket& socket) {
    while (BytesUnderWay(socket.fd()) > 0 && Now() < deadline) SleepBriefly();
  };
  if (control_in_ != nullptr) await(control_in_->socket());
  if (control_out_ != nullptr && control_out_->empty()) await(control_out_->socket());
}

}  // namespace ringtrain
