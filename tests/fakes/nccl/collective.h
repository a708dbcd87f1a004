// The operations of a communicator, on the thread of a fake stream.
#ifndef RINGTRAIN_TESTS_FAKES_NCCL_COLLECTIVE_H_
#define RINGTRAIN_TESTS_FAKES_NCCL_COLLECTIVE_H_

#include <vector>

#include "nccl/communicator.h"

namespace fakes {

// What one group launches on one communicator: Send and Recv proceed together, the rest in its order.
struct Batch {
  Communicator* comm;
  std::vector<Operation> operations;
  Announcement order;  // what the rank had launched elsewhere
  Moment* before;      // of the communicator's batch before this one; may be null
  Moment* after;
};

// For Cuda().launch; the batch is freed.
void RunBatch(void* batch);

}  // namespace fakes
#endif  // RINGTRAIN_TESTS_FAKES_NCCL_COLLECTIVE_H_
