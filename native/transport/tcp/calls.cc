#include "transport/tcp/calls.h"

#include <errno.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "transport/tcp/talk.h"

namespace ringtrain {
namespace {

constexpr Nanoseconds kPatience = 5 * kSecond;  // with a rank that is called and refuses
constexpr Nanoseconds kFirstPause = kSecond / 50, kLongestPause = kSecond / 2;

}  // namespace

// A rank that is called.
struct Calls::Outgoing {
  uint32_t number;
  int peer, lane;
  Nanoseconds give_up;
  Nanoseconds next_try = 0, pause = kFirstPause, refused_since = 0;
  std::string cause;  // why it has failed last
  Socket socket;
  std::optional<HelloCaller> hello;  // once it is connected
};

Calls::Calls(const TcpPlan& plan, const Poll& poll, Owner* owner) : plan_(plan), poll_(poll), owner_(owner) {}
Calls::~Calls() = default;

void Calls::Call(int peer, int lane) {
  Outgoing& call = calls_.emplace_back();
  call.number = next_number_++;
  call.peer = peer;
  call.lane = lane;
  call.give_up = DeadlineAfter(plan_.connect_seconds);
  Try(&call);
}

Nanoseconds Calls::due() const {
  Nanoseconds next = kNever;
  for (const Outgoing& call : calls_)
    next = std::min(next, call.socket.open() ? call.give_up : std::min(call.next_try, call.give_up));
  return next;
}

void Calls::ServeDeadlines(Nanoseconds now) {
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

void Calls::Try(Outgoing* call) {
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
  if (!poll_.Add(call->socket.fd(), EPOLLOUT, Poll::Source::kCall, call->number)) Refused(call, ErrorText(errno));
}

void Calls::Serve(uint32_t number) {
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
  poll_.Change(call->socket.fd(), EPOLLIN, Poll::Source::kCall, number);
  HearAnswer(&*call);
}

void Calls::HearAnswer(Outgoing* call) {
  int error = 0;
  const bool lives = Converse(call->socket, &*call->hello, &error);
  if (call->hello->state() == Hello::State::kRefused || (!lives && error == 0))
    return Refused(call, "no proof of this job's secret from");
  if (!lives) return Failed(call, error);
  if (call->hello->state() == Hello::State::kTalking) return;
  poll_.Remove(call->socket.fd());
  SetUp(call->socket, plan_.dead_after_seconds);  // not before: the kernel would end a call that nobody answers
  Connection connection = {std::move(call->socket), call->hello->claim(), call->hello->record_key()};
  Forget(call->number);
  owner_->Opened(std::move(connection));
}

// A call has ended with an error. A reset is what a door sends that has no room or no time left, and nobody answers
// where a host or a path is not up yet.
void Calls::Failed(Outgoing* call, int error) {
  if (error != ECONNRESET && error != EPIPE && error != ETIMEDOUT) return Refused(call, ErrorText(error));
  call->refused_since = 0;
  TryLater(call, ErrorText(error));
}

void Calls::Refused(Outgoing* call, std::string cause) {
  if (call->refused_since == 0) call->refused_since = Now();
  TryLater(call, std::move(cause));
  if (Now() - call->refused_since >= kPatience) GiveUp(call);
}

void Calls::TryLater(Outgoing* call, std::string cause) {
  call->socket.Close();
  call->hello.reset();
  call->cause = std::move(cause);
  call->next_try = Now() + call->pause;
  call->pause = std::min(call->pause * 2, kLongestPause);
}

void Calls::GiveUp(Outgoing* call) {
  const int peer = call->peer;
  std::string cause = call->cause.empty() ? "no answer from" : call->cause;
  if (cause.find("from") == std::string::npos) cause += " at";
  owner_->Unreachable(peer, "no connection: " + cause + " " + plan_.Name(peer, call->lane));
  Forget(call->number);  // not before: without memory it is called again, and not forgotten
}

void Calls::Forget(uint32_t number) {
  calls_.remove_if([&](const Outgoing& each) { return each.number == number; });
}

}  // namespace ringtrain
