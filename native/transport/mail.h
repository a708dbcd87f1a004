// Mail: frames between any two ranks of the world, by the shortest way: mailboxes in shared memory within a host, the
// wire between hosts. The driver's thread only.
//
// A mailbox is a ring of cells that many senders fill and one owner empties without a lock; a frame takes one or more
// cells, which may interleave with those of other senders and are put together again for each sender.
#ifndef RINGTRAIN_TRANSPORT_MAIL_H_
#define RINGTRAIN_TRANSPORT_MAIL_H_

#include <deque>
#include <string>
#include <vector>

#include "transport/host_memory.h"
#include "transport/wire.h"

namespace ringtrain {

class Mail {
 public:
  // local_ranks: global ranks of this host by local rank.
  Mail(Wire& wire, HostMemory* memory, std::vector<int> local_ranks);

  Status Send(int to, std::string frame);
  Status Receive(int* from, std::string* frame, bool* arrived);
  // Frames wait for a free cell; Receive tries again.
  bool Busy() const;
  // Nothing more goes to or comes from this rank: drops what waits for it.
  void Forget(int rank);

 private:
  struct Outgoing {
    std::deque<std::string> frames;
    size_t sent = 0;  // bytes of the first frame that are in cells
  };

  void Flush(int local_rank);
  bool ReceiveLocal(int* from, std::string* frame);

  Wire& wire_;
  HostMemory* const memory_;
  const std::vector<int> local_ranks_;
  std::vector<int> local_rank_of_;    // by global rank, -1 on another host
  std::vector<Outgoing> outgoing_;    // by local rank
  std::vector<std::string> partial_;  // by local rank of the sender
  std::deque<std::string> to_self_;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_TRANSPORT_MAIL_H_
