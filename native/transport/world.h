// World: who the ranks are and which of them share a host. Made once when a context opens, constant afterwards.
#ifndef RINGTRAIN_TRANSPORT_WORLD_H_
#define RINGTRAIN_TRANSPORT_WORLD_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/log.h"
#include "transport/host_memory.h"
#include "transport/transport.h"

namespace ringtrain {

struct World {
  int rank = 0;
  int size = 1;
  uint32_t epoch = 0;                   // the same on all ranks; every frame carries it
  std::vector<std::vector<int>> hosts;  // ranks of each host, ascending; hosts by their lowest rank
  std::vector<int> host_of;             // by rank
  std::vector<int> local_rank_of;       // by rank
  std::vector<std::string> host_names;  // by rank, for people to read

  const std::vector<int>& my_host() const { return hosts[host_of[rank]]; }
  int local_rank() const { return local_rank_of[rank]; }
  int local_size() const { return static_cast<int>(my_host().size()); }
  // Hosts that have a rank with this rank's local rank, and this rank's place among them.
  int cross_size() const;
  int cross_rank() const;
  bool homogeneous() const;
};

// Fills hosts, host_of and local_rank_of from each rank's host key; equal keys share a host.
void GroupByHost(const std::vector<std::string>& keys, World* world);

// Every rank's text, by rank, on every rank. All ranks must call it in the same order. On timeout the text names who is missing.
Status AllgatherTexts(Transport& transport, const std::string& mine, Nanoseconds deadline, std::vector<std::string>* all);

// Finds out which ranks share a host: those that can open each other's memory. simulated: ranks per pretended host, or {}.
// Ranks that cannot share memory become hosts of their own, with a line in the log.
// window_size: bytes of shared memory that the operations of this world will need on each host, to be reserved now.
using WindowSize = std::function<size_t(const World&)>;
Status MeetOnHosts(Transport& transport, const std::vector<int>& simulated, const WindowSize& window_size, Nanoseconds deadline,
                   Log* log, World* world, std::unique_ptr<HostMemory>* memory);

}  // namespace ringtrain
#endif  // RINGTRAIN_TRANSPORT_WORLD_H_
