// Transport over TCP connections of our own: several hosts without MPI.
//
// What it consists of is in transport/tcp/, from the bottom: sha256 and hello (who may connect), record (the format),
// exchange (which message may travel, and where its bytes go), piece_stream and lane (bytes between memory and
// sockets), door (how connections begin), connections (who moves what, and who wakes whom).
#ifndef RINGTRAIN_TRANSPORT_TCP_H_
#define RINGTRAIN_TRANSPORT_TCP_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "transport/rendezvous.h"
#include "transport/tcp/socket.h"
#include "transport/transport.h"

namespace ringtrain {

struct TcpWorld;

// Where the other ranks reach this one.
class TcpListener {
 public:
  // addresses: "ip:port" for each link between the hosts, parted by commas; a port may be 0 (any) or a range such as
  // 4711-4720 (the first that is free).
  static Status Open(const std::string& addresses, std::unique_ptr<TcpListener>* listener);
  // As others must be told, with the ports that it has: "10.0.0.2:4711,10.1.0.2:4712".
  const std::string& addresses() const { return addresses_; }

 private:
  friend Status OpenTcpTransport(TcpListener*, const TcpWorld&, std::unique_ptr<Transport>*);
  std::vector<Socket> sockets_;
  std::string addresses_;
};

// What a rank must know of its world before it can meet the others.
struct TcpWorld {
  int rank = 0;
  std::vector<std::string> peers;  // addresses of every rank's listener, its own too
  const uint8_t* secret =
      nullptr;         // of the job, 32 bytes, read during the call; every connection proves that both ends know it
  uint64_t epoch = 0;  // of the world; connections of another are refused
  int streams = 0;     // data connections for each link; 0: what the way to a rank needs
  std::string congestion = "auto";  // by which they control their rate: a name of the kernel's, "auto" or "kernel"
  double connect_seconds = 60;      // after which a rank that does not answer is lost
  double dead_after_seconds = 15;   // after which the kernel gives up a silent connection; 0: never
};

// Opens the transport of a rank. Takes the listener's sockets. Connections are made when there is something to send.
Status OpenTcpTransport(TcpListener* listener, const TcpWorld& world, std::unique_ptr<Transport>* transport);

// The rendezvous of these ranks. layout: "2+2" pretends two hosts; empty: the real ones.
Status OpenTcpRendezvous(TcpListener* listener, const TcpWorld& world, const std::string& layout,
                         std::unique_ptr<Rendezvous>* rendezvous);

}  // namespace ringtrain
#endif  // RINGTRAIN_TRANSPORT_TCP_H_
