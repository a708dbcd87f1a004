// The messages of one chunk between the hosts' leaders: those of a step are started together, and awaited together.
#ifndef RINGTRAIN_COLLECTIVES_HOST_MESSAGES_H_
#define RINGTRAIN_COLLECTIVES_HOST_MESSAGES_H_

#include <cstdint>
#include <vector>

#include "collectives/group.h"

namespace ringtrain {

class HostMessages {
 public:
  // leaders: the member of each host that takes part.
  HostMessages(Group* group, std::vector<int> leaders);

  // Those that follow are of this chunk, by its number in the window's sequence.
  void BeginChunk(uint64_t number) { tag_ = group_->Tag(number); }
  // Nothing is sent of no bytes, on either side.
  Status Receive(int host, char* into, size_t bytes);
  Status Send(int host, const char* data, size_t bytes);
  // Whether all that were started are complete.
  Status TestAll(bool* complete);

 private:
  int RankOf(int host) const { return group_->RankOf(leaders_[static_cast<size_t>(host)]); }

  Group* const group_;
  const std::vector<int> leaders_;  // member by host
  int tag_ = 0;
  std::vector<Wire::Ticket> tickets_;  // of the step under way
};

}  // namespace ringtrain
#endif  // RINGTRAIN_COLLECTIVES_HOST_MESSAGES_H_
