#include "core/context.h"

#include <pthread.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <map>

#include "base/ranks.h"
#include "base/scheduling.h"
#include "core/version.h"
#include "transport/mpi.h"

namespace ringtrain {
namespace {

constexpr Nanoseconds kSecond = INT64_C(1000000000);
constexpr Nanoseconds kMicrosecond = 1000;
// Small operations that nobody waits for yet gather this long, so that a backward pass of many small gradients costs a few
// wake-ups and not a few for each; larger ones leave at once, because their transfer is worth overlapping.
constexpr Nanoseconds kGather = 1000 * kMicrosecond;
constexpr int64_t kLeaveAtOnceBytes = 1 << 20;

constexpr Nanoseconds kShortestPoll = 20 * kMicrosecond, kLongestPoll = 500 * kMicrosecond;

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

std::string HostName() {
  char name[256] = "";
  return gethostname(name, sizeof name - 1) == 0 ? name : "unknown";
}

// What must be equal on all ranks before they can work together, as name and value.
std::vector<std::pair<std::string, std::string>> StartFacts(const Options& options) {
  return {{"ringtrain version", kVersion},
          {"RINGTRAIN_ALGORITHM", options.algorithm},
          {"RINGTRAIN_HOST_LAYOUT", options.host_layout},
          {"RINGTRAIN_CACHE_CAPACITY", std::to_string(options.cache_capacity)},
          {"RINGTRAIN_SHARED_MEMORY_BYTES", std::to_string(options.shared_memory_bytes)},
          {"RINGTRAIN_CHUNK_BYTES", std::to_string(options.chunk_bytes)},
          {"RINGTRAIN_JOIN_DIVISOR", options.join_divisor},
          {"RINGTRAIN_GPU_PLANE", options.gpu_plane},
          {"RINGTRAIN_NCCL_ALGORITHM", options.nccl_algorithm},
          {"RINGTRAIN_NCCL_COMMUNICATORS", std::to_string(options.nccl_communicators)},
          {"RINGTRAIN_NCCL_MULTI_RANK", std::to_string(options.nccl_multi_rank)},
          {"RINGTRAIN_DEVICE_CHUNK_BYTES", std::to_string(options.device_chunk_bytes)},
          {"RINGTRAIN_DEAD_AFTER_SECONDS", std::to_string(options.dead_after_seconds)}};
}

Status CompareFact(const std::string& name, const std::vector<std::string>& by_rank) {
  std::map<std::string, std::vector<int>> ranks_of;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) ranks_of[by_rank[rank]].push_back(static_cast<int>(rank));
  if (ranks_of.size() == 1) return {};
  std::string text = "init: " + name + " must be the same on all ranks, but is ";
  for (auto group = ranks_of.begin(); group != ranks_of.end(); ++group)
    text += std::string(group == ranks_of.begin() ? "" : " and ") + "'" + group->first + "' on " + RanksText(group->second);
  return Status::Mismatch(text + ". Set it alike everywhere.");
}

// alltoall without splits sends equal parts; filled in here so that it matches a rank that spells them out.
Status FillSplits(int64_t members, Request* request) {
  const std::vector<TensorSpec>& tensors = request->tensors;
  if (request->operation != Operation::kAlltoall || !request->splits.empty() || tensors.size() != 1 || tensors[0].shape.empty())
    return {};
  const int64_t rows = tensors[0].shape[0];
  if (rows % members != 0)
    return Status::InvalidArgument(request->Subject() + ": without splits the first dimension must be divisible by the " +
                                   std::to_string(members) + " members, but is " + std::to_string(rows) + ". Pass splits.");
  request->splits.assign(static_cast<size_t>(members), rows / members);
  return {};
}

}  // namespace

// ---- opening ----

Status Context::OpenInProcess(const std::shared_ptr<Hub>& hub, int rank, const std::string& options, std::shared_ptr<Context>* opened) {
  std::shared_ptr<Context> context(new Context);
  RT_TRY(Options::Parse(options, &context->options_));
  RT_TRY(Hub::Join(hub, rank, &context->transport_, &context->memory_));
  return Open(std::move(context), hub->layout(), opened);
}

Status Context::OpenMpi(const std::string& library, uintptr_t communicator, const std::string& options,
                        std::shared_ptr<Context>* opened) {
  std::shared_ptr<Context> context(new Context);
  RT_TRY(Options::Parse(options, &context->options_));
  RT_TRY(OpenMpiTransport(library, communicator, context->options_.start_timeout_seconds, &context->transport_));
  std::vector<int> layout;
  if (!context->options_.host_layout.empty())
    RT_TRY(ParseLayout(context->options_.host_layout, context->transport_->size(), &layout));
  return Open(std::move(context), layout, opened);
}

Status Context::Open(std::shared_ptr<Context> context, std::vector<int> layout, std::shared_ptr<Context>* opened) {
  Context& self = *context;
  Transport& transport = *self.transport_;
  const Options& options = self.options_;
  const Nanoseconds deadline = DeadlineAfter(options.start_timeout_seconds);
  self.devices_ = std::make_unique<DeviceTable>(options.cuda_lib);
  self.world_.rank = transport.rank();
  self.world_.size = transport.size();
  RT_TRY(self.AgreeOnStart(deadline));

  if (self.memory_ == nullptr) {
    auto window_size = [&](const World& world) {
      std::vector<int> everyone;
      for (int rank = 0; rank < world.size; ++rank) everyone.push_back(rank);
      const Topology topology = TopologyFor(world, options, everyone);
      return GeometryFor(topology, options).Bytes(topology.local_count());
    };
    RT_TRY(MeetOnHosts(transport, layout, window_size, deadline, &self.log_, &self.world_, &self.memory_));
  } else {
    std::vector<std::string> keys;
    for (size_t host = 0; host < layout.size(); ++host) keys.insert(keys.end(), layout[host], std::to_string(host));
    GroupByHost(keys, &self.world_);
  }
  if (options.algorithm == "shared_memory" && self.world_.hosts.size() > 1)
    return Status::InvalidArgument("option algorithm: shared_memory needs all ranks on one host, but found " +
                                   std::to_string(self.world_.hosts.size()) + " hosts. Use auto or hierarchical.");

  transport.SetDoorbell(&self.doorbell());
  self.ChooseSpin();
  self.coordinator_ = std::make_unique<Coordinator>(self.world_, options, &transport, self.memory_.get(), &self.table_,
                                                    &self.process_sets_, &self.counters_, &self.lateness_, &self.timeline_, &self.log_);
  if (!options.timeline.empty()) RT_TRY(self.StartTimeline(options.timeline));
  self.thread_ = std::thread(&Context::RunThread, &self);
  *opened = std::move(context);
  return {};
}

// Every rank compares the same facts in the same order, so all raise the same text or none does.
Status Context::AgreeOnStart(Nanoseconds deadline) {
  Encoder encoder;
  uint32_t epoch = 0;
  if (getrandom(&epoch, sizeof epoch, 0) != sizeof epoch) epoch = static_cast<uint32_t>(Now());
  encoder.Unsigned(epoch);
  encoder.Text(HostName());
  for (const auto& fact : StartFacts(options_)) encoder.Text(fact.second);
  std::vector<std::string> texts;
  RT_TRY(AllgatherTexts(*transport_, encoder.Take(), deadline, &texts));

  std::vector<Decoder> decoders;
  for (const std::string& text : texts) decoders.emplace_back(text);
  for (size_t rank = 0; rank < decoders.size(); ++rank) {
    uint32_t theirs = static_cast<uint32_t>(decoders[rank].Unsigned());
    if (rank == 0) world_.epoch = theirs;
    world_.host_names.push_back(decoders[rank].Text());
  }
  for (const auto& fact : StartFacts(options_)) {
    std::vector<std::string> by_rank;
    for (Decoder& decoder : decoders) by_rank.push_back(decoder.Text());
    RT_TRY(CompareFact(fact.first, by_rank));
  }
  return {};
}

void Context::ChooseSpin() {
  constexpr int64_t kBriefly = 20;
  int64_t microseconds = options_.spin_microseconds;
  if (microseconds < 0) microseconds = world_.local_size() <= UsableCores() ? kBriefly : 0;
  spin_ = microseconds * kMicrosecond;
}

Context::~Context() { Close(); }

// ---- submitting and waiting ----

Status Context::CheckSubmission(const Submission& submission, const std::vector<int>& members) const {
  const Request& request = submission.request;
  if (request.name.empty()) return Status::InvalidArgument(std::string(Text(request.operation)) + ": the name must not be empty.");
  if (members.empty())
    return Status::InvalidArgument(request.Subject() + ": process set " + std::to_string(submission.process_set) + " does not exist.");
  const bool of_world = request.operation == Operation::kAddProcessSet || request.operation == Operation::kRemoveProcessSet;
  if (of_world && submission.process_set != 0)
    return Status::InvalidArgument(request.Subject() + ": all ranks of the world take part, but it was submitted to process set " +
                                   std::to_string(submission.process_set) + ". Submit it to process set 0.");
  if (!std::binary_search(members.begin(), members.end(), world_.rank))
    return Status::InvalidArgument(request.Subject() + ": rank " + std::to_string(world_.rank) + " is not in process set " +
                                   std::to_string(submission.process_set) + ", which has " + RanksText(members) +
                                   ". Only its members may take part.");
  return {};
}

Status Context::CheckAddition(const Request& request) const {
  if (process_sets_.count() < Group::kMostGroups) return {};
  return Status::InvalidArgument(request.Subject() + ": there may be " + std::to_string(Group::kMostGroups) +
                                 " process sets at a time, but there are as many. Remove one first.");
}

Status Context::CheckRemoval(const Request& request) const {
  const int process_set = request.splits.empty() ? 0 : static_cast<int>(request.splits[0]);
  if (process_set == 0) return Status::InvalidArgument(request.Subject() + ": process set 0 is the world and cannot be removed.");
  if (process_sets_.Members(process_set).empty())
    return Status::InvalidArgument(request.Subject() + ": process set " + std::to_string(process_set) + " does not exist.");
  if (table_.Pending(process_set))
    return Status::InvalidArgument(request.Subject() + ": rank " + std::to_string(world_.rank) +
                                   " has operations pending in it. Wait for them first.");
  return {};
}

Status Context::AllocateOn(int device, size_t bytes, void** memory) {
  std::shared_ptr<Device> found;
  RT_TRY(devices_->Find(device, &found));
  return found->Allocate(bytes, memory);
}

Status Context::ReadFrom(int device, void* stream, const void* from, size_t bytes, void* to) {
  std::shared_ptr<Device> found;
  RT_TRY(devices_->Find(device, &found));
  return found->Read(static_cast<CUstream>(stream), from, bytes, to);
}

Status Context::MarkReady(Submission* submission) {
  const std::string subject = submission->request.Subject() + ": ";
  std::shared_ptr<Device>& device = submission->handle->device;
  Status status = devices_->Find(submission->request.device, &device);
  if (!status.ok()) return {status.code(), subject + status.message()};
  InContext current(*device);
  for (CUstream stream : submission->streams) {
    int capturing = 0;
    RT_TRY(device->Check(device->driver().StreamIsCapturing(stream, &capturing), subject + "cuStreamIsCapturing"));
    if (capturing != 0)
      return Status::Unsupported(subject + "expected a stream that runs but found one that a CUDA graph is captured from: ranks agree on "
                                           "the host, which a graph cannot hold. Communicate outside of the capture.");
    std::shared_ptr<DeviceEvent> event;
    RT_TRY(DeviceEvent::Record(device, stream, &event));
    submission->ready.push_back(std::move(event));
  }
  return {};
}

Status Context::Submit(std::shared_ptr<Submission> submission, const std::string& refusal, bool caller_waits) {
  RT_TRY(table_.closed());
  Request& request = submission->request;
  const int process_set = submission->process_set;
  const std::vector<int> members = process_sets_.Members(process_set);
  RT_TRY(CheckSubmission(*submission, members));
  Status status;
  if (!refusal.empty()) {
    status = Status::InvalidArgument(refusal);
  } else {
    status = FillSplits(static_cast<int64_t>(members.size()), &request);
    if (status.ok()) status = Check(request, members);
    if (status.ok() && request.operation == Operation::kAddProcessSet) status = CheckAddition(request);
    if (status.ok() && request.operation == Operation::kRemoveProcessSet) status = CheckRemoval(request);
    if (status.ok() && request.device >= 0) status = MarkReady(submission.get());
  }
  if (status.ok()) {
    submission->submitted = Now();
    const bool calls_back = submission->done != nullptr;
    const int64_t bytes = static_cast<int64_t>(request.bytes());
    RT_TRY(table_.Add(std::move(submission)));
    Announce(caller_waits, calls_back, bytes);
  } else {
    table_.AddRefusal(process_set, {request.name, status.code(), status.message()});
    Announce(false, true, 0);
  }
  return status;
}

// Gets the news taken: at once, or by whoever has promised to look soon.
void Context::Announce(bool caller_waits, bool urgent, int64_t bytes) {
  urgent |= gathered_bytes_.fetch_add(bytes) + bytes >= kLeaveAtOnceBytes;
  std::atomic_thread_fence(std::memory_order_seq_cst);  // the news before the promise: see StopLooking
  if (!urgent && !caller_waits && Now() < looks_by_.load(std::memory_order_relaxed)) return;
  gathered_bytes_.store(0);
  if (driven_.load(std::memory_order_seq_cst))
    doorbell().Ring();
  else if (!caller_waits)
    WakeThread(urgent);
}

void Context::Wait(Handle& handle, Nanoseconds deadline) {
  if (handle.done()) return;
  const Nanoseconds begin = Now();
  WaitOn(handle, deadline);
  counters_.Add(Counter::kWaitNanoseconds, Now() - begin);
}

void Context::WaitOn(Handle& handle, Nanoseconds deadline) {
  while (!handle.done() && Now() < deadline) {
    if (stop_.load() || !drive_mutex_.TryLock()) {
      // Somebody drives, or Close will end it. Should the driver be about to stop, the context's thread takes over.
      if (table_.has_news()) doorbell().Ring();
      WakeThread(true);
      handle.Sleep(deadline);
      continue;
    }
    Drive([&] { return handle.done() || stop_.load(); }, deadline);
    StopLooking();
    const bool more = coordinator_->HasWork();
    drive_mutex_.Unlock();
    if (more) WakeThread(true);
  }
}

// ---- driving ----

template <typename Finished>
void Context::Drive(Finished finished, Nanoseconds deadline) {
  driven_.store(true, std::memory_order_seq_cst);
  Nanoseconds poll = kShortestPoll, spin_until = 0;
  while (!finished()) {
    const bool news = table_.has_news();
    if (coordinator_->Step()) {
      if (news) looks_by_.store(Now() + 2 * kGather, std::memory_order_relaxed);
      poll = kShortestPoll;
      spin_until = 0;
      continue;
    }
    const Nanoseconds now = Now();
    if (now >= deadline) break;
    if (spin_ > 0) {
      if (spin_until == 0) spin_until = now + spin_;
      if (now < spin_until) {
        Pause();
        continue;
      }
    }
    Nanoseconds until = std::min({deadline, coordinator_->next_timer(), now + kSecond});
    if (coordinator_->MustPoll()) {
      until = std::min(until, now + poll);
      poll = std::min(poll * 2, kLongestPoll);
    }
    const Nanoseconds looks_by = looks_by_.load(std::memory_order_relaxed);
    if (now < looks_by)
      until = std::min(until, looks_by);
    else
      StopLooking();
    const uint32_t ticket = doorbell().PrepareSleep();
    if (finished() || coordinator_->Step()) {
      doorbell().CancelSleep();
      continue;
    }
    timeline_.Flush();
    doorbell().Sleep(ticket, until);
    counters_.Add(Counter::kWakeups, 1);
  }
  driven_.store(false, std::memory_order_seq_cst);
}

void Context::RunThread() {
  pthread_setname_np(pthread_self(), "ringtrain");
  RunPromptly();
  LifeSign& life = memory_->control().place(world_.local_rank()).life;
  life.Begin();
  while (!stop_.load()) {
    const uint32_t ticket = parked_.load(std::memory_order_acquire);
    Nanoseconds idle_period = 0;
    {
      MutexLock lock(drive_mutex_);
      Coordinator& coordinator = *coordinator_;
      coordinator.Step();
      Drive([&] { return stop_.load() || !coordinator.HasWork(); }, kNever);
      timeline_.Flush();
      StopLooking();
      idle_period = coordinator.idle_period();
      if (coordinator.HasWork()) continue;  // from one who still saw this thread drive and did not wake it
    }
    if (stop_.load()) break;
    FutexWait(&parked_, ticket, Now() + idle_period);
    counters_.Add(Counter::kWakeups, 1);
    Gather();
  }
  // Close serves the others from here on: they still need this rank, and must hear if it dies or stops.
  for (uint32_t ticket; ticket = parked_.load(std::memory_order_acquire), !left_.load();) FutexWait(&parked_, ticket, kNever);
  life.End();
}

// Woken by a small submission: gives those that follow it the time to come along, unless somebody calls for the thread.
void Context::Gather() {
  const uint32_t ticket = parked_.load(std::memory_order_acquire);
  if (!table_.has_news() || urgent_.exchange(false) || stop_.load()) return;
  const Nanoseconds until = Now() + kGather;
  looks_by_.store(until, std::memory_order_relaxed);
  FutexWait(&parked_, ticket, until);
  if (driven_.load(std::memory_order_seq_cst)) doorbell().Ring();  // a waiter drives by now: it looks in our place
}

// Takes the promise back. Whoever calls this looks for news afterwards, since a submitter may have relied on it just before.
void Context::StopLooking() {
  looks_by_.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

void Context::WakeThread(bool urgent) {
  if (urgent) urgent_.store(true);
  parked_.fetch_add(1, std::memory_order_release);
  FutexWake(&parked_, 1);
}

// ---- ending ----

void Context::Abort(const std::string& cause) {
  coordinator_->RequestAbort(cause);
  doorbell().Ring();
  WakeThread(true);
}

void Context::LongPhase(double seconds) {
  coordinator_->RequestLongPhase(static_cast<Nanoseconds>(std::max(0.0, seconds) * 1e9));
  doorbell().Ring();
  WakeThread(true);
}

Status Context::Close(double seconds) {
  MutexLock once(close_mutex_);
  if (std::exchange(closed_, true) || coordinator_ == nullptr) return {};
  stop_.store(true);
  doorbell().Ring();
  WakeThread(true);

  Nanoseconds deadline = DeadlineAfter(seconds);
  Leave(&deadline);
  left_.store(true);
  WakeThread(true);
  if (thread_.joinable()) thread_.join();

  MutexLock lock(drive_mutex_);
  const double remaining = std::max<double>(0, static_cast<double>(deadline - Now()) / kSecond);
  transport_->SetDoorbell(nullptr);
  transport_->Close(coordinator_->closed_cleanly(), remaining);
  const Status ended = table_.closed();
  // Only now may the tensors go back to their owners: nothing moves any more.
  table_.Close(Status::Closed("rank " + std::to_string(world_.rank) + " has called shutdown(); call init() to start again."));
  timeline_.Stop();
  return ended.code() == StatusCode::kClosed ? Status() : ended;
}

// Serves the others until all have said goodbye, or until the deadline, and delivers what is said last; lowers the deadline for that.
void Context::Leave(Nanoseconds* deadline) {
  MutexLock lock(drive_mutex_);
  Coordinator& coordinator = *coordinator_;
  coordinator.HeedAbort();  // requested just before this: the others shall hear the cause, and no goodbye that overtakes it
  if (table_.closed().ok()) {
    coordinator.SayGoodbye();
    Drive([&] { return coordinator.ready_to_close() || !table_.closed().ok(); }, *deadline);
    if (table_.closed().ok()) coordinator.GiveUpWaiting();
  }
  // Whoever waited for long need not wait long for that.
  *deadline = std::min(*deadline, DeadlineAfter(options_.shutdown_timeout_seconds));
  if (table_.closed().ok())
    Drive([&] { return !coordinator.HasWork() || !coordinator.MustPoll() || !table_.closed().ok(); }, *deadline);
}

Status Context::StartTimeline(const std::string& path) {
  std::string file = path;
  const std::string rank = std::to_string(world_.rank);
  const size_t place = file.find("{rank}");
  if (place != std::string::npos)
    file.replace(place, 6, rank);
  else
    file += "." + rank;
  return timeline_.Start(file, world_.rank, options_.timeline_events);
}

Status Context::StopTimeline() { return timeline_.Stop(); }

}  // namespace ringtrain
