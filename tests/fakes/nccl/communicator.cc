#include "nccl/communicator.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <mutex>

namespace fakes {
namespace {

std::mutex live_mutex;
std::vector<Communicator*>& Live() {
  static auto* live = new std::vector<Communicator*>;
  return *live;
}

thread_local std::string last_error;  // of calls without a communicator

__attribute__((format(printf, 1, 2))) std::string Text(const char* format, ...) {
  char text[256];
  va_list values;
  va_start(values, format);
  std::vsnprintf(text, sizeof text, format, values);
  va_end(values);
  return text;
}

// What is wrong with the ranks that have come together; empty if nothing is.
std::string Disagreement(const Communicator& comm) {
  const Member& own = comm.segment->members[comm.rank];
  std::vector<int> sharing(kMaxRanks, 1);  // ranks up to this one that have its device
  for (int rank = 0; rank < comm.ranks; ++rank) {
    const Member& member = comm.segment->members[rank];
    if (member.version != own.version)
      return Text("Mismatched NCCL version detected : rank %d version %d rank %d version", rank, member.version,
                  comm.rank);
    if (member.ranks != comm.ranks)
      return Text("rank %d expects %d ranks, rank %d another number", rank, member.ranks, comm.rank);
    for (int earlier = 0; earlier < rank; ++earlier) {
      if (std::memcmp(member.uuid, comm.segment->members[earlier].uuid, sizeof member.uuid) != 0) continue;
      if (!RanksMayShareDevices() || ++sharing[rank] > 2)
        return Text("Duplicate GPU detected : rank %d and rank %d both on CUDA device %x", earlier, rank,
                    static_cast<int>(member.bus) << 12);
    }
  }
  return "";
}

// One look at whether all ranks have come.
int Gather(Communicator* comm) {
  if (comm->segment->failure != 0) return Refuse(comm, comm->segment->failure, comm->segment->explanation);
  for (int rank = 0; rank < comm->ranks; ++rank)
    if (comm->segment->members[rank].present == 0) return kNcclInProgress;
  comm->segment.Forget();
  const std::string wrong = Disagreement(*comm);
  return wrong.empty() ? kNcclSuccess : Refuse(comm, kNcclInvalidUsage, wrong);
}

}  // namespace

Communicator::Communicator(const std::string& its_id, int its_rank, int its_ranks, int its_device, bool blocks)
    : id(its_id),
      rank(its_rank),
      ranks(its_ranks),
      device(its_device),
      blocking(blocks),
      segment("/" + its_id),
      dice(static_cast<uint64_t>(Number("FAKE_SEED", 1)) + static_cast<uint64_t>(its_rank)) {}

const char* NameOf(Kind kind) {
  constexpr const char* kNames[] = {"ncclAllReduce", "ncclReduceScatter", "ncclAllGather", "ncclBroadcast",
                                    "ncclAlltoAll",  "ncclSend",          "ncclRecv"};
  return kNames[static_cast<int>(kind)];
}

const CudaSeam& Cuda() {
  static const CudaSeam* seam = [] {
    void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    auto* find = driver != nullptr ? reinterpret_cast<const CudaSeam* (*)()>(dlsym(driver, "fake_cuda_seam")) : nullptr;
    if (find == nullptr) Violation("the fake NCCL needs the fake libcuda, loaded before it is used");
    return find();
  }();
  return *seam;
}

int NcclVersion() {
  static const int version = static_cast<int>(Number("FAKE_NCCL_VERSION", 23007));
  return version;
}

bool RanksMayShareDevices() { return NcclVersion() >= 23000 && Number("NCCL_MULTI_RANK_GPU_ENABLE", 0) == 1; }

int Refuse(Communicator* comm, int result, const std::string& text) {
  (comm != nullptr ? comm->error : last_error) = text;
  return result;
}

std::string LastError(const Communicator* comm) {
  if (comm == nullptr) return last_error;
  return comm->error.empty() && comm->segment->failure != 0 ? comm->segment->explanation : comm->error;
}

Communicator* Join(const std::string& id, int rank, int ranks, int device, bool blocking) {
  auto* comm = new Communicator(id, rank, ranks, device, blocking);
  Member& own = comm->segment->members[rank];
  own.version = NcclVersion();
  own.ranks = ranks;
  Cuda().identity(device, own.uuid, &own.bus);
  if (own.present.exchange(1) != 0)
    comm->segment.Fail(kNcclInvalidUsage, Text("rank %d of %d joined twice", rank, ranks));
  comm->segment.Ring();
  comm->unfinished = [comm] { return Gather(comm); };
  std::lock_guard<std::mutex> lock(live_mutex);
  Live().push_back(comm);
  return comm;
}

int Derive(Communicator* parent, const std::string& suffix, int rank, int ranks, Communicator** made) {
  *made = Join(parent->id + suffix, rank, ranks, parent->device, parent->blocking);
  return Poll(*made);
}

int Poll(Communicator* comm) {
  if (!comm->unfinished) return comm->failure;
  if (comm->polls > 0) return --comm->polls, kNcclInProgress;
  const int result = comm->unfinished();
  if (result == kNcclInProgress) return result;
  comm->unfinished = nullptr;
  if (result != kNcclSuccess) comm->failure = result;
  return result;
}

void Leave(Communicator* comm) {
  comm->alive = false;
  comm->segment->members[comm->rank].gone = 1;
  comm->segment.Ring();
  comm->segment.Forget();
  std::lock_guard<std::mutex> lock(live_mutex);
  Live().erase(std::remove(Live().begin(), Live().end(), comm), Live().end());
}

void AwaitOthers(const Communicator* comm) {
  constexpr int kPatience = 10000;  // milliseconds
  std::vector<Communicator*> others;
  {
    std::lock_guard<std::mutex> lock(live_mutex);
    for (Communicator* other : Live())
      if (other != comm && other->device == comm->device) others.push_back(other);
  }
  for (const Communicator* other : others)
    for (int waited = 0; other->last != nullptr && !other->last->passed() && !other->aborted; ++waited, usleep(1000))
      if (waited == kPatience)
        Violation("ncclCommAbort waits for a kernel of another communicator, which nobody aborts");
}

void CountOthers(const Communicator* comm, Announcement* announcement) {
  int known = 0;
  std::lock_guard<std::mutex> lock(live_mutex);
  for (const Communicator* other : Live()) {
    if (other == comm || other->device != comm->device || other->unfinished || RanksMayShareDevices() ||
        known == kMaxComms)
      continue;
    announcement->others[known] = std::hash<std::string>()(other->id);
    announcement->launched[known++] = other->launched;
  }
  for (; known < kMaxComms; ++known) announcement->others[known] = 0;
}

}  // namespace fakes
