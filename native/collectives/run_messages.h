// RunMessages: runs of elements on their way between two members of different hosts, as messages of a bounded size,
// some of them at once each way. Elements travel in a dtype that need not be the one that they lie in.
#ifndef RINGTRAIN_COLLECTIVES_RUN_MESSAGES_H_
#define RINGTRAIN_COLLECTIVES_RUN_MESSAGES_H_

#include <cstddef>
#include <deque>
#include <vector>

#include "collectives/group.h"
#include "collectives/runs.h"

namespace ringtrain {

class RunMessages {
 public:
  // All messages have the group's tag for what keeps its order.
  explicit RunMessages(Group* group) : group_(group) {}

  // Starts some of what is left of both. peer: a member. travels: the same on both sides.
  Status Start(int peer, DType travels, Runs* sends, Runs* receives, bool* moved);
  // Ends those that are complete. `into`: of what is received; *arrived grows by its elements.
  Status End(DType travels, DType into, size_t* arrived, bool* moved);
  bool empty() const { return sending_.empty() && receiving_.empty(); }

 private:
  struct Message {
    Wire::Ticket ticket = 0;
    std::vector<char> copy;  // empty: straight from or to the run
    std::vector<Run> runs;
    size_t bytes = 0;
    char* memory() { return copy.empty() ? runs[0].at : copy.data(); }
  };

  static Message& Begin(DType travels, std::deque<Message>* messages, Runs* runs);

  Group* const group_;
  std::deque<Message> sending_, receiving_;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_COLLECTIVES_RUN_MESSAGES_H_
