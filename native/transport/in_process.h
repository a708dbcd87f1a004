// In-process transport: N contexts of one process are N ranks. Product code: it carries `ringtrain.testing.World`, notebooks
// and the world of one; it also plays the network between simulated hosts.
#ifndef RINGTRAIN_TRANSPORT_IN_PROCESS_H_
#define RINGTRAIN_TRANSPORT_IN_PROCESS_H_

#include <memory>
#include <string>
#include <vector>

#include "transport/host_memory.h"
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

  // The transport and host memory of a rank; refused for a rank out of range or taken.
  static Status Join(const std::shared_ptr<Hub>& hub, int rank, std::unique_ptr<Transport>* transport,
                     std::unique_ptr<HostMemory>* memory);

 private:
  friend class InProcessTransport;
  struct Inbox;

  const std::vector<int> layout_;
  const int size_;
  std::vector<std::shared_ptr<ProcessHost>> hosts_;
  std::vector<std::unique_ptr<Inbox>> inboxes_;
};

// "2+2" as {2, 2}; an empty text is one host of all ranks. Refused if the sum is not `size`.
Status ParseLayout(const std::string& text, int size, std::vector<int>* layout);

}  // namespace ringtrain
#endif  // RINGTRAIN_TRANSPORT_IN_PROCESS_H_
