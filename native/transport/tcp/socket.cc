#include "transport/tcp/socket.h"

#include <arpa/inet.h>
#include <errno.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <sstream>
#include <utility>

#include "transport/tcp/tcp_info.h"

namespace ringtrain {
namespace {

constexpr int kBacklog = 4096;  // the ranks of a large job may all come at once; the kernel lowers it to what it has
constexpr long kHighestPort = 65535;

void SetOption(const Socket& socket, int level, int name, int value) {
  setsockopt(socket.fd(), level, name, &value, sizeof value);
}

Status BadAddress(const std::string& text) {
  return Status::InvalidArgument("address '" + text +
                                 "': expected an IP address and a port, such as 10.0.0.2:4711 or [fd00::2]:4711. Look "
                                 "names up before.");
}

// "10.0.0.2" and "4711-4720" of "10.0.0.2:4711-4720".
bool Split(const std::string& text, std::string* host, std::string* port) {
  const size_t colon = text.rfind(':');
  if (colon == std::string::npos) return false;
  *host = text.substr(0, colon);
  *port = text.substr(colon + 1);
  const bool bracketed = host->size() > 2 && host->front() == '[' && host->back() == ']';
  if (bracketed) *host = host->substr(1, host->size() - 2);
  return bracketed == (host->find(':') != std::string::npos);
}

bool ReadPort(const std::string& text, long* port) {
  if (text.empty() || text.size() > 5 || text.find_first_not_of("0123456789") != std::string::npos) return false;
  *port = std::stol(text);
  return *port <= kHighestPort;
}

// The number of an interface, "eth0" or "2"; 0 if there is none.
uint32_t ScopeOf(const std::string& interface) {
  const bool digits = !interface.empty() && interface.find_first_not_of("0123456789") == std::string::npos;
  return digits ? static_cast<uint32_t>(std::strtoul(interface.c_str(), nullptr, 10))
                : if_nametoindex(interface.c_str());
}

// Without the C library's resolver, which wants memory and files.
bool ReadHost(const std::string& host, Address* address) {
  auto& four = *reinterpret_cast<sockaddr_in*>(&address->storage);
  if (inet_pton(AF_INET, host.c_str(), &four.sin_addr) == 1) {
    four.sin_family = AF_INET;
    address->length = sizeof four;
    return true;
  }
  auto& six = *reinterpret_cast<sockaddr_in6*>(&address->storage);
  const size_t percent = host.find('%');
  if (inet_pton(AF_INET6, host.substr(0, percent).c_str(), &six.sin6_addr) != 1) return false;
  if (percent != std::string::npos && (six.sin6_scope_id = ScopeOf(host.substr(percent + 1))) == 0) return false;
  six.sin6_family = AF_INET6;
  address->length = sizeof six;
  return true;
}

std::vector<std::string> Items(const std::string& text) {
  std::vector<std::string> items;
  std::istringstream stream(text);
  for (std::string item; std::getline(stream, item, ',');) items.push_back(item);
  return items;
}

// One address with a port, or a range of ports.
Status ParseRange(const std::string& text, Address* address, long* first, long* last) {
  std::string host, ports;
  if (!Split(text, &host, &ports) || !ReadHost(host, address)) return BadAddress(text);
  const size_t dash = ports.find('-');
  if (!ReadPort(ports.substr(0, dash), first)) return BadAddress(text);
  *last = *first;
  if (dash != std::string::npos && (!ReadPort(ports.substr(dash + 1), last) || *last < *first)) return BadAddress(text);
  address->SetPort(static_cast<uint16_t>(*first));
  return {};
}

// The errno, or 0. is_chosen: the port, and not any that is free.
int Listen(const Address& address, bool is_chosen, Socket* socket) {
  Socket made = NewSocket(address);
  if (!made.open()) return errno;
  if (address.family() == AF_INET6) SetOption(made, IPPROTO_IPV6, IPV6_V6ONLY, 1);
  // Where nobody listens, connections of an earlier world, or of an earlier job, may linger.
  if (is_chosen) SetOption(made, SOL_SOCKET, SO_REUSEADDR, 1);
  if (bind(made.fd(), address.get(), address.length) != 0 || listen(made.fd(), kBacklog) != 0) return errno;
  *socket = std::move(made);
  return 0;
}

Status ListenWithin(const std::string& text, Socket* socket) {
  Address address;
  long first = 0, last = 0;
  RT_TRY(ParseRange(text, &address, &first, &last));
  if (address.any())
    return Status::InvalidArgument("address '" + text +
                                   "': expected the address of one interface, not of all. Name each interface that "
                                   "connects the hosts.");
  int error = 0;
  for (long port = first; port <= last; ++port) {
    address.SetPort(static_cast<uint16_t>(port));
    error = Listen(address, port != 0, socket);
    if (error == 0) return {};
    if (error != EADDRINUSE && error != EACCES) break;
  }
  return Status::InvalidArgument("address '" + text + "': this host must be able to listen there, but cannot: " +
                                 ErrorText(error) + ". Choose an address of this host and a free port.");
}

Address FromKernel(const Socket& socket, int (*ask)(int, sockaddr*, socklen_t*)) {
  Address address;
  address.length = sizeof address.storage;
  if (ask(socket.fd(), reinterpret_cast<sockaddr*>(&address.storage), &address.length) != 0) address.length = 0;
  return address;
}

}  // namespace

std::string ErrorText(int error) {
  char text[128] = "";
  const std::string said = strerror_r(error, text, sizeof text);
  rlimit limit{};
  if (error != EMFILE || getrlimit(RLIMIT_NOFILE, &limit) != 0) return said;
  return said + " (the limit of this process is " + std::to_string(limit.rlim_cur) + "; ulimit -n raises it)";
}

// ---- descriptors ----

// Those of this process. Never destroyed: a socket may be closed as late as it likes.
struct Socket::All {
  Mutex mutex;  // held over a fork
  Descriptor* first = nullptr;

  static All& Get() {
    static All* const all = [] {
      All* made = new All;
      pthread_atfork(Hold, LetGo, CloseInChild);
      return made;
    }();
    return *all;
  }

 private:
  static void Hold() RT_NO_THREAD_SAFETY { Get().mutex.Lock(); }
  static void LetGo() RT_NO_THREAD_SAFETY { Get().mutex.Unlock(); }
  static void CloseInChild() RT_NO_THREAD_SAFETY {
    for (Descriptor* each = Get().first; each != nullptr; each = each->next)
      if (each->number >= 0) close(std::exchange(each->number, -1));
    LetGo();
  }
};

Mutex& Socket::ForkMutex() { return All::Get().mutex; }

Socket::Descriptor::Descriptor() {
  MutexLock lock(ForkMutex());
  next = std::exchange(All::Get().first, this);
  if (next != nullptr) next->previous = this;
}

Socket::Descriptor::~Descriptor() {
  MutexLock lock(ForkMutex());
  (previous != nullptr ? previous->next : All::Get().first) = next;
  if (next != nullptr) next->previous = previous;
  if (number >= 0) close(number);
}

// ---- addresses ----

bool Address::any() const {
  if (family() == AF_INET) return reinterpret_cast<const sockaddr_in*>(&storage)->sin_addr.s_addr == INADDR_ANY;
  const in6_addr& six = reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_addr;
  return IN6_IS_ADDR_UNSPECIFIED(&six) != 0;
}

bool Address::IsSameHost(const Address& other) const {
  if (family() != other.family()) return false;
  if (family() == AF_INET)
    return reinterpret_cast<const sockaddr_in*>(&storage)->sin_addr.s_addr ==
           reinterpret_cast<const sockaddr_in*>(&other.storage)->sin_addr.s_addr;
  return family() == AF_INET6 && IN6_ARE_ADDR_EQUAL(&reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_addr,
                                                    &reinterpret_cast<const sockaddr_in6*>(&other.storage)->sin6_addr);
}

std::string Address::Text() const {
  char host[INET6_ADDRSTRLEN] = "", interface[IF_NAMESIZE] = "";
  if (length == 0) return "an unknown address";
  if (family() == AF_INET) {
    const auto& four = *reinterpret_cast<const sockaddr_in*>(&storage);
    inet_ntop(AF_INET, &four.sin_addr, host, sizeof host);
    return std::string(host) + ":" + std::to_string(ntohs(four.sin_port));
  }
  const auto& six = *reinterpret_cast<const sockaddr_in6*>(&storage);
  inet_ntop(AF_INET6, &six.sin6_addr, host, sizeof host);
  std::string text = "[" + std::string(host);
  if (six.sin6_scope_id != 0)
    text += "%" + (if_indextoname(six.sin6_scope_id, interface) != nullptr ? std::string(interface)
                                                                           : std::to_string(six.sin6_scope_id));
  return text + "]:" + std::to_string(ntohs(six.sin6_port));
}

void Address::SetPort(uint16_t port) {  // both kinds have it at the same place
  reinterpret_cast<sockaddr_in*>(&storage)->sin_port = htons(port);
}

Status ParseAddresses(const std::string& text, std::vector<Address>* addresses) {
  addresses->clear();
  for (const std::string& item : Items(text)) {
    Address address;
    long first = 0, last = 0;
    RT_TRY(ParseRange(item, &address, &first, &last));
    if (first == 0 || last != first) return BadAddress(item);
    addresses->push_back(address);
  }
  return addresses->empty() ? BadAddress(text) : Status();
}

Address LoopbackAddress() {
  Address address;
  auto& four = *reinterpret_cast<sockaddr_in*>(&address.storage);
  four.sin_family = AF_INET;
  four.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.length = sizeof four;
  return address;
}

Status ListenOn(const std::string& text, std::vector<Socket>* sockets) {
  sockets->clear();
  for (const std::string& item : Items(text)) {
    sockets->emplace_back();
    RT_TRY(ListenWithin(item, &sockets->back()));
  }
  return sockets->empty() ? BadAddress(text) : Status();
}

Socket NewSocket(const Address& address) {
  return Socket::Made([&] { return ::socket(address.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0); });
}

Address BoundTo(const Socket& socket) { return FromKernel(socket, getsockname); }
Address PeerOf(const Socket& socket) { return FromKernel(socket, getpeername); }

void SetUp(const Socket& socket, double dead_after_seconds) {
  SetOption(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  if (dead_after_seconds <= 0) return;
  const double seconds = std::min(dead_after_seconds, 86400.0);
  SetOption(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(seconds * 1000));
  // The kernel waits twice as long each time before it sends again what has found no answer: without a bound a line
  // that is back after 10 s may be silent for 6 s more. Kernels before 6.15 have none.
  constexpr int kRtoMaxMs = 44;  // TCP_RTO_MAX_MS, which the C library may not have
  SetOption(socket, IPPROTO_TCP, kRtoMaxMs, std::clamp(static_cast<int>(seconds * 50), 1000, 120000));
  SetOption(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  SetOption(socket, IPPROTO_TCP, TCP_KEEPIDLE, std::max(1, static_cast<int>(seconds / 5)));
  SetOption(socket, IPPROTO_TCP, TCP_KEEPINTVL, std::max(1, static_cast<int>(seconds / 15)));
  SetOption(socket, IPPROTO_TCP, TCP_KEEPCNT, 3);
}

void KeepLittleUnsent(const Socket& socket, int bytes) { SetOption(socket, IPPROTO_TCP, TCP_NOTSENT_LOWAT, bytes); }

void Pace(const Socket& socket) {
  constexpr uint32_t kNoBound = UINT32_MAX - 1;  // with UINT32_MAX the kernel does not pace
  setsockopt(socket.fd(), SOL_SOCKET, SO_MAX_PACING_RATE, &kNoBound, sizeof kNoBound);
}

bool TakeCongestionControl(const Socket& socket, const std::string& name) {
  return setsockopt(socket.fd(), IPPROTO_TCP, TCP_CONGESTION, name.data(), static_cast<socklen_t>(name.size())) == 0;
}

std::string CongestionControlOf(const Socket& socket) {
  char name[16 + 1] = "";
  socklen_t length = sizeof name - 1;
  return getsockopt(socket.fd(), IPPROTO_TCP, TCP_CONGESTION, name, &length) == 0 ? name : "";
}

LineSample SampleOf(const Socket& socket) {
  TcpInfo info{};
  socklen_t length = sizeof info;
  if (getsockopt(socket.fd(), IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return {};
  const uint32_t least = info.min_rtt > 0 && info.min_rtt != UINT32_MAX ? info.min_rtt : info.rtt;
  return {least * 1e-6, static_cast<double>(info.delivery_rate), info.data_segs_out, info.total_retrans};
}

double SecondsSinceAnswer(const Socket& socket) {
  tcp_info info{};
  socklen_t length = sizeof info;
  if (getsockopt(socket.fd(), IPPROTO_TCP, TCP_INFO, &info, &length) != 0)
    return std::numeric_limits<double>::infinity();
  return info.tcpi_last_ack_recv * 1e-3;
}

bool LosesLarge(double on_lost, double on_others, double dead_after_seconds) {
  return dead_after_seconds > 0 && on_lost > 0.75 * dead_after_seconds && on_others < 0.5 * dead_after_seconds;
}

bool IsLack(int error) {
  return error == ENOMEM || error == ENOBUFS || error == ENOSPC || error == EMFILE || error == ENFILE;
}

std::string ConnectionCause(int error) {
  if (error == 0) return "connection closed by";
  if (error == ECONNRESET || error == EPIPE) return "connection reset by";
  return ErrorText(error) + " on the connection with";
}

}  // namespace ringtrain
