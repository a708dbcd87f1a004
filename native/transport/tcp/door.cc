#include "transport/tcp/door.h"

#include <errno.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "transport/tcp/talk.h"

namespace ringtrain {
namespace {

constexpr Nanoseconds kRest = kSecond / 5;  // until it is tried again to let somebody in
constexpr int kAcceptsInTurn = 16;          // so that in a flood those who have come are served too

size_t DrawBelow(size_t end) {
  Nonce nonce{};
  if (!Draw(&nonce)) return 0;
  uint64_t number = 0;
  std::copy_n(nonce.begin(), sizeof number, reinterpret_cast<uint8_t*>(&number));
  return static_cast<size_t>(number % end);
}

// For so many at once that have not proven themselves; most of a process's descriptors are its own.
size_t RoomFor(int ranks) {
  rlimit limit{};
  const size_t descriptors = getrlimit(RLIMIT_NOFILE, &limit) == 0 ? limit.rlim_cur : 0;
  return std::min(std::max(Door::kVisitors, static_cast<size_t>(ranks)), std::max<size_t>(descriptors / 4, 64));
}

// Closes a connection so that the other end learns that it was cut short, and not refused.
void Reset(Socket* socket) {
  const linger at_once = {1, 0};
  setsockopt(socket->fd(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
  socket->Close();
}

}  // namespace

// Whoever has come and has not proven himself.
struct Door::Visitor {
  uint32_t number;
  Socket socket;
  std::string from;
  HelloAnswerer hello;
  Nanoseconds came;

  Nanoseconds deadline() const { return came + static_cast<Nanoseconds>(kVisitSeconds * kSecond); }
};

Door::Door(const TcpPlan& plan, std::vector<Socket> listeners, Owner* owner)
    : plan_(plan), listeners_(std::move(listeners)), owner_(owner), calls_(plan, poll_, owner) {}
Door::~Door() = default;

Status Door::Open(const Socket& watched) {
  room_ = RoomFor(plan_.size());
  watched_ = watched.fd();
  wake_ = Socket::Made([] { return eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); });
  bool open = watched.open() && poll_.Open() && wake_.open() && poll_.Add(wake_.fd(), EPOLLIN, Source::kWake) &&
              poll_.Add(watched_, EPOLLONESHOT, Source::kWatched);
  for (size_t i = 0; i < listeners_.size(); ++i)
    open = open && poll_.Add(listeners_[i].fd(), EPOLLIN, Source::kListener, static_cast<uint32_t>(i));
  if (open) return {};
  return Status::Internal(
      "init over TCP: this process must be able to wait for its connections, but cannot: " + ErrorText(errno) +
      ". Raise its limits of open files (ulimit -n) and watches (fs.epoll.max_user_watches).");
}

// ---- any thread ----

void Door::Call(int peer, int lane) {
  {
    MutexLock lock(mutex_);
    wanted_.emplace_back(peer, lane);
  }
  Wake();
}

void Door::Watch() { poll_.Change(watched_, EPOLLIN | EPOLLONESHOT, Source::kWatched); }

void Door::Wake() {
  const uint64_t one = 1;
  Uninterrupted([&] { return write(wake_.fd(), &one, sizeof one); });  // full: it is awake
}

void Door::Stop() {
  stop_.store(true);
  Wake();
}

// ---- its thread ----

bool Door::Wait(bool* watched) {
  *watched = false;
  for (bool due = false; !due && !stop_.load();) {
    Poll::Event events[Poll::kMostEvents];
    const int count = poll_.Wait(NextTimeout(), events);
    for (int i = 0; i < count; ++i)
      *watched |= events[i].source == Source::kWatched;  // which is told once, whatever the others throw
    for (int i = 0; i < count; ++i) {
      const auto [source, number] = events[i];
      if (source == Source::kWake) {
        uint64_t times = 0;
        [[maybe_unused]] const ssize_t taken = read(wake_.fd(), &times, sizeof times);
        TakeWanted();
      }
      due |= source == Source::kWake || source == Source::kWatched;
      if (source == Source::kListener) Accept(listeners_[number]);
      if (source == Source::kVisitor) ServeVisitor(number);
      if (source == Source::kCall) calls_.Serve(number);
    }
    ServeDeadlines();
  }
  if (!stop_.load()) return true;
  TellOfStrangers(true);
  return false;
}

// Milliseconds until something is to be done without an event; -1: never.
int Door::NextTimeout() const {
  Nanoseconds next = std::min({listen_again_, strangers_.due(), calls_.due()});
  if (!visitors_.empty()) next = std::min(next, visitors_.front().deadline());
  if (next == kNever) return -1;
  return static_cast<int>(std::clamp<Nanoseconds>((next - Now()) / 1000000 + 1, 0, 3600000));
}

void Door::ServeDeadlines() {
  const Nanoseconds now = Now();
  while (!visitors_.empty() && visitors_.front().deadline() <= now) TooLate(visitors_.begin());
  TellOfStrangers(false);
  if (listen_again_ <= now) Listen();
  calls_.ServeDeadlines(now);
}

void Door::TakeWanted() {
  std::vector<std::pair<int, int>> wanted;
  {
    MutexLock lock(mutex_);
    wanted.swap(wanted_);
  }
  for (const auto& [peer, lane] : wanted) calls_.Call(peer, lane);
}

// ---- those who come ----

void Door::Accept(const Socket& listener) {
  for (int count = 0; count < kAcceptsInTurn && !is_full_; ++count) {
    Socket socket =
        Socket::Made([&] { return accept4(listener.fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC); });
    if (!socket.open() && (errno == EINTR || errno == ECONNABORTED)) continue;
    if (!socket.open() && errno == EAGAIN) return;
    Nonce nonce;
    const uint32_t number = next_number_++;
    if (!socket.open() || !Draw(&nonce) || !poll_.Add(socket.fd(), EPOLLIN, Source::kVisitor, number))
      return Rest(errno);
    const std::string from = PeerOf(socket).Text();
    visitors_.push_back(
        {number, std::move(socket), from,
         HelloAnswerer(plan_.hello_key, static_cast<uint32_t>(plan_.rank), static_cast<uint32_t>(plan_.size()),
                       plan_.epoch, plan_.lanes(plan_.rank), nonce),
         Now()});
    if (visitors_.size() > room_) MakeRoom();
  }
}

// Where all who are there are too young to go, nobody else is let in meanwhile: the ranks of a large world come all at
// once, and each that lost its place would come again and take that of another.
void Door::MakeRoom() {
  const Nanoseconds now = Now();
  const auto young = std::find_if(visitors_.begin(), visitors_.end(),
                                  [&](const Visitor& each) { return now - each.came < kLeastVisit; });
  const auto old = static_cast<size_t>(std::distance(visitors_.begin(), young));
  if (old > 0) return CutShort(std::next(visitors_.begin(), static_cast<ptrdiff_t>(DrawBelow(old))));
  is_full_ = true;
  StopListening(visitors_.front().came + kLeastVisit);
}

// A rank may be so slow where many share a machine: it is reset, and comes again. Whoever has greeted as one does is no
// stranger that one tells of.
void Door::TooLate(std::list<Visitor>::iterator visitor) {
  if (visitor->hello.has_greeted()) return CutShort(visitor);
  Reset(&visitor->socket);
  TurnAway(visitor, "did not prove itself in time");
}

void Door::CutShort(std::list<Visitor>::iterator visitor) {
  Reset(&visitor->socket);
  SeeOff(visitor);
}

// Of what it lacks it says so once.
void Door::Rest(int error) {
  StopListening(Now() + kRest);
  if (std::exchange(has_rested_, true)) return;
  owner_->Notice("rank " + std::to_string(plan_.rank) +
                 ": whoever connects must find a free descriptor in this process, but: " + ErrorText(error) +
                 ". Close files that are not needed.");
}

// Those who cannot be let in would wake the thread again and again.
void Door::StopListening(Nanoseconds until) {
  listen_again_ = until;
  WatchListeners(0);
}

void Door::Listen() {
  listen_again_ = kNever;
  is_full_ = false;
  WatchListeners(EPOLLIN);
}

void Door::WatchListeners(uint32_t events) {
  for (size_t i = 0; i < listeners_.size(); ++i)
    poll_.Change(listeners_[i].fd(), events, Source::kListener, static_cast<uint32_t>(i));
}

void Door::ServeVisitor(uint32_t number) {
  const auto visitor =
      std::find_if(visitors_.begin(), visitors_.end(), [&](const Visitor& each) { return each.number == number; });
  if (visitor == visitors_.end()) return;
  int error = 0;
  const bool lives = Converse(visitor->socket, &visitor->hello, &error);
  if (visitor->hello.state() == Hello::State::kRefused) return TurnAway(visitor, visitor->hello.reason());
  if (!lives) return TurnAway(visitor, "left before it had proven itself");
  if (visitor->hello.state() == Hello::State::kTalking) return;
  poll_.Remove(visitor->socket.fd());
  SetUp(visitor->socket, plan_.dead_after_seconds);
  Connection connection = {std::move(visitor->socket), visitor->hello.claim(), visitor->hello.record_key()};
  SeeOff(visitor);
  owner_->Opened(std::move(connection));
}

void Door::TurnAway(std::list<Visitor>::iterator visitor, const char* reason) {
  strangers_.TurnedAway(std::move(visitor->from), reason);
  SeeOff(visitor);
  TellOfStrangers(false);
}

void Door::SeeOff(std::list<Visitor>::iterator visitor) {
  visitors_.erase(visitor);
  if (is_full_) Listen();
}

void Door::TellOfStrangers(bool last) {
  std::string line = strangers_.Line(Now(), plan_.rank, last);
  if (!line.empty()) owner_->Notice(std::move(line));
}

}  // namespace ringtrain
