#include "core/coordinator.h"

#include <signal.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace ringtrain {
namespace {

// MPI moves data only inside its calls, so a rank between hosts stays awake this long after its last work.
constexpr Nanoseconds kLinger = 10 * INT64_C(1000000);

// With a request for stacks: on a busy machine Python needs a while for it, and faulthandler beside running threads may crash.
constexpr Nanoseconds kPatience = 5 * INT64_C(1000000000);
constexpr int kMostFrames = 64;  // taken in one step

}  // namespace

Coordinator::Coordinator(const World& world, const Options& options, Transport* transport, HostMemory* memory,
                         SubmissionTable* table, ProcessSetTable* process_sets, Counters* counters, LatenessTable* lateness,
                         Timeline* timeline, Log* log)
    : world_(world),
      options_(options),
      transport_(transport),
      memory_(memory),
      table_(table),
      process_sets_(process_sets),
      counters_(counters),
      lateness_(lateness),
      log_(log),
      mail_(transport, memory, world.my_host()),
      executor_(world, options, transport, memory, table, counters, timeline, log),
      protocol_(world, options, this) {}

Coordinator::~Coordinator() = default;

bool Coordinator::Step() {
  bool moved = false;
  HeedAbort();
  protocol_.LookForTheDead(Now());
  InsistOnStacks();
  CheckLongPhase();
  TakeSubmissions(&moved);
  ReceiveMail(&moved);
  moved |= protocol_.Tick(Now());
  AdvanceBatches(&moved);
  if (moved) last_active_ = Now();
  return moved;
}

void Coordinator::TakeSubmissions(bool* moved) {
  SubmissionTable::News news;
  if (!table_->TakeNews(&news)) return;
  *moved = true;
  for (auto& refusal : news.refusals) protocol_.Refused(Now(), refusal.first, std::move(refusal.second));
  for (const auto& submission : news.submissions) {
    if (protocol_.Knows(submission->process_set))
      protocol_.Submitted(Now(), submission->process_set, submission->request);
    else
      table_->Finish(submission, Status::InvalidArgument(submission->request.Subject() + ": process set " +
                                                         std::to_string(submission->process_set) + " has been removed."));
  }
}

void Coordinator::ReceiveMail(bool* moved) {
  for (int count = 0; count < kMostFrames; ++count) {
    int from;
    std::string bytes;
    bool arrived;
    Status status = mail_.Receive(&from, &bytes, &arrived);
    if (!status.ok()) return Abort(status);
    if (!arrived) return;
    Frame frame;
    if (!Frame::Decode(bytes, &frame))
      return Abort(Status::Internal("a frame of " + std::to_string(bytes.size()) + " bytes from rank " + std::to_string(from) +
                                    " cannot be read."));
    *moved |= frame.type != FrameType::kBeat;  // which is no reason to stay awake
    if (frame.epoch != world_.epoch)
      counters_->Add(Counter::kStaleFrames, 1);
    else
      protocol_.Arrived(Now(), from, std::move(frame));
  }
}

void Coordinator::AdvanceBatches(bool* moved) {
  if (!executor_.busy() || protocol_.aborted()) return;  // after an abort the tensors belong to their owners again
  std::vector<int> finished;
  const Status status = executor_.Advance(moved, &finished);
  for (int process_set : finished) protocol_.BatchFinished(Now(), process_set);
  if (!finished.empty()) *moved |= protocol_.Tick(Now());
  if (!status.ok()) Abort(status);
}

void Coordinator::CheckLongPhase() {
  if (long_phase_.load(std::memory_order_relaxed) < 0) return;  // each step looks: an exchange costs as much as the rest of it
  protocol_.LongPhase(Now(), long_phase_.exchange(-1, std::memory_order_acquire));
}

// ---- what the protocol decides ----

void Coordinator::Start(int process_set, const effect::Execute& batch) {
  const Status status = executor_.Start(process_set, batch);
  if (!status.ok()) Abort(status);
}

void Coordinator::Finish(int process_set, const effect::Execute& control) {
  const Response& response = control.responses[0];
  const auto submission = table_->Find(process_set, response.request.name);
  if (submission == nullptr) return;
  submission->handle->result = response.result;
  counters_->Add(Counter::kOperations, 1);
  table_->Finish(submission, Status());
}

void Coordinator::Fail(int process_set, const std::string& name, const Status& status) {
  if (auto submission = table_->Find(process_set, name)) table_->Finish(submission, status);
}

void Coordinator::Warn(const std::string& text) {
  log_->Warning(text);
  Ask('l');  // this rank's program may be busy with something else, and others wait to know
}

void Coordinator::Count(int, const effect::Count& count) {
  counters_->Add(Counter::kCacheHits, count.hits);
  counters_->Add(Counter::kCacheMisses, count.misses);
  if (!count.late.empty()) lateness_->Add(count.late);
}

void Coordinator::AddProcessSet(int process_set, const std::vector<int>& members) {
  const int lane = process_sets_->Add(process_set, members);
  if (std::binary_search(members.begin(), members.end(), world_.rank)) executor_.AddGroup(process_set, lane, members);
}

void Coordinator::RemoveProcessSet(int process_set) {
  process_sets_->Remove(process_set);
  executor_.RemoveGroup(process_set);
}

void Coordinator::Send(int rank, Frame frame) {
  frame.epoch = world_.epoch;
  std::string bytes = frame.Encode();
  if (rank != world_.rank && frame.type != FrameType::kBeat) {
    counters_->Add(Counter::kFramesSent, 1);
    counters_->Add(Counter::kFrameBytesSent, static_cast<int64_t>(bytes.size()));
  }
  Status status = mail_.Send(rank, std::move(bytes));
  if (!status.ok() && frame.type != FrameType::kAbort) Abort(status);
}

// ---- what the driver asks ----

bool Coordinator::HasWork() const {
  if (protocol_.aborted()) return false;
  if (table_->has_news() || executor_.busy() || mail_.Busy() || protocol_.pending()) return true;
  return MustPoll() && (transport_->Busy() || Now() - last_active_ < kLinger);
}

bool Coordinator::MustPoll() const {
  if (mail_.Busy() || executor_.MustPoll()) return true;
  return !transport_->RingsDoorbell() && (world_.hosts.size() > 1 || transport_->Busy());
}

// ---- the end ----

void Coordinator::SayGoodbye() {
  bool moved = false;
  TakeSubmissions(&moved);
  protocol_.SayGoodbye(Now());
}

void Coordinator::GiveUpWaiting() {
  if (closed_cleanly() && !executor_.busy()) return;
  if (executor_.busy())
    return Abort(Status::Closed("rank " + std::to_string(world_.rank) +
                                " called shutdown() and left with operations under way. Wait for them before shutdown()."));
  bool moved = false;
  TakeSubmissions(&moved);
  protocol_.GiveUpWaiting(Now());
}

std::string Coordinator::RequestedCause() {
  MutexLock lock(request_mutex_);
  return requested_cause_;
}

void Coordinator::RequestAbort(const std::string& cause) {
  MutexLock lock(request_mutex_);
  if (abort_requested_.load(std::memory_order_relaxed)) return;
  requested_cause_ = cause;
  abort_requested_.store(true, std::memory_order_release);
}

bool Coordinator::Ask(char what) {
  const int pipe = requests_pipe_.load();
  return pipe >= 0 && write(pipe, &what, 1) == 1;
}

void Coordinator::ShowStacks(const std::string& awaited) {
  if (requests_pipe_.load() < 0 || options_.stack_signal == 0) return;
  const std::string text = "ringtrain: the other ranks wait for " + awaited + ", which rank " + std::to_string(world_.rank) +
                           " has not submitted. Its Python is here:\n";
  if (write(STDERR_FILENO, text.data(), text.size()) < 0) return;
  if (Ask('s')) insist_on_stacks_at_ = Now() + kPatience;
}

// A signal's handler needs no lock of the interpreter, which a busy thread may keep. Without a handler it would end the process.
void Coordinator::InsistOnStacks() {
  if (insist_on_stacks_at_ == kNever || Now() < insist_on_stacks_at_) return;
  insist_on_stacks_at_ = kNever;
  int unread = 0;
  if (ioctl(requests_pipe_.load(), FIONREAD, &unread) != 0 || unread == 0) return;
  struct sigaction action;
  const int number = static_cast<int>(options_.stack_signal);
  if (sigaction(number, nullptr, &action) == 0 && action.sa_handler != SIG_DFL && action.sa_handler != SIG_IGN) kill(getpid(), number);
}

void Coordinator::HeedAbort() {
  if (protocol_.aborted()) return;
  AbortNotice& notice = memory_->control().abort;
  if (notice.state.load(std::memory_order_acquire) == AbortNotice::kSet)
    Abort(Status::PeerLost(notice.text));
  else if (abort_requested_.load(std::memory_order_acquire))
    Abort(Status::PeerLost(RequestedCause()));
}

Status Coordinator::NoteCause(const Status& cause) {
  AbortNotice& notice = memory_->control().abort;
  uint32_t state = AbortNotice::kNone;
  if (notice.state.compare_exchange_strong(state, AbortNotice::kWriting)) {
    std::strncpy(notice.text, cause.message().c_str(), sizeof notice.text - 1);
    notice.state.store(AbortNotice::kSet, std::memory_order_release);
    return cause;
  }
  // Who was writing may have died of it.
  return notice.state.load(std::memory_order_acquire) == AbortNotice::kSet ? Status::PeerLost(notice.text) : cause;
}

void Coordinator::End(const Status& cause) {
  transport_->Abandon();
  executor_.Abandon(cause);
  table_->Close(cause);
}

}  // namespace ringtrain
