#include "run/coordinator.h"

#include <signal.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

namespace ringtrain {
namespace {

// MPI moves data only inside its calls, so a rank between hosts stays awake this long after its last work.
constexpr Nanoseconds kLinger = 10 * INT64_C(1000000);

// With a request for stacks: on a busy machine Python needs a while for it, and faulthandler beside running threads may
// crash.
constexpr Nanoseconds kPatience = 5 * INT64_C(1000000000);
constexpr int kMaxFrames = 64;  // taken in one step
constexpr Nanoseconds kStallPeriod = INT64_C(500000000);

}  // namespace

Coordinator::Coordinator(const World& world, const Options& options, Wire& wire, const Progress& progress,
                         HostMemory* memory, SubmissionTable* table, Residuals* residuals,
                         ProcessSetTable* process_sets, Counters* counters, LatenessTable* lateness, Timeline* timeline,
                         TrafficTable* traffic, Log* log, Writer* writer)
    : world_(world),
      options_(options),
      wire_(wire),
      progress_(progress),
      memory_(memory),
      table_(table),
      process_sets_(process_sets),
      counters_(counters),
      lateness_(lateness),
      log_(log),
      writer_(writer),
      flight_file_(options, world.rank),
      mail_(wire, memory, world.my_host()),
      board_(world, memory),
      executor_(world, options, wire, memory, table, residuals, counters, timeline, traffic, log),
      protocol_(world, options),
      no_memory_(Status::Internal(
          "rank " + std::to_string(world.rank) +
          ": its memory must suffice for the operations under way, but has run out. Start fewer ranks on its "
          "host, or send less at a time.")) {
  protocol_.Begin(Now(), &effects_);
  CarryOut();
}

Coordinator::~Coordinator() = default;

// Nobody above a driver could take an exception: it would end the process without a word.
template <typename Action>
void Coordinator::Guarded(Action action) {
  try {
    action();
  } catch (const std::bad_alloc&) {
    EndForLackOfMemory();
  }
}

bool Coordinator::Step() {
  bool moved = true;
  Guarded([&] { moved = TryStep(); });
  return moved;
}

void Coordinator::EndForLackOfMemory() {
  effects_.clear();
  carried_out_.clear();  // one of them has thrown
  bool told = false;
  try {
    Abort(no_memory_);
    told = true;
  } catch (const std::bad_alloc&) {
    effects_.clear();
    carried_out_.clear();
  }
  const bool goes_on = told && protocol_.awaits_last_words();
  if (!goes_on && table_->closed().ok()) EndHere();
}

// What takes no memory: the ranks of this host read why, and this rank's operations fail. Those of other hosts lose a
// rank that does not beat any more.
void Coordinator::EndHere() {
  try {
    protocol_.Abort(no_memory_, &effects_);
  } catch (const std::bad_alloc&) {  // it knows already
  }
  effects_.clear();
  WriteNotice(no_memory_.message().c_str());
  try {
    wire_.Abandon();
    executor_.Abandon(no_memory_);
  } catch (const std::bad_alloc&) {  // tensors may be written that belong to their owners
    constexpr char kText[] =
        "ringtrain: no memory is left to end the world in an orderly way; this process ends here.\n";
    [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, kText, sizeof kText - 1);
    std::abort();
  }
  table_->Close(no_memory_);
}

bool Coordinator::TryStep() {
  bool moved = false;
  HeedAbort();
  LookForTheDead();
  InsistOnStacks();
  RecordStall();
  CheckLongPhase();
  TakeSubmissions(&moved);
  LookAtPromises(&moved);
  if (ReceiveMail(&moved)) AwaitLastWords();
  moved |= Tick();
  AdvanceBatches(&moved);
  if (moved) last_active_ = Now();
  return moved;
}

void Coordinator::TakeSubmissions(bool* moved) {
  SubmissionTable::News news;
  if (!table_->TakeNews(&news)) return;
  *moved = true;
  for (auto& refusal : news.refusals) protocol_.Refused(Now(), refusal.first, std::move(refusal.second), &effects_);
  const Nanoseconds now = Now();
  for (const auto& submission : news.submissions) {
    submission->announced.store(now, std::memory_order_relaxed);
    if (protocol_.Knows(submission->process_set))
      protocol_.Submitted(now, submission->process_set, submission->request, &effects_);
    else
      table_->Finish(submission,
                     Status::InvalidArgument(submission->request.Subject() + ": process set " +
                                             std::to_string(submission->process_set) + " has been removed."));
  }
  CarryOut();
}

// Of the other ranks of this host, in process sets that run by a schedule.
void Coordinator::LookAtPromises(bool* moved) {
  if (protocol_.aborted()) return;
  protocol_.ForEachWatched(
      [&](int process_set, const std::vector<int>& ranks) { *moved |= board_.Look(process_set, ranks); });
  for (int process_set : board_.TakeChanged()) protocol_.Seen(Now(), process_set, board_.seen(process_set), &effects_);
  CarryOut();
}

// False if there may be more.
bool Coordinator::ReceiveMail(bool* moved) {
  if (!TakeMail(moved)) return false;
  bool all = true;
  LostPeer lost;
  while (wire_.TakeLostPeer(&lost)) {
    all = TakeMail(moved);  // a rank of this host may have put its last frame into the mailbox since
    protocol_.ConnectionLost(lost, &effects_);
    CarryOut();
  }
  return all;
}

// False if there may be more.
bool Coordinator::TakeMail(bool* moved) {
  for (int count = 0; count < kMaxFrames; ++count) {
    int from;
    std::string bytes;
    bool arrived;
    Status status = mail_.Receive(&from, &bytes, &arrived);
    if (!status.ok()) Abort(status);
    if (!status.ok() || !arrived) return true;
    Frame frame;
    if (!Frame::Decode(bytes, &frame)) {
      Abort(Status::Internal("a frame of " + std::to_string(bytes.size()) + " bytes from rank " + std::to_string(from) +
                             " cannot be read."));
      return true;
    }
    *moved |= frame.type != FrameType::kBeat;  // which is no reason to stay awake
    if (frame.epoch != world_.epoch)
      counters_->Add(Counter::kStaleFrames, 1);
    else
      protocol_.Arrived(Now(), from, std::move(frame), &effects_);
    CarryOut();
  }
  return false;
}

void Coordinator::AdvanceBatches(bool* moved) {
  if (!executor_.busy() || protocol_.aborted()) return;  // after an abort the tensors belong to their owners again
  std::vector<int> finished;
  const Status status = executor_.Advance(moved, &finished);
  for (int process_set : finished) protocol_.BatchFinished(Now(), process_set, &effects_);
  CarryOut();
  if (!finished.empty()) *moved |= Tick();
  if (!status.ok()) Abort(status);
}

void Coordinator::AwaitLastWords() {
  if (!protocol_.awaits_last_words()) return;
  protocol_.MailTaken(Now(), &effects_);
  CarryOut();
}

void Coordinator::CheckLongPhase() {
  if (long_phase_.load(std::memory_order_relaxed) < 0)
    return;  // each step looks: an exchange costs as much as the rest of it
  protocol_.LongPhase(Now(), long_phase_.exchange(-1, std::memory_order_acquire), &effects_);
  CarryOut();
}

void Coordinator::LookForTheDead() {
  const Nanoseconds now = Now();
  if (now < protocol_.next_look()) return;
  const bool ran = !protocol_.aborted();
  protocol_.AwaitStateFrom(joins_from_.load(std::memory_order_relaxed));
  protocol_.Look(now, Signs(), &effects_);
  if (ran) NoteSilent(now);
  CarryOut();
}

// The launcher may stop this world at any moment, for what another rank has found before this one.
void Coordinator::NoteSilent(Nanoseconds now) {
  MutexLock lock(request_mutex_);
  suspects_.unheard = protocol_.Unheard(now);
  looked_at_ = now;
  if (protocol_.aborted()) suspects_.silent = protocol_.Silent(now);
}

Suspects Coordinator::suspects() {
  MutexLock lock(request_mutex_);
  Suspects found = suspects_;
  // It wakes just now: its driver has not looked yet.
  if (looked_at_ != kNever && protocol_.IsMissed(Now() - looked_at_)) found.unheard = {world_.rank};
  return found;
}

SignsOfLife Coordinator::Signs() const {
  SignsOfLife signs(world_.host_of.size());
  for (int rank = 0; rank < world_.size; ++rank) signs[rank].count = wire_.arrivals(rank);
  for (int rank : world_.my_host()) signs[rank] = {life(rank).left(), Died(rank), life(rank).beats()};
  return signs;
}

// Of a process that has ended it is settled whether its rank had left.
bool Coordinator::Died(int rank) const {
  return life(rank).Died() || (memory_->HasEnded(world_.local_rank_of[rank]) && !life(rank).left());
}

bool Coordinator::Tick() {
  RemoveProcessSets();
  const bool moved = protocol_.Tick(Now(), &effects_);
  CarryOut();
  return moved;
}

void Coordinator::RemoveProcessSets() {
  for (int process_set : std::exchange(removals_, {})) {
    if (executor_.busy(process_set)) {
      removals_.push_back(process_set);
      continue;
    }
    process_sets_->Remove(process_set);
    executor_.RemoveGroup(process_set);
    board_.Remove(process_set);
    protocol_.ProcessSetRemoved(Now(), process_set, &effects_);
  }
}

// ---- what the protocol decides ----

void Coordinator::CarryOut() {
  while (!effects_.empty()) {
    carried_out_.swap(effects_);  // what follows comes into the other list
    for (RankEffect& effect : carried_out_) std::visit([&](auto& what) { CarryOut(what); }, effect);
    carried_out_.clear();
    RemoveProcessSets();
  }
}

void Coordinator::CarryOut(rank_effect::Start& start) {
  if (protocol_.aborted()) return;
  if (start.batch.scheduled) counters_->Add(Counter::kScheduledBatches, 1);
  const Status status = executor_.Start(start.process_set, std::move(start.batch));
  if (!status.ok()) protocol_.Abort(status, &effects_);
}

// Written before it looks: of two ranks that do so at the same time one at least sees both.
void Coordinator::CarryOut(rank_effect::Promise& promise) {
  if (!protocol_.Knows(promise.process_set)) return;  // it has gone since
  board_.Write(promise.process_set, promise.sign);
  protocol_.ForEachWatched([&](int process_set, const std::vector<int>& ranks) {
    if (process_set == promise.process_set) board_.Look(process_set, ranks);
  });
  for (int process_set : board_.TakeChanged()) protocol_.Seen(Now(), process_set, board_.seen(process_set), &effects_);
}

void Coordinator::CarryOut(rank_effect::Finish& finish) {
  const Response& response = finish.control.responses[0];
  const auto submission = table_->Find(finish.process_set, response.request.name);
  if (submission == nullptr) return;
  submission->handle->result = response.result;
  counters_->Add(Counter::kOperations, 1);
  table_->Finish(submission, Status());
}

void Coordinator::CarryOut(rank_effect::Fail& fail) {
  if (!fail.missing.empty()) {
    MutexLock lock(request_mutex_);
    suspects_.missing = fail.missing;
  }
  if (auto submission = table_->Find(fail.process_set, fail.name)) table_->Finish(submission, fail.status);
}

void Coordinator::CarryOut(rank_effect::Count& count) {
  counters_->Add(Counter::kCacheHits, count.count.hits);
  counters_->Add(Counter::kCacheMisses, count.count.misses);
  if (!count.count.late.empty()) lateness_->Add(count.count.late);
}

void Coordinator::CarryOut(rank_effect::AddProcessSet& added) {
  const int lane = process_sets_->Add(added.process_set, added.members);
  board_.Add(added.process_set, lane);
  if (std::binary_search(added.members.begin(), added.members.end(), world_.rank))
    executor_.AddGroup(added.process_set, lane, added.members);
}

void Coordinator::CarryOut(rank_effect::End& end) {
  {
    MutexLock lock(request_mutex_);
    looked_at_ = kNever;  // nor will it look again
  }
  std::string record = FlightRecord(end.cause.message());  // while what is pending is so
  wire_.Abandon();
  executor_.Abandon(end.cause);
  table_->Close(end.cause);
  LeaveFlightRecord(std::move(record));
}

void Coordinator::CarryOut(rank_effect::ShowStacks& show) {
  LeaveFlightRecord(FlightRecord("the other ranks wait for " + show.awaited + "."));
  ShowStacks(show.awaited);
}

// ---- the flight record ----

// "" if none is wanted.
std::string Coordinator::FlightRecord(const std::string& because) const {
  if (!flight_file_.wanted()) return "";
  try {
    return FlightRecordText(world_, process_sets_->All(), table_->Flown(), because);
  } catch (const std::bad_alloc&) {  // the end is more important
    return "";
  }
}

void Coordinator::LeaveFlightRecord(std::string record) {
  if (!record.empty()) flight_file_.Write(std::move(record), writer_, log_);
}

// Each rank that waits does so by its own clock: the coordinator tells those alone that are waited for.
void Coordinator::RecordStall() {
  if (!flight_file_.wanted() || protocol_.aborted()) return;
  const Nanoseconds now = Now();
  if (now < looks_for_stalls_) return;
  looks_for_stalls_ = now + kStallPeriod;
  const std::shared_ptr<Submission> oldest = table_->Oldest();
  if (oldest == nullptr || oldest->number == stalled_ || oldest->request.operation == Operation::kJoin) return;
  if (static_cast<double>(now - oldest->submitted) / 1e9 < options_.stall_warning_seconds) return;
  stalled_ = oldest->number;
  LeaveFlightRecord(FlightRecord(oldest->request.Subject() + " has waited for stall_warning_seconds."));
}

void Coordinator::SendFrame(int rank, Frame frame) {
  frame.epoch = world_.epoch;
  std::string bytes = frame.Encode();
  if (rank != world_.rank && frame.type != FrameType::kBeat) {
    counters_->Add(Counter::kFramesSent, 1);
    counters_->Add(Counter::kFrameBytesSent, static_cast<int64_t>(bytes.size()));
  }
  Status status = mail_.Send(rank, std::move(bytes));
  if (!status.ok() && frame.type != FrameType::kAbort) protocol_.Abort(status, &effects_);
}

// ---- what the driver asks ----

bool Coordinator::HasWork() const {
  if (protocol_.aborted()) return protocol_.awaits_last_words();
  if (table_->has_news() || executor_.busy() || mail_.Busy() || protocol_.pending()) return true;
  return MustPoll() && (progress_.Busy() || Now() - last_active_ < kLinger);
}

bool Coordinator::MustPoll() const {
  if (mail_.Busy() || executor_.MustPoll()) return true;
  return !progress_.RingsDoorbell() && (world_.hosts.size() > 1 || progress_.Busy());
}

// ---- the end ----

void Coordinator::SayGoodbye() {
  Guarded([&] {
    bool moved = false;
    TakeSubmissions(&moved);
    protocol_.SayGoodbye(Now(), &effects_);
    CarryOut();
  });
}

void Coordinator::GiveUpWaiting() {
  Guarded([&] { LeaveOthers(); });
}

void Coordinator::LeaveOthers() {
  if (closed_cleanly() && !executor_.busy()) return;
  if (executor_.busy())
    return Abort(
        Status::Closed("rank " + std::to_string(world_.rank) +
                       " called shutdown() and left with operations under way. Wait for them before shutdown()."));
  bool moved = false;
  TakeSubmissions(&moved);
  protocol_.GiveUpWaiting(Now(), &effects_);
  CarryOut();
}

void Coordinator::Abort(const Status& last) {
  protocol_.Abort(last, &effects_);
  CarryOut();
}

std::string Coordinator::RequestedCause() {
  MutexLock lock(request_mutex_);
  return requested_cause_;
}

void Coordinator::RequestAbort(const std::string& cause) {
  MutexLock lock(request_mutex_);
  if (abort_requested_.load(std::memory_order_relaxed)) return;
  try {
    requested_cause_ = cause;
  } catch (const std::bad_alloc&) {  // it ends without
  }
  abort_requested_.store(true, std::memory_order_release);
}

// Whoever reads stderr may have stopped reading.
void Coordinator::ShowStacks(const std::string& awaited) {
  const int pipe = requests_pipe_.load();
  if (pipe < 0 || options_.stack_signal == 0) return;
  const std::string text = "ringtrain: the other ranks wait for " + awaited + ", which rank " +
                           std::to_string(world_.rank) + " has not submitted. Its Python is here:\n";
  const auto show = [text, pipe, insist_at = insist_on_stacks_at_] {
    if (write(STDERR_FILENO, text.data(), text.size()) >= 0 && write(pipe, "s", 1) == 1)
      insist_at->store(Now() + kPatience);
    return std::string();
  };
  writer_->Do("stacks for " + awaited, show, [](const std::string&) {});
}

// A signal's handler needs no lock of the interpreter, which a busy thread may keep. Without a handler it would end the
// process.
void Coordinator::InsistOnStacks() {
  const Nanoseconds at = insist_on_stacks_at_->load(std::memory_order_relaxed);
  if (at == kNever || Now() < at) return;
  insist_on_stacks_at_->store(kNever);
  int unread = 0;
  if (ioctl(requests_pipe_.load(), FIONREAD, &unread) != 0 || unread == 0) return;
  struct sigaction action;
  const int number = static_cast<int>(options_.stack_signal);
  if (sigaction(number, nullptr, &action) == 0 && action.sa_handler != SIG_DFL && action.sa_handler != SIG_IGN)
    kill(getpid(), number);
}

void Coordinator::HeedAbort() {
  Guarded([&] { HeedWhatAsksForAnEnd(); });
}

void Coordinator::HeedWhatAsksForAnEnd() {
  if (protocol_.aborted() && !protocol_.awaits_last_words()) return;
  AbortNotice& notice = memory_->control().abort;
  if (notice.state.load(std::memory_order_acquire) == AbortNotice::kSet) {
    protocol_.HearEnd(Status::PeerLost(notice.text), &effects_);
    CarryOut();
  }
  if (abort_requested_.load(std::memory_order_acquire)) Abort(Status::PeerLost(RequestedCause()));
}

Status Coordinator::NoteCause(const Status& cause) {
  if (WriteNotice(cause.message().c_str())) return cause;
  const AbortNotice& notice = memory_->control().abort;
  // Who was writing may have died of it.
  return notice.state.load(std::memory_order_acquire) == AbortNotice::kSet ? Status::PeerLost(notice.text) : cause;
}

// False if another one was there before.
bool Coordinator::WriteNotice(const char* words) {
  AbortNotice& notice = memory_->control().abort;
  uint32_t state = AbortNotice::kNone;
  if (!notice.state.compare_exchange_strong(state, AbortNotice::kWriting)) return false;
  std::strncpy(notice.text, words, sizeof notice.text - 1);
  notice.state.store(AbortNotice::kSet, std::memory_order_release);
  return true;
}

}  // namespace ringtrain
