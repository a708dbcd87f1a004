#include "gpu/communicator.h"

#include <cstring>
#include <exception>
#include <thread>
#include <utility>

#include "device/device.h"

namespace ringtrain {
namespace {

constexpr int kAbortsInGroup = 22200;  // NCCL's version from which on a group may abort

}  // namespace

Status MakeUniqueId(const Nccl& nccl, std::string* unique_id) {
  ncclUniqueId id;
  RT_TRY(nccl.Check(nccl.GetUniqueId(&id), "ncclGetUniqueId", nullptr));
  unique_id->assign(id.internal, sizeof id.internal);
  return {};
}

Status Communicator::Begin(const Nccl& nccl, int ranks, const std::string& unique_id, int rank, int most_ctas,
                           std::unique_ptr<Communicator>* communicator) {
  ncclUniqueId id;
  if (unique_id.size() != sizeof id.internal)
    return Status::Internal("NCCL: expected an id of " + std::to_string(sizeof id.internal) +
                            " bytes from the first member but found " + std::to_string(unique_id.size()) + ".");
  std::memcpy(id.internal, unique_id.data(), sizeof id.internal);
  NcclConfig config;
  config.version = static_cast<unsigned>(nccl.version);
  if (most_ctas > 0) config.most_ctas = most_ctas;
  communicator->reset(new Communicator(nccl));
  ncclComm_t* const comm = &(*communicator)->comm_;
  return nccl.Check(nccl.CommInitRankConfig(comm, ranks, id, rank, &config), "ncclCommInitRankConfig", nullptr);
}

Status Communicator::BeginSplit(const Communicator& parent, int rank, std::unique_ptr<Communicator>* communicator) {
  constexpr int kSameColor = 0;
  communicator->reset(new Communicator(parent.nccl_));
  NcclConfig config;
  config.version = static_cast<unsigned>(parent.nccl_.version);
  return parent.nccl_.Check(parent.nccl_.CommSplit(parent.comm_, kSameColor, rank, &(*communicator)->comm_, &config),
                            "ncclCommSplit", parent.comm_);
}

// All its work is done by now, or nobody wants it any more; a clean end would wait for the other ranks.
Communicator::~Communicator() { Abort(); }

Status NcclMemory::Allocate(const Nccl& nccl, size_t bytes, std::unique_ptr<NcclMemory>* memory) {
  void* allocated = nullptr;
  RT_TRY(nccl.Check(nccl.MemAlloc(&allocated, bytes), "ncclMemAlloc of " + std::to_string(bytes) + " bytes", nullptr));
  memory->reset(new NcclMemory(nccl, allocated, bytes));
  return {};
}

Status Communicator::BeginWindow(const NcclMemory& memory) {
  constexpr int kSymmetric = 1;
  if (nccl_.CommWindowRegister == nullptr) return {};
  return nccl_.Check(nccl_.CommWindowRegister(comm_, memory.get(), memory.bytes(), &window_, kSymmetric),
                     "ncclCommWindowRegister", comm_);
}

Status Communicator::Register(const NcclMemory& memory) {
  void* handle;  // goes with the communicator
  return nccl_.Check(nccl_.CommRegister(comm_, memory.get(), memory.bytes(), &handle), "ncclCommRegister", comm_);
}

Status Communicator::Poll(bool* idle) const {
  ncclResult_t state = kNcclSuccess;
  if (comm_ == nullptr) {  // a split that its parent has not made yet
    *idle = true;
    return {};
  }
  RT_TRY(nccl_.Check(nccl_.CommGetAsyncError(comm_, &state), "ncclCommGetAsyncError", comm_));
  *idle = state == kNcclSuccess;
  return nccl_.Check(state, "NCCL's work", comm_);
}

// ---- the end ----

void Communicator::Abort() {
  if (ncclComm_t comm = std::exchange(comm_, nullptr)) nccl_.CommAbort(comm);
}

// A split that was in progress may be there once its parent has been aborted, which waits for it.
void Communicator::Abort(const std::vector<Communicator*>& communicators) {
  for (;;) {
    std::vector<Communicator*> open;
    for (Communicator* each : communicators)
      if (each != nullptr && each->comm_ != nullptr) open.push_back(each);
    if (open.empty()) return;
    if (open.size() == 1)
      open[0]->Abort();
    else if (open[0]->nccl_.version >= kAbortsInGroup)
      AbortInGroup(open);
    else
      AbortInThreads(open);
  }
}

void Communicator::AbortInGroup(const std::vector<Communicator*>& communicators) {
  const Nccl& nccl = communicators[0]->nccl_;
  nccl.GroupStart();
  for (Communicator* each : communicators) each->Abort();
  nccl.GroupEnd();
}

// The context is that of this thread.
void Communicator::AbortInThreads(const std::vector<Communicator*>& communicators) {
  const Driver& driver = *Driver::Opened();
  CUcontext context = nullptr;
  driver.CtxGetCurrent(&context);
  std::vector<std::thread> threads;
  for (Communicator* each : communicators) {
    try {
      threads.emplace_back([&driver, context, each] {
        InContext current(driver, context);
        each->Abort();
      });
    } catch (const std::exception&) {  // no thread, or no memory
      each->Abort();
    }
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace ringtrain
