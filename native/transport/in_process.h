// In-process transport: N contexts of one process are N ranks. Product code: it carries `ringtrain.testing.World`,
// notebooks and the world of one; it also plays the network between simulated hosts.
#ifndef RINGTRAIN_TRANSPORT_IN_PROCESS_H_
#define RINGTRAIN_TRANSPORT_IN_PROCESS_H_

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "transport/host_memory.h"
#include "transport/rendezvous.h"
#include "transport/transport.h"

namespace ringtrain {

// The meeting place of the ranks of one world. Each rank joins once.
class Hub {
 public:
  // layout: ranks for each simulated host, summing to the world's size.
  explicit Hub(std::vector<int> layout);
  ~Hub();

  int size() const { return size_; }
  const std::vector<int>& layout() const { return layout_; }

  // Makes this thread's context a rank; refused for a rank out of range or taken.
  static Status Join(const std::shared_ptr<Hub>& hub, int rank, std::unique_ptr<Rendezvous>* rendezvous);
  // For tests: the rank loses its connections with all others, and they theirs with it. What had arrived is still
  // delivered. Any thread; once for a rank.
  void CutOff(int rank, const std::string& cause);
  // The transport of a rank that has joined; HostMemory comes of Rendezvous::Meet.
  static std::unique_ptr<Transport> TransportOf(const std::shared_ptr<Hub>& hub, int rank);

 private:
  friend class InProcessTransport;
  friend class InProcessRendezvous;
  struct Inbox;
  struct Round;

  const std::vector<int> layout_;
  const int size_;
  std::vector<std::shared_ptr<ProcessHost>> hosts_;
  std::vector<std::unique_ptr<Inbox>> inboxes_;
  Mutex mutex_;
  std::map<int, std::shared_ptr<Round>> rounds_ RT_GUARDED_BY(mutex_);  // of the rendezvous, until all have put a text
};

}  // namespace ringtrain
#endif  // RINGTRAIN_TRANSPORT_IN_PROCESS_H_
