// A communicator of the fake NCCL: how its ranks come together, what its state is, and what it was asked to do.
#ifndef RINGTRAIN_TESTS_FAKES_NCCL_COMMUNICATOR_H_
#define RINGTRAIN_TESTS_FAKES_NCCL_COMMUNICATOR_H_

#include <atomic>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "cuda/moment.h"
#include "nccl/segment.h"
#include "seam.h"
#include "strict.h"

namespace fakes {

// ncclResult_t
enum NcclResult {
  kNcclSuccess,
  kNcclCudaError,
  kNcclSystemError,
  kNcclInternalError,
  kNcclInvalidArgument,
  kNcclInvalidUsage,
  kNcclRemoteError,
  kNcclInProgress
};

enum class Kind { kAllReduce, kReduceScatter, kAllGather, kBroadcast, kAlltoAll, kSend, kRecv };
const char* NameOf(Kind kind);

struct Operation {
  Kind kind;
  uint64_t send = 0, recv = 0;
  size_t count =
      0;  // as the caller counts: of ReduceScatter what is received, of AllGather and AlltoAll what is sent to one
  int dtype = 0, op = 0, root = 0;  // root: also the peer
  double factor = 1;                // of a user's operation
  bool registered = false;          // the memory that its peers reach
  bool hangs = false;
  int breaks = 0;  // with this asynchronous error, and hangs
};

struct UserOp {
  int dtype;
  double factor;
  bool alive;
};

struct Communicator {
  std::string id;
  int rank, ranks, device;
  bool blocking;
  Segment segment;
  // Written by the thread that calls NCCL, and by streams' threads.
  std::atomic<int> failure{kNcclSuccess};
  std::atomic<bool> aborted{false};
  std::atomic<bool> entered{false};  // a thread is in a call on it
  // Of the thread that calls NCCL.
  bool alive = true;
  std::function<int()> unfinished;  // what is in progress: polled until it returns something else than that
  int polls = 0;                    // that find it in progress whatever it is
  uint64_t launched = 0;            // operations
  uint64_t splits = 0, shrinks = 0;
  Moment* last = nullptr;  // after all that was launched
  std::vector<UserOp> user_ops;
  std::vector<std::pair<uint64_t, size_t>> registered;  // address and bytes
  std::string error;
  Dice dice;
  // Of the thread of the stream that runs an operation; one does at a time.
  uint64_t phase = 0;

  Communicator(const std::string& its_id, int its_rank, int its_ranks, int its_device, bool blocks);
};

const CudaSeam& Cuda();
int NcclVersion();
bool RanksMayShareDevices();  // the environment and the version allow it

// The result, with its text as what ncclGetLastError says. comm may be null.
int Refuse(Communicator* comm, int result, const std::string& text);
std::string LastError(const Communicator* comm);

// Makes the communicator; it is in progress until all ranks have come.
Communicator* Join(const std::string& id, int rank, int ranks, int device, bool blocking);
// One of some ranks of another one, made by these ranks; its name is the parent's and the suffix.
int Derive(Communicator* parent, const std::string& suffix, int rank, int ranks, Communicator** made);
// What is in progress goes on; kNcclInProgress or how it ended.
int Poll(Communicator* comm);
// The rank leaves without the others.
void Leave(Communicator* comm);
// Waits for the kernels of the other communicators on the device, as it does to take memory back. It is a violation if
// they do not end: nobody has aborted them.
void AwaitOthers(const Communicator* comm);

// Operations that this rank launched on its other communicators on the device, for the announcement.
void CountOthers(const Communicator* comm, Announcement* announcement);

}  // namespace fakes
#endif  // RINGTRAIN_TESTS_FAKES_NCCL_COMMUNICATOR_H_
