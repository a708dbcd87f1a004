// TcpPlan: who this rank is, and where the others are. Connection: what a door hands out.
#ifndef RINGTRAIN_TRANSPORT_TCP_PLAN_H_
#define RINGTRAIN_TRANSPORT_TCP_PLAN_H_

#include <string>
#include <vector>

#include "transport/tcp/hello.h"
#include "transport/tcp/line.h"
#include "transport/tcp/socket.h"

namespace ringtrain {

struct TcpPlan {
  int rank = 0;
  uint64_t epoch = 0;
  HmacKey hello_key;
  std::vector<std::vector<Address>> peers;  // by rank: an address for each link; its own too
  int streams = 0;                          // data lanes for each link; 0: what the way needs (line.h)
  std::string congestion = "auto";          // of data lanes: a name, "auto" (line.h) or "kernel"
  double connect_seconds = 60;              // until a rank that does not answer is given up
  double dead_after_seconds = 15;           // until the kernel gives up a connection; 0: never

  int size() const { return static_cast<int>(peers.size()); }
  int links(int to) const { return static_cast<int>(peers[static_cast<size_t>(to)].size()); }
  // Data lanes to a rank: 1 to so many at most.
  int lanes(int to) const { return links(to) * (streams > 0 ? streams : kMostStreams); }
  // The link of a lane; the control lane takes the first.
  size_t link(int to, int lane) const {
    return lane == 0 ? 0 : static_cast<size_t>(lane - 1) % peers[static_cast<size_t>(to)].size();
  }
  // "10.0.0.2:4711 (rank 3)"
  std::string Name(int peer, int lane = 0) const {
    const Address& address = peers[static_cast<size_t>(peer)][link(peer, lane)];
    return address.Text() + " (rank " + std::to_string(peer) + ")";
  }
};

// A connection of which both ends are proven. Records travel from the rank that called to the one that answered.
struct Connection {
  Socket socket;
  Claim claim;
  HmacKey record_key;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_TRANSPORT_TCP_PLAN_H_
