// Sockets of the TCP wire: addresses as text, listening on exactly these, and what every connection is told.
#ifndef RINGTRAIN_TRANSPORT_TCP_SOCKET_H_
#define RINGTRAIN_TRANSPORT_TCP_SOCKET_H_

#include <errno.h>
#include <sys/socket.h>

#include <memory>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "base/status.h"
#include "transport/tcp/line.h"

namespace ringtrain {

// Owns a file descriptor that no child of this process keeps: exec closes it, and so does fork, after which the socket
// is not open in the child. A worker that a rank has forked would otherwise hold its connections open when it dies, and
// the others would learn of its death by silence only.
class Socket {
 public:
  Socket() = default;
  // Owns what make() returns: a descriptor that exec closes, or -1. No fork comes in between, nor does an exception.
  template <typename Make>
  static Socket Made(const Make& make) {
    Socket socket;
    socket.descriptor_.reset(new Descriptor);
    MutexLock lock(ForkMutex());
    socket.descriptor_->number = make();
    return socket;
  }

  int fd() const { return descriptor_ != nullptr ? descriptor_->number : -1; }
  bool open() const { return fd() >= 0; }
  void Close() { descriptor_.reset(); }

 private:
  struct Descriptor {  // stays where it is when the socket is moved
    Descriptor();
    ~Descriptor();
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;

    int number = -1;
    Descriptor *previous = nullptr, *next = nullptr;  // in the list of all
  };
  struct All;

  static Mutex& ForkMutex();

  std::unique_ptr<Descriptor> descriptor_;
};

// Calls again what a signal has interrupted: without an error to see, nobody would.
template <typename Call>
ssize_t Uninterrupted(const Call& call) {
  for (;;) {
    const ssize_t result = call();
    if (result >= 0 || errno != EINTR) return result;
  }
}

// An IPv4 or IPv6 address with its port.
struct Address {
  sockaddr_storage storage{};
  socklen_t length = 0;

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  int family() const { return storage.ss_family; }
  bool any() const;                             // stands for every interface
  bool IsSameHost(const Address& other) const;  // whatever the ports are
  std::string Text() const;                     // "10.0.0.2:4711", "[fd00::2]:4711"
  void SetPort(uint16_t port);
};

// Reads "10.0.0.2:4711" or "[fd00::2%eth0]:4711", several parted by commas. Names are not looked up.
Status ParseAddresses(const std::string& text, std::vector<Address>* addresses);

Address LoopbackAddress();

// Listens on each of "ip:port", "ip:first-last" (the first port of these that is free) and "ip:0" (any port), parted by
// commas. An address of all interfaces is refused: whoever wants that must name them.
Status ListenOn(const std::string& text, std::vector<Socket>* sockets);
// A TCP socket of the address's family that does not block; not open if there is none, for which errno tells why.
Socket NewSocket(const Address& address);
// The address that a socket is bound to, and the one that it is connected with.
Address BoundTo(const Socket& socket);
Address PeerOf(const Socket& socket);

// What every connection is told. dead_after_seconds: when the kernel gives a silent peer up; 0: never.
void SetUp(const Socket& socket, double dead_after_seconds);
// Spreads packets over the time that they take, as the kernel reckons it: else each window leaves at once, and the
// queue that this makes before the line tells cubic that the line is full.
void Pace(const Socket& socket);

// Bounds what has been written and not been sent, so that of several lanes each takes what its link can carry. 0: as
// the kernel does by itself.
void KeepLittleUnsent(const Socket& socket, int bytes);

// How a connection controls its rate: takes the kernel's algorithm of that name, if this process may; and its name.
bool TakeCongestionControl(const Socket& socket, const std::string& name);
std::string CongestionControlOf(const Socket& socket);
// What the kernel has seen of it; all zeros if it does not say.
LineSample SampleOf(const Socket& socket);

// Since the peer's kernel was last heard of on a connection, which may have ended since.
double SecondsSinceAnswer(const Socket& socket);
// Whether a connection that the kernel has given up lost its packets for their size: the seconds since an answer on it,
// and on any other connection between the two. Where a peer does not read, its kernel answers on this one, too, within
// at most half of the bound. 0: there is no bound.
bool LosesLarge(double on_lost, double on_others, double dead_after_seconds);

std::string ErrorText(int error);
// Whether an errno says that this host or process lacks something, and nothing of another one.
bool IsLack(int error);
// What an errno says of a connection, as the beginning of "… 10.0.0.2:4711 (rank 3)".
std::string ConnectionCause(int error);

}  // namespace ringtrain
#endif  // RINGTRAIN_TRANSPORT_TCP_SOCKET_H_
