// The fake libnccl.so.2: the functions that NCCL 2.18 has. tests/fakes/README.md has the settings.
#include <time.h>
#include <unistd.h>

#include <algorithm>

#include "nccl/calls.h"
#include "nccl/elements.h"

using namespace fakes;

extern "C" {

FAKE_EXPORT int ncclGetVersion(int* version) {
  *version = NcclVersion();
  return kNcclSuccess;
}

FAKE_EXPORT const char* ncclGetErrorString(int result) {
  constexpr const char* kTexts[] = {"no error",
                                    "unhandled cuda error",
                                    "unhandled system error",
                                    "internal error",
                                    "invalid argument",
                                    "invalid usage",
                                    "remote process exited or there was a network error",
                                    "NCCL operation in progress"};
  return result >= 0 && result < 8 ? kTexts[result] : "unknown result code";
}

FAKE_EXPORT const char* ncclGetLastError(Communicator* comm) {
  static thread_local std::string text;
  text = LastError(comm);
  return text.c_str();
}

FAKE_EXPORT int ncclGetUniqueId(UniqueId* id) {
  static std::atomic<int> number{0};
  const Plan plan = Enter("ncclGetUniqueId", 0);
  if (plan.fails != 0) return Refuse(nullptr, plan.fails, "planned failure of ncclGetUniqueId");
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  std::memset(id->internal, 0, sizeof id->internal);
  std::snprintf(id->internal, sizeof id->internal, "%s%d-%d-%ld", kIdPrefix, static_cast<int>(getpid()), ++number,
                now.tv_sec * 1000000000L + now.tv_nsec);
  return kNcclSuccess;
}

FAKE_EXPORT int ncclCommInitRankConfig(Communicator** comm, int ranks, UniqueId id, int rank, Config* config) {
  return Initialize(comm, ranks, id, rank, config, "ncclCommInitRankConfig");
}

FAKE_EXPORT int ncclCommFinalize(Communicator* comm) {
  const Call call(comm, "ncclCommFinalize");
  if (comm->unfinished || comm->failure != kNcclSuccess)
    return Refuse(comm, kNcclInvalidUsage, "ncclCommFinalize of a communicator that is in progress or broken");
  return Begin(
      comm, [comm] { return comm->last == nullptr || comm->last->passed() ? kNcclSuccess : kNcclInProgress; }, true);
}

FAKE_EXPORT int ncclCommDestroy(Communicator* comm) {
  const Call call(comm, "ncclCommDestroy");
  if (comm->unfinished) return Refuse(comm, kNcclInvalidUsage, "ncclCommDestroy of a communicator that is in progress");
  if (comm->last != nullptr) comm->last->Wait();
  Leave(comm);
  return kNcclSuccess;
}

FAKE_EXPORT int ncclCommAbort(Communicator* comm) {
  static const long delay = Number("FAKE_NCCL_ABORT_US", 0);
  if (delay > 0) usleep(static_cast<useconds_t>(delay));
  {
    const Call call(comm, "ncclCommAbort", false);
    Enter("ncclCommAbort", comm->rank);
    comm->aborted = true;
    comm->unfinished = nullptr;
  }
  return Reclaim(comm);
}

FAKE_EXPORT int ncclCommGetAsyncError(Communicator* comm, int* error) {
  const Call call(comm, "ncclCommGetAsyncError");
  *error = Poll(comm);
  return kNcclSuccess;
}

FAKE_EXPORT int ncclAllReduce(const void* send, void* recv, size_t count, int dtype, int op, Communicator* comm,
                              void* stream) {
  return Submit({Kind::kAllReduce, Address(send), Address(recv), count, dtype, op}, comm, stream);
}

FAKE_EXPORT int ncclReduceScatter(const void* send, void* recv, size_t count, int dtype, int op, Communicator* comm,
                                  void* stream) {
  return Submit({Kind::kReduceScatter, Address(send), Address(recv), count, dtype, op}, comm, stream);
}

FAKE_EXPORT int ncclAllGather(const void* send, void* recv, size_t count, int dtype, Communicator* comm, void* stream) {
  return Submit({Kind::kAllGather, Address(send), Address(recv), count, dtype}, comm, stream);
}

FAKE_EXPORT int ncclBroadcast(const void* send, void* recv, size_t count, int dtype, int root, Communicator* comm,
                              void* stream) {
  const uint64_t sent = comm->rank == root ? Address(send) : 0;  // looked at on the root only
  return Submit({Kind::kBroadcast, sent, Address(recv), count, dtype, 0, root}, comm, stream);
}

FAKE_EXPORT int ncclSend(const void* send, size_t count, int dtype, int peer, Communicator* comm, void* stream) {
  return Submit({Kind::kSend, Address(send), 0, count, dtype, 0, peer}, comm, stream);
}

FAKE_EXPORT int ncclRecv(void* recv, size_t count, int dtype, int peer, Communicator* comm, void* stream) {
  return Submit({Kind::kRecv, 0, Address(recv), count, dtype, 0, peer}, comm, stream);
}

FAKE_EXPORT int ncclGroupStart() { return OpenGroup(); }

FAKE_EXPORT int ncclGroupEnd() { return CloseGroup(); }

FAKE_EXPORT int ncclRedOpCreatePreMulSum(int* op, void* scalar, int dtype, int residence, Communicator* comm) {
  const Call call(comm, "ncclRedOpCreatePreMulSum");
  if (SizeOf(dtype) == 0 || residence != 1)
    return Refuse(comm, kNcclInvalidArgument, "the fake reads factors on the host only");
  comm->user_ops.push_back({dtype, ReadScalar(dtype, scalar), true});
  *op = kFirstUserOp + static_cast<int>(comm->user_ops.size()) - 1;
  return kNcclSuccess;
}

FAKE_EXPORT int ncclRedOpDestroy(int op, Communicator* comm) {
  const Call call(comm, "ncclRedOpDestroy");
  const int index = op - kFirstUserOp;
  if (index < 0 || index >= static_cast<int>(comm->user_ops.size()) || !comm->user_ops[index].alive)
    return Refuse(comm, kNcclInvalidArgument, "no such reduction");
  comm->user_ops[index].alive = false;
  return kNcclSuccess;
}

// For tests: how often a rank called a function, or all ranks of this process if it is -1.
FAKE_EXPORT long fake_nccl_calls(const char* name, int rank) { return CallsOf(name, rank); }

FAKE_EXPORT int ncclCommSplit(Communicator* comm, int color, int key, Communicator** made, Config* config) {
  const Call call(comm, "ncclCommSplit");
  Enter("ncclCommSplit", comm->rank);
  const std::string problem = config != nullptr ? ProblemWith(*config) : "";
  if (!problem.empty()) return Refuse(comm, kNcclInvalidArgument, problem);
  if (comm->unfinished) return Refuse(comm, kNcclInvalidUsage, "ncclCommSplit while the communicator is in progress");
  *made = nullptr;
  const uint64_t number = ++comm->splits;
  const size_t place = number % 2;
  Member* members = comm->segment->members;
  members[comm->rank].split_color[place] = color;
  members[comm->rank].split_key[place] = key;
  members[comm->rank].splits = number;
  comm->segment.Ring();
  return Begin(
      comm,
      [=] {
        std::vector<std::pair<int, int>> mine;  // key and rank of those of this color
        for (int rank = 0; rank < comm->ranks; ++rank) {
          if (members[rank].splits < number) return static_cast<int>(kNcclInProgress);
          if (members[rank].split_color[place] == color) mine.push_back({members[rank].split_key[place], rank});
        }
        if (color < 0) return static_cast<int>(kNcclSuccess);
        if (*made != nullptr) return Poll(*made);
        std::sort(mine.begin(), mine.end());
        const auto own =
            std::find_if(mine.begin(), mine.end(), [comm](const auto& one) { return one.second == comm->rank; });
        const std::string suffix = "-s" + std::to_string(number) + "." + std::to_string(color);
        return Derive(comm, suffix, static_cast<int>(own - mine.begin()), static_cast<int>(mine.size()), made);
      },
      true);
}

}  // extern "C"
