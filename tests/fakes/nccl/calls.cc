#include "nccl/calls.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <utility>

#include "nccl/collective.h"
#include "nccl/elements.h"

namespace fakes {
namespace {

// By name and rank; a rank's own, because ranks may be threads of one process.
CountedFunction& Counted(const std::string& name, int rank) {
  static std::mutex mutex;
  static auto* functions = new std::map<std::string, std::array<CountedFunction, kMaxRanks>>;
  std::lock_guard<std::mutex> lock(mutex);
  CountedFunction& function = (*functions)[name][rank];
  if (function.name.empty()) function.name = name;
  return function;
}

// Whether a thread is in a call on a communicator of a device.
std::atomic<bool>& InDevice(int device) {
  static auto* entered = new std::array<std::atomic<bool>, 64>();
  return (*entered)[device];
}

// Where a field of ncclConfig_t ends, from trafficClass on.
bool EndsWithAField(size_t size) {
  constexpr size_t kEnds[] = {48, 56, 60, 64, 68, 72, 76, 80, 84, 88, 92, 96, 120};
  return std::find(std::begin(kEnds), std::end(kEnds), size) != std::end(kEnds);
}

bool IsId(const UniqueId& id) { return std::strncmp(id.internal, kIdPrefix, sizeof kIdPrefix - 1) == 0; }

bool Overlap(uint64_t a, size_t a_bytes, uint64_t b, size_t b_bytes) { return a < b + b_bytes && b < a + a_bytes; }

// Sent and received memory may be the same in the ways that NCCL documents, else they must be apart.
std::string ProblemWithMemory(const Communicator& comm, const Operation& operation) {
  const size_t bytes = operation.count * SizeOf(operation.dtype);
  const auto ranks = static_cast<size_t>(comm.ranks), rank = static_cast<size_t>(comm.rank);
  const bool scatters = operation.kind == Kind::kReduceScatter || operation.kind == Kind::kAlltoAll;
  const bool gathers = operation.kind == Kind::kAllGather || operation.kind == Kind::kAlltoAll;
  const bool sends =
      operation.kind != Kind::kRecv && (operation.kind != Kind::kBroadcast || comm.rank == operation.root);
  const size_t sent = sends ? bytes * (scatters ? ranks : 1) : 0;
  const size_t received = operation.kind == Kind::kSend ? 0 : bytes * (gathers ? ranks : 1);
  std::string problem = ProblemWithMemory(comm, "send buffer", operation.send, sent);
  if (problem.empty()) problem = ProblemWithMemory(comm, "receive buffer", operation.recv, received);
  if (!problem.empty() || sent == 0 || received == 0) return problem;
  const bool in_place = operation.kind == Kind::kAllGather       ? operation.send == operation.recv + rank * bytes
                        : operation.kind == Kind::kReduceScatter ? operation.recv == operation.send + rank * bytes
                        : operation.kind == Kind::kAlltoAll      ? false
                                                                 : operation.send == operation.recv;
  if (!in_place && Overlap(operation.send, sent, operation.recv, received)) return "send and receive buffer overlap";
  return "";
}

std::string ProblemWith(const Communicator& comm, const Operation& operation) {
  if (SizeOf(operation.dtype) == 0) return "type " + std::to_string(operation.dtype) + " is none that the fake knows";
  const bool rooted =
      operation.kind == Kind::kBroadcast || operation.kind == Kind::kSend || operation.kind == Kind::kRecv;
  if (rooted && (operation.root < 0 || operation.root >= comm.ranks))
    return "root or peer " + std::to_string(operation.root) + " is no rank";
  const int user_op = operation.op - kFirstUserOp;
  if (operation.op < 0 || user_op >= static_cast<int>(comm.user_ops.size()))
    return "reduction " + std::to_string(operation.op) + " does not exist";
  if (user_op >= 0 && (!comm.user_ops[user_op].alive || comm.user_ops[user_op].dtype != operation.dtype))
    return "the user's reduction was destroyed or is of another type";
  return ProblemWithMemory(comm, operation);
}

struct Asked {
  Communicator* comm;
  Stream* stream;
  std::vector<Operation> operations;
};

constexpr int kAbortsInGroup = 22200;
thread_local std::vector<Communicator*> aborted;  // in the group

thread_local int group_depth = 0;
thread_local std::vector<Asked> group;

int Launch(const Asked& asked, const Announcement& order) {
  Communicator* comm = asked.comm;
  comm->launched += asked.operations.size();
  auto* batch = new Batch{comm, asked.operations, order, comm->last, new Moment};
  comm->last = batch->after;
  Cuda().launch(asked.stream, RunBatch, batch);
  return kNcclSuccess;
}

int LaunchGroup(std::vector<Asked> all) {
  std::vector<Announcement> orders(all.size());
  for (size_t i = 0; i < all.size(); ++i) CountOthers(all[i].comm, &orders[i]);
  int result = kNcclSuccess;
  for (size_t i = 0; i < all.size(); ++i) {
    const Call call(all[i].comm, "ncclGroupEnd");
    const int launched = Begin(all[i].comm, [asked = all[i], order = orders[i]] { return Launch(asked, order); });
    if (launched != kNcclSuccess) result = launched;
  }
  return result;
}

void AddToGroup(Communicator* comm, Stream* stream, const Operation& operation) {
  for (Asked& asked : group)
    if (asked.comm == comm && asked.stream == stream) return asked.operations.push_back(operation);
  group.push_back({comm, stream, {operation}});
}

}  // namespace

Plan Enter(const std::string& name, int rank) {
  CountedFunction& function = Counted(name, rank);
  const long call = function.Enter();
  if (Number("FAKE_NCCL_RANK", rank) != rank) return {};
  auto planned = [&](const char* setting) { return function.Planned(Setting(setting, ""), call); };
  return {planned("FAKE_NCCL_FAIL"), planned("FAKE_NCCL_HANG"), planned("FAKE_NCCL_ASYNC_ERROR")};
}

long CallsOf(const std::string& name, int rank) {
  long calls = 0;
  for (int one = 0; one < kMaxRanks; ++one)
    if (rank < 0 || rank == one) calls += Counted(name, one).calls.load();
  return calls;
}

Call::Call(Communicator* comm, const char* name, bool alone) : comm_(comm), alone_(alone && !RanksMayShareDevices()) {
  if (!comm->alive) Violation("%s on a communicator that was destroyed or aborted", name);
  if (comm->entered.exchange(true, std::memory_order_relaxed))
    Violation("%s while another thread is in a call on the communicator", name);
  if (alone_ && InDevice(comm->device).exchange(true, std::memory_order_relaxed))
    Violation("%s while another thread is in a call on a communicator of device %d", name, comm->device);
}

Call::~Call() {
  if (alone_) InDevice(comm_->device).store(false, std::memory_order_relaxed);
  comm_->entered.store(false, std::memory_order_relaxed);
}

int Begin(Communicator* comm, std::function<int()> unfinished, bool takes_time) {
  comm->unfinished = std::move(unfinished);
  comm->polls = takes_time || comm->dice.Below(3) == 0 ? 1 + comm->dice.Below(3) : 0;
  if (!comm->blocking && comm->polls > 0) return kNcclInProgress;
  comm->polls = 0;
  int result = Poll(comm);
  while (comm->blocking && result == kNcclInProgress) {
    usleep(50);
    result = Poll(comm);
  }
  return result;
}

std::string ProblemWithMemory(const Communicator& comm, const char* which, uint64_t address, size_t bytes) {
  if (bytes == 0) return "";
  const int device = Cuda().device_of_memory(address, bytes);
  if (device == comm.device) return "";
  char text[200];
  std::snprintf(text, sizeof text, "%s %#lx of %zu bytes is not memory of device %d but of %d", which, address, bytes,
                comm.device, device);
  return text;
}

std::string ProblemWith(const Config& config) {
  if (config.magic != 0xcafebeef) return "the configuration's magic number is wrong";
  if (!EndsWithAField(config.size))
    return "the configuration's " + std::to_string(config.size) + " bytes end within a field";
  if (config.version < 21400 || static_cast<int>(config.version) > NcclVersion())
    return "the configuration's version is " + std::to_string(config.version) + ", the library's " +
           std::to_string(NcclVersion());
  if (config.least_ctas != INT_MIN && config.most_ctas != INT_MIN && config.least_ctas > config.most_ctas)
    return "minCTAs exceeds maxCTAs";
  return "";
}

int Initialize(Communicator** comm, int ranks, const UniqueId& id, int rank, const Config* config, const char* name) {
  const Plan plan = Enter(name, rank >= 0 && rank < kMaxRanks ? rank : 0);
  if (plan.fails != 0) return Refuse(nullptr, plan.fails, std::string("planned failure of ") + name);
  const std::string problem = config != nullptr ? ProblemWith(*config) : "";
  if (!problem.empty()) return Refuse(nullptr, kNcclInvalidArgument, problem);
  if (ranks < 1 || ranks > kMaxRanks || rank < 0 || rank >= ranks || !IsId(id))
    return Refuse(nullptr, kNcclInvalidArgument, "no such rank or id");
  if (Cuda().current_device() < 0) return Refuse(nullptr, kNcclCudaError, "no context is current");
  *comm = Join(id.internal, rank, ranks, Cuda().current_device(), config == nullptr || config->blocking != 0);
  if (plan.hangs != 0) return (*comm)->unfinished = [] { return kNcclInProgress; }, kNcclInProgress;
  const Call call(*comm, name);
  return Begin(*comm, std::move((*comm)->unfinished), true);
}

namespace {

bool IsRegistered(const Communicator& comm, uint64_t address) {
  return std::any_of(comm.registered.begin(), comm.registered.end(), [&](const auto& memory) {
    return address >= memory.first && address < memory.first + memory.second;
  });
}

}  // namespace

int Submit(Operation operation, Communicator* comm, void* handle) {
  const char* name = NameOf(operation.kind);
  Stream* stream = nullptr;
  {
    const Call call(comm, name);
    const Plan plan = Enter(name, comm->rank);
    if (plan.fails != 0) return Refuse(comm, plan.fails, std::string("planned failure of ") + name);
    operation.hangs = plan.hangs != 0;
    operation.breaks = plan.breaks;
    if (comm->unfinished)
      return Refuse(comm, kNcclInvalidUsage, std::string(name) + " while the communicator is in progress");
    if (comm->failure != kNcclSuccess)
      return Refuse(comm, kNcclInvalidUsage, std::string(name) + " after an asynchronous error");
    const std::string problem = ProblemWith(*comm, operation);
    if (!problem.empty()) return Refuse(comm, kNcclInvalidArgument, std::string(name) + ": " + problem);
    if (operation.op >= kFirstUserOp) operation.factor = comm->user_ops[operation.op - kFirstUserOp].factor;
    operation.registered = IsRegistered(*comm, operation.kind == Kind::kSend ? operation.send : operation.recv);
    stream = Cuda().stream(handle);
    if (stream == nullptr) return Refuse(comm, kNcclInvalidUsage, std::string(name) + ": the stream is capturing");
    if (Cuda().device_of_stream(stream) != comm->device)
      return Refuse(comm, kNcclInvalidArgument, std::string(name) + ": stream of another device");
  }
  AddToGroup(comm, stream, operation);
  return group_depth > 0 ? kNcclSuccess : LaunchGroup(std::exchange(group, {}));
}

int OpenGroup() {
  ++group_depth;
  return kNcclSuccess;
}

int CloseGroup() {
  if (group_depth == 0) return Refuse(nullptr, kNcclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
  if (--group_depth > 0) return kNcclSuccess;
  for (Communicator* comm : std::exchange(aborted, {})) Reclaim(comm);
  return LaunchGroup(std::exchange(group, {}));
}

int Reclaim(Communicator* comm) {
  if (group_depth > 0) {
    if (NcclVersion() < kAbortsInGroup) Violation("ncclCommAbort in a group, which came with NCCL 2.22");
    aborted.push_back(comm);
    return kNcclSuccess;
  }
  if (!RanksMayShareDevices()) AwaitOthers(comm);
  Leave(comm);
  return kNcclSuccess;
}

}  // namespace fakes
