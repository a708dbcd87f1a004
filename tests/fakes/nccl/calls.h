// The calls of the fake NCCL: who may make them, what is planned for them, when what they ask for happens.
//
// Nothing has happened when a call on a nonblocking communicator answers ncclInProgress: it happens once polling
// ncclCommGetAsyncError finds it to be over, the latest that NCCL allows.
#ifndef RINGTRAIN_TESTS_FAKES_NCCL_CALLS_H_
#define RINGTRAIN_TESTS_FAKES_NCCL_CALLS_H_

#include <functional>
#include <string>

#include "nccl/communicator.h"

#define FAKE_EXPORT __attribute__((visibility("default")))

namespace fakes {

constexpr char kIdPrefix[] = "fake-nccl-";

struct UniqueId {
  char internal[128];
};

// The fields of ncclConfig_t that are looked at; a caller's may be shorter or longer.
struct Config {
  size_t size;
  unsigned magic, version;
  int blocking, cga_cluster_size, least_ctas, most_ctas;
};

// What FAKE_NCCL_FAIL, FAKE_NCCL_HANG and FAKE_NCCL_ASYNC_ERROR say of this call; FAKE_NCCL_RANK says for whom.
struct Plan {
  int fails, hangs, breaks;
};
Plan Enter(const std::string& name, int rank);
long CallsOf(const std::string& name, int rank);

// One call on a communicator: at most one thread at a time may be in NCCL with it, and with all communicators of its
// device.
class Call {
 public:
  // alone: with those of its device; communicators are aborted side by side.
  Call(Communicator* comm, const char* name, bool alone = true);
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

 private:
  Communicator* const comm_;
  const bool alone_;
};

// Takes the memory of an aborted communicator back, at the end of the group if the thread has one open.
int Reclaim(Communicator* comm);

// Lets `unfinished` happen: at once, or, of a nonblocking communicator now and then, while it is polled.
int Begin(Communicator* comm, std::function<int()> unfinished, bool takes_time = false);

// What is wrong with it; empty if nothing is.
std::string ProblemWith(const Config& config);
std::string ProblemWithMemory(const Communicator& comm, const char* which, uint64_t address, size_t bytes);

// ncclCommInitRankConfig, under the name by which it was called.
int Initialize(Communicator** comm, int ranks, const UniqueId& id, int rank, const Config* config, const char* name);

// An operation on a stream's handle: into the group, if the thread has one open.
int Submit(Operation operation, Communicator* comm, void* stream);
int OpenGroup();
int CloseGroup();

inline uint64_t Address(const void* memory) { return reinterpret_cast<uint64_t>(memory); }

}  // namespace fakes
#endif  // RINGTRAIN_TESTS_FAKES_NCCL_CALLS_H_
