// The fake libnccl.so.2: functions that came after NCCL 2.18. A library without this file is that old.
#include <algorithm>

#include "nccl/calls.h"

using namespace fakes;

extern "C" {

int ncclGetUniqueId(UniqueId* id);

FAKE_EXPORT int ncclMemAlloc(void** memory, size_t bytes) {
  const Plan plan = Enter("ncclMemAlloc", 0);
  if (plan.fails != 0) return Refuse(nullptr, plan.fails, "planned failure of ncclMemAlloc");
  if (Cuda().current_device() < 0) return Refuse(nullptr, kNcclCudaError, "no context is current");
  *memory = reinterpret_cast<void*>(Cuda().allocate(bytes));
  return *memory != nullptr ? kNcclSuccess : Refuse(nullptr, kNcclCudaError, "out of memory");
}

FAKE_EXPORT int ncclMemFree(void* memory) {
  Cuda().free(Address(memory));
  return kNcclSuccess;
}

FAKE_EXPORT int ncclCommRegister(Communicator* comm, void* memory, size_t bytes, void** handle) {
  const Call call(comm, "ncclCommRegister");
  const Plan plan = Enter("ncclCommRegister", comm->rank);
  if (plan.fails != 0) return Refuse(comm, plan.fails, "planned failure of ncclCommRegister");
  const std::string problem = ProblemWithMemory(*comm, "registered buffer", Address(memory), bytes);
  if (!problem.empty()) return Refuse(comm, kNcclInvalidArgument, problem);
  comm->registered.emplace_back(Address(memory), bytes);
  *handle = memory;
  return kNcclSuccess;
}

FAKE_EXPORT int ncclCommDeregister(Communicator* comm, void* handle) {
  const Call call(comm, "ncclCommDeregister");
  return handle != nullptr ? kNcclSuccess : Refuse(comm, kNcclInvalidArgument, "no such registration");
}

FAKE_EXPORT int ncclCommInitRankScalable(Communicator** comm, int ranks, int rank, int ids, UniqueId* id,
                                         Config* config) {
  if (ids < 1) return Refuse(nullptr, kNcclInvalidArgument, "one id at least");
  return Initialize(comm, ranks, id[0], rank, config, "ncclCommInitRankScalable");
}

// The window is null, which says that the memory cannot be one; where FAKE_NCCL_WINDOWS is set it is a window.
FAKE_EXPORT int ncclCommWindowRegister(Communicator* comm, void* memory, size_t bytes, void** window, int flags) {
  const Call call(comm, "ncclCommWindowRegister");
  Enter("ncclCommWindowRegister", comm->rank);
  const std::string problem = ProblemWithMemory(*comm, "window", Address(memory), bytes);
  if (!problem.empty() || flags < 0 || flags > 3) return Refuse(comm, kNcclInvalidArgument, "window: " + problem);
  if (comm->unfinished)
    return Refuse(comm, kNcclInvalidUsage, "ncclCommWindowRegister while the communicator is in progress");
  *window = nullptr;
  return Begin(
      comm,
      [=] {
        if (Number("FAKE_NCCL_WINDOWS", 0) == 0 || Address(memory) % 4096 != 0) return static_cast<int>(kNcclSuccess);
        *window = memory;
        comm->registered.emplace_back(Address(memory), bytes);
        return static_cast<int>(kNcclSuccess);
      },
      true);
}

FAKE_EXPORT int ncclCommWindowDeregister(Communicator* comm, void* window) {
  const Call call(comm, "ncclCommWindowDeregister");
  return window != nullptr ? kNcclSuccess : Refuse(comm, kNcclInvalidArgument, "no such window");
}

FAKE_EXPORT int ncclCommShrink(Communicator* comm, int* exclude, int count, Communicator** made, Config*, int flags) {
  const Call call(comm, "ncclCommShrink");
  auto excluded = [&](int rank) { return std::find(exclude, exclude + count, rank) != exclude + count; };
  if (flags < 0 || flags > 1 || count < 1 || excluded(comm->rank))
    return Refuse(comm, kNcclInvalidArgument, "ncclCommShrink");
  if (flags == 1) comm->aborted = true;  // NCCL_SHRINK_ABORT: what is under way ends
  std::string suffix = "-k" + std::to_string(++comm->shrinks);
  int place = 0, ranks = 0;
  for (int rank = 0; rank < comm->ranks; ++rank) {
    if (excluded(rank)) continue;
    if (rank == comm->rank) place = ranks;
    ++ranks;
    suffix += "." + std::to_string(rank);
  }
  Derive(comm, suffix, place, ranks, made);
  return comm->failure = kNcclSuccess, Begin(comm, [made = *made] { return Poll(made); }, true);
}

FAKE_EXPORT int ncclCommRevoke(Communicator* comm, int flags) {
  const Call call(comm, "ncclCommRevoke");
  if (flags != 0) return Refuse(comm, kNcclInvalidArgument, "flags must be 0");
  comm->segment.Fail(kNcclInvalidUsage, "the communicator was revoked");
  comm->failure = kNcclInvalidUsage;
  return kNcclSuccess;
}

FAKE_EXPORT int ncclAlltoAll(const void* send, void* recv, size_t count, int dtype, Communicator* comm, void* stream) {
  return Submit({Kind::kAlltoAll, Address(send), Address(recv), count, dtype}, comm, stream);
}

FAKE_EXPORT int ncclCommGetUniqueId(Communicator* comm, UniqueId* id) {
  const Call call(comm, "ncclCommGetUniqueId");
  return ncclGetUniqueId(id);
}

// Ranks of the old communicator pass it, one of them the id too; new ranks pass the id and their rank.
FAKE_EXPORT int ncclCommGrow(Communicator* comm, int ranks, const UniqueId* id, int rank, Communicator** made,
                             Config* config) {
  if (comm == nullptr) return Initialize(made, ranks, *id, rank, config, "ncclCommGrow");
  const Call call(comm, "ncclCommGrow");
  if (id != nullptr) {
    std::memcpy(comm->segment->grown_id, id->internal, sizeof id->internal);
    comm->segment->grown = 1;
    comm->segment.Ring();
  }
  *made = nullptr;
  return Begin(
      comm,
      [=] {
        if (comm->segment->grown == 0) return static_cast<int>(kNcclInProgress);
        if (*made == nullptr) *made = Join(comm->segment->grown_id, comm->rank, ranks, comm->device, comm->blocking);
        return Poll(*made);
      },
      true);
}

}  // extern "C"
