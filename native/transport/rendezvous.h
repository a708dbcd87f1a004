// Rendezvous: how the ranks of a world find each other before there is a world. They exchange what they start from,
// find out who shares a host, and each takes away what it communicates by.
//
// Forms: over frames of a wire that connects all ranks already (MPI), and through memory between the contexts of one
// process (in_process.h).
#ifndef RINGTRAIN_TRANSPORT_RENDEZVOUS_H_
#define RINGTRAIN_TRANSPORT_RENDEZVOUS_H_

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "transport/host_memory.h"
#include "transport/transport.h"
#include "transport/world.h"

namespace ringtrain {

// What a rank takes away from a rendezvous.
struct Meeting {
  World world;
  std::unique_ptr<Transport> transport;
  std::unique_ptr<HostMemory> memory;
  std::vector<std::string> warnings;  // for the log of the context

  void Warning(std::string text) { warnings.push_back(std::move(text)); }
};

class Rendezvous {
 public:
  virtual ~Rendezvous() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Every rank's text, by rank, on every rank. All ranks must call it in the same order. On timeout the text names who
  // is missing.
  virtual Status Allgather(const std::string& mine, Nanoseconds deadline, std::vector<std::string>* all) = 0;
  // Fills in who shares a host and everything that ranks communicate by. Once, and the last call. window_size: bytes of
  // shared memory that the operations of this world will need on each host, to be reserved now.
  using WindowSize = std::function<size_t(const World&)>;
  virtual Status Meet(const WindowSize& window_size, Nanoseconds deadline, Meeting* meeting) = 0;
};

// What Allgather returns if these ranks have not come.
Status RanksMissing(int size, const std::vector<int>& absent);

// The rendezvous of ranks that a transport connects already. Rank 0 collects what is exchanged. simulated: ranks for
// each pretended host, or {}.
std::unique_ptr<Rendezvous> MeetByFrames(std::unique_ptr<Transport> transport, std::vector<int> simulated);

// "2+2" as {2, 2}; an empty text is one host of all ranks. Refused if the sum is not `size`. "1+1|2" has the same hosts
// as "1+1+2", at two sites.
Status ParseLayout(const std::string& text, int size, std::vector<int>* layout);
// The number of the rank's site in such a text; "" where that has one.
std::string SiteInLayout(const std::string& text, int rank);

}  // namespace ringtrain
#endif  // RINGTRAIN_TRANSPORT_RENDEZVOUS_H_
