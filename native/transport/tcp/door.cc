#include "transport/tcp/door.h"

#include <errno.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <utility>

namespace ringtrain {
namespace {

constexpr Nanoseconds kSecond = INT64_C(1000000000);
constexpr Nanoseconds kPatience = 5 * kSecond;  // with a rank that is called and refuses
constexpr Nanoseconds kFirstPause = kSecond / 50, kLongestPause = kSecond / 2;
constexpr Nanoseconds kRest = kSecond / 5;  // until it is tried again to let somebody in
constexpr int kAcceptsInTurn = 16;          // so that in a flood those who have come are served too

// False, with errno, if the kernel gives none.
bool Draw(Nonce* nonce) { return getrandom(nonce->data(), nonce->size(), 0) == static_cast<ssize_t>(nonce->size()); }

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

// Reads what the hello wants and sends what it says. False if the connection has ended; *error tells how.
bool Converse(const Socket& socket, Hello* hello, int* error) {
  *error = 0;
  for (;;) {
    const std::string said = hello->Say();  // some dozen bytes into an empty socket: they fit
    const ssize_t sent =
        said.empty() ? 0 : Uninterrupted([&] { return send(socket.fd(), said.data(), said.size(), MSG_NOSIGNAL); });
    if (sent != static_cast<ssize_t>(said.size())) return *error = errno, false;
    uint8_t heard[Hello::kMostBytes];
    const size_t wanted = std::min(hello->wanted(), sizeof heard);
    if (wanted == 0) return true;
    const ssize_t got = Uninterrupted([&] { return recv(socket.fd(), heard, wanted, 0); });
    if (got < 0 && errno == EAGAIN) return true;
    if (got <= 0) return *error = got < 0 ? errno : 0, false;
    hello->Hear(heard, static_cast<size_t>(got));
  }
}

}  // namespace

std::string TcpPlan::Name(int peer, int lane) const {
  const auto& addresses = peers[static_cast<size_t>(peer)];
  return addresses[link(peer, lane)].Text() + " (rank " + std::to_string(peer) + ")";
}

// Whoever has come and has not proven himself.
struct Door::Visitor {
  uint32_t number;
  Socket socket;
  std::string from;
  HelloAnswerer hello;
  Nanoseconds came;

  Nanoseconds deadline() const { return came + static_cast<Nanoseconds>(kVisitSeconds * kSecond); }
};

// A rank that is called.
struct Door::Outgoing {
  uint32_t number;
  int peer, lane;
  Nanoseconds give_up;
  Nanoseconds next_try = 0, pause = kFirstPause, refused_since = 0;
  std::string cause;  // why it has failed last
  Socket socket;
  std::optional<HelloCaller> hello;  // once it is connected
};

Door::Door(const TcpPlan& plan, std::vector<Socket> listeners, Owner* owner)
    : plan_(plan), listeners_(std::move(listeners)), owner_(owner) {}
Door::~Door() = default;

Status Door::Open(const Socket& watched) {
  room_ = RoomFor(plan_.size());
  watched_ = watched.fd();
  events_ = Socket::Made([] { return epoll_create1(EPOLL_CLOEXEC); });
  wake_ = Socket::Made([] { return eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); });
  bool open = watched.open() && events_.open() && wake_.open() &&
              Register(wake_.fd(), EPOLLIN, Source::kWake, 0, EPOLL_CTL_ADD) &&
              Register(watched_, EPOLLONESHOT, Source::kWatched, 0, EPOLL_CTL_ADD);
  for (size_t i = 0; i < listeners_.size(); ++i)
    open = open && Register(listeners_[i].fd(), EPOLLIN, Source::kListener, static_cast<uint32_t>(i), EPOLL_CTL_ADD);
  if (open) return {};
  return Status::Internal(
      "init over TCP: this process must be able to wait for its connections, but cannot: " + ErrorText(errno) +
      ". Raise its limits of open files (ulimit -n) and watches (fs.epoll.max_user_watches).");
}

bool Door::Register(int descriptor, uint32_t events, Source source, uint32_t number, int operation) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = uint64_t{static_cast<uint32_t>(source)} << 32 | number;
  return epoll_ctl(events_.fd(), operation, descriptor, &event) == 0;
}

// ---- any thread ----

void Door::Call(int peer, int lane) {
  {
    MutexLock lock(mutex_);
    wanted_.emplace_back(peer, lane);
  }
  Wake();
}

void Door::Watch() { Register(watched_, EPOLLIN | EPOLLONESHOT, Source::kWatched, 0, EPOLL_CTL_MOD); }

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
    epoll_event events[32];
    const int count = epoll_wait(events_.fd(), events, 32, NextTimeout());
    for (int i = 0; i < count; ++i) {
      const auto source = static_cast<Source>(events[i].data.u64 >> 32);
      *watched |= source == Source::kWatched;  // which is told once, whatever the others throw
    }
    for (int i = 0; i < count; ++i) {
      const auto source = static_cast<Source>(events[i].data.u64 >> 32);
      const auto number = static_cast<uint32_t>(events[i].data.u64);
      if (source == Source::kWake) {
        uint64_t times = 0;
        [[maybe_unused]] const ssize_t taken = read(wake_.fd(), &times, sizeof times);
        TakeCalls();
      }
      due |= source == Source::kWake || source == Source::kWatched;
      if (source == Source::kListener) Accept(listeners_[number]);
      if (source == Source::kVisitor) ServeVisitor(number);
      if (source == Source::kCall) ServeCall(number);
    }
    ServeDeadlines();
  }
  if (!stop_.load()) return true;
  TellOfStrangers(true);
  return false;
}

// Milliseconds until something is to be done without an event; -1: never.
int Door::NextTimeout() const {
  Nanoseconds next = std::min(listen_again_, strangers_.due());
  if (!visitors_.empty()) next = std::min(next, visitors_.front().deadline());
  for (const Outgoing& call : calls_)
    next = std::min(next, call.socket.open() ? call.give_up : std::min(call.next_try, call.give_up));
  if (next == kNever) return -1;
  return static_cast<int>(std::clamp<Nanoseconds>((next - Now()) / 1000000 + 1, 0, 3600000));
}

void Door::ServeDeadlines() {
  const Nanoseconds now = Now();
  while (!visitors_.empty() && visitors_.front().deadline() <= now) TooLate(visitors_.begin());
  TellOfStrangers(false);
  if (listen_again_ <= now) Listen();
  std::vector<Outgoing*> due;
  for (Outgoing& call : calls_)
    if (now >= call.give_up || (!call.socket.open() && now >= call.next_try)) due.push_back(&call);
  for (Outgoing* call : due) {
    if (now < call->give_up)
      Try(call);
    else
      GiveUp(call);
  }
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
    if (!socket.open() || !Draw(&nonce) || !Register(socket.fd(), EPOLLIN, Source::kVisitor, number, EPOLL_CTL_ADD))
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
    Register(listeners_[i].fd(), events, Source::kListener, static_cast<uint32_t>(i), EPOLL_CTL_MOD);
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
  epoll_ctl(events_.fd(), EPOLL_CTL_DEL, visitor->socket.fd(), nullptr);
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

// ---- those who are called ----

void Door::TakeCalls() {
  std::list<Outgoing> taken;
  {
    MutexLock lock(mutex_);
    for (const auto& each : wanted_) {
      taken.emplace_back();
      Outgoing& call = taken.back();
      call.number = next_number_++;
      call.peer = each.first;
      call.lane = each.second;
      call.give_up = DeadlineAfter(plan_.connect_seconds);
    }
    wanted_.clear();
  }
  if (taken.empty()) return;
  const auto first = taken.begin();
  calls_.splice(calls_.end(), taken);
  for (auto call = first; call != calls_.end();) Try(&*call++);  // which may forget it
}

void Door::Try(Outgoing* call) {
  const size_t link = plan_.link(call->peer, call->lane);
  const Address& to = plan_.peers[static_cast<size_t>(call->peer)][link];
  Socket socket = NewSocket(to);
  if (!socket.open()) return Refused(call, ErrorText(errno));
  const auto& own = plan_.peers[static_cast<size_t>(plan_.rank)];
  if (link < own.size() && own[link].family() == to.family()) {  // by the interface of this link
    Address from = own[link];
    from.SetPort(0);
    [[maybe_unused]] const int bound = bind(socket.fd(), from.get(), from.length);  // else the kernel chooses
  }
  if (connect(socket.fd(), to.get(), to.length) != 0 && errno != EINPROGRESS) return Failed(call, errno);
  call->socket = std::move(socket);
  if (!Register(call->socket.fd(), EPOLLOUT, Source::kCall, call->number, EPOLL_CTL_ADD))
    Refused(call, ErrorText(errno));
}

void Door::ServeCall(uint32_t number) {
  const auto call =
      std::find_if(calls_.begin(), calls_.end(), [&](const Outgoing& each) { return each.number == number; });
  if (call == calls_.end() || !call->socket.open()) return;
  if (call->hello.has_value()) return HearAnswer(&*call);
  int error = 0;
  socklen_t length = sizeof error;
  getsockopt(call->socket.fd(), SOL_SOCKET, SO_ERROR, &error, &length);
  if (error != 0) return Failed(&*call, error);
  const Claim claim = {static_cast<uint32_t>(plan_.rank), static_cast<uint32_t>(call->peer), plan_.epoch,
                       static_cast<uint8_t>(call->lane)};
  Nonce nonce;
  if (!Draw(&nonce)) return Refused(&*call, ErrorText(errno));
  call->hello.emplace(plan_.hello_key, claim, nonce);
  Register(call->socket.fd(), EPOLLIN, Source::kCall, number, EPOLL_CTL_MOD);
  HearAnswer(&*call);
}

void Door::HearAnswer(Outgoing* call) {
  int error = 0;
  const bool lives = Converse(call->socket, &*call->hello, &error);
  if (call->hello->state() == Hello::State::kRefused || (!lives && error == 0))
    return Refused(call, "no proof of this job's secret from");
  if (!lives) return Failed(call, error);
  if (call->hello->state() == Hello::State::kTalking) return;
  epoll_ctl(events_.fd(), EPOLL_CTL_DEL, call->socket.fd(), nullptr);
  SetUp(call->socket, plan_.dead_after_seconds);  // not before: the kernel would end a call that nobody answers
  Connection connection = {std::move(call->socket), call->hello->claim(), call->hello->record_key()};
  Forget(call->number);
  owner_->Opened(std::move(connection));
}

// A call has ended with an error. A reset is what CutShort and TooLate send, and nobody answers where a host or a path
// is not up yet.
void Door::Failed(Outgoing* call, int error) {
  if (error != ECONNRESET && error != EPIPE && error != ETIMEDOUT) return Refused(call, ErrorText(error));
  call->refused_since = 0;
  TryLater(call, ErrorText(error));
}

void Door::Refused(Outgoing* call, std::string cause) {
  if (call->refused_since == 0) call->refused_since = Now();
  TryLater(call, std::move(cause));
  if (Now() - call->refused_since >= kPatience) GiveUp(call);
}

void Door::TryLater(Outgoing* call, std::string cause) {
  call->socket.Close();
  call->hello.reset();
  call->cause = std::move(cause);
  call->next_try = Now() + call->pause;
  call->pause = std::min(call->pause * 2, kLongestPause);
}

void Door::GiveUp(Outgoing* call) {
  const int peer = call->peer;
  std::string cause = call->cause.empty() ? "no answer from" : call->cause;
  if (cause.find("from") == std::string::npos) cause += " at";
  owner_->Unreachable(peer, "no connection: " + cause + " " + plan_.Name(peer, call->lane));
  Forget(call->number);  // not before: without memory it is called again, and not forgotten
}

void Door::Forget(uint32_t number) {
  calls_.remove_if([&](const Outgoing& each) { return each.number == number; });
}

}  // namespace ringtrain
