#include "core/coordinator.h"

#include <signal.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <set>

namespace ringtrain {
namespace {

// MPI moves data only inside its calls, so a rank between hosts stays awake this long after its last work.
constexpr Nanoseconds kLinger = 10 * INT64_C(1000000);

constexpr Nanoseconds kSecond = INT64_C(1000000000);

constexpr int kMostFrames = 64;  // taken in one step

Nanoseconds FromSeconds(double seconds) { return static_cast<Nanoseconds>(seconds * 1e9); }

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
      liveness_(world, options.dead_after_seconds, transport, memory),
      goodbyes_(world.size, false) {
  std::vector<int> everyone(world.size);
  std::iota(everyone.begin(), everyone.end(), 0);
  AddProcessSet(0, everyone);
}

Coordinator::~Coordinator() = default;

bool Coordinator::Step() {
  bool moved = false;
  HeedAbort();
  LookForTheDead();
  InsistOnStacks();
  CheckLongPhase();
  TakeSubmissions(&moved);
  ReceiveMail(&moved);
  TickNegotiators(Now(), &moved);
  if (executor_.busy() && !aborted_) {  // after an abort the tensors belong to their owners again
    std::vector<int> finished;
    Status status = executor_.Advance(&moved, &finished);
    for (int process_set : finished) Feed(process_set, event::BatchFinished{});
    if (!finished.empty())
      for (const auto& held : std::exchange(held_removals_, {})) RunControl(held.first, held.second);
    if (!finished.empty()) TickNegotiators(Now(), &moved);
    if (!status.ok()) Abort(status);
  }
  if (moved) last_active_ = Now();
  return moved;
}

// ---- in ----

void Coordinator::TakeSubmissions(bool* moved) {
  SubmissionTable::News news;
  if (!table_->TakeNews(&news)) return;
  *moved = true;
  for (auto& refusal : news.refusals) Feed(refusal.first, event::Refused{std::move(refusal.second)});
  for (const auto& submission : news.submissions) {
    if (negotiators_.count(submission->process_set) > 0)
      Feed(submission->process_set, event::Submitted{submission->request});
    else
      table_->Finish(submission, Status::InvalidArgument(submission->request.Subject() + ": process set " +
                                                         std::to_string(submission->process_set) + " has been removed."));
  }
}

void Coordinator::LookForTheDead() {
  if (aborted_) return;
  std::vector<int> beat_to;
  Status verdict = liveness_.Look(Now(), &beat_to);
  for (int rank : beat_to) SendBeat(rank, false);
  if (!verdict.ok()) Abort(verdict);
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
      Dispatch(from, std::move(frame));
  }
}

void Coordinator::Dispatch(int from, Frame frame) {
  switch (frame.type) {
    case FrameType::kAbort:
      Abort(Status::PeerLost(frame.text));
      return;
    case FrameType::kGoodbye:
      HearGoodbye(from, frame.flag);
      return;
    case FrameType::kBeat:  // the transport has counted it
      if (frame.flag) liveness_.Forget(from);
      return;
    case FrameType::kStalled:
      ShowStacks(frame.text);
      return;
    case FrameType::kAllGoodbye:
      all_goodbye_ = true;
      clean_ = frame.flag;
      return;
    default:
      break;
  }
  const int process_set = frame.process_set;
  if (negotiators_.count(process_set) == 0) {
    // Another member has learnt of the set before this one; or it is gone, and this is a refusal that nobody has waited for.
    if (process_set <= newest_process_set_) return;
    early_frames_[process_set].emplace_back(from, std::move(frame));
    return;
  }
  Feed(process_set, event::Arrived{MemberOf(process_set, from), std::move(frame)});
}

void Coordinator::TickNegotiators(Nanoseconds now, bool* moved) {
  std::vector<int> process_sets;
  for (const auto& entry : negotiators_) process_sets.push_back(entry.first);
  for (int process_set : process_sets) {
    auto found = negotiators_.find(process_set);
    if (found == negotiators_.end()) continue;  // removed by what was just performed
    Effects effects;
    found->second.OnEvent(now, event::Tick{}, &effects);
    *moved |= !effects.empty();  // control operations finish at once, and more may be ready behind them
    Perform(process_set, std::move(effects));
  }
}

void Coordinator::Feed(int process_set, const Event& event) {
  auto found = negotiators_.find(process_set);
  if (found == negotiators_.end()) return;
  Effects effects;
  found->second.OnEvent(Now(), event, &effects);
  Perform(process_set, std::move(effects));
}

// ---- out ----

void Coordinator::Perform(int process_set, Effects effects) {
  for (Effect& effect : effects) std::visit([&](auto& what) { Perform(process_set, what); }, effect);
}

void Coordinator::Perform(int process_set, effect::Send& send) {
  Send(process_sets_->Members(process_set)[send.member], std::move(send.frame));
}

void Coordinator::Perform(int process_set, effect::Execute& execute) {
  if (aborted_) return;
  const Response& first = execute.responses[0];
  if (Find(first.request.operation)->output == Output::kNone) return RunControl(process_set, first);  // never fused
  Status status = executor_.Start(process_set, execute);
  if (!status.ok()) Abort(status);
}

void Coordinator::Perform(int process_set, effect::Fail& fail) {
  if (auto submission = table_->Find(process_set, fail.name)) table_->Finish(submission, fail.status);
}

void Coordinator::Perform(int, effect::Warn& warn) {
  log_->Warning(warn.text);
  Ask('l');  // this rank's program may be busy with something else, and others wait to know
}

void Coordinator::Perform(int, effect::Abort& abort) { Abort(Status::Internal(abort.cause)); }

void Coordinator::Perform(int, effect::Count& count) {
  counters_->Add(Counter::kCacheHits, count.hits);
  counters_->Add(Counter::kCacheMisses, count.misses);
  if (!count.late.empty()) lateness_->Add(count.late);
}

void Coordinator::RunControl(int process_set, const Response& response) {
  // A rank that had joined may still be busy with a batch of the set for which nobody here waits: the set goes after it.
  if (response.request.operation == Operation::kRemoveProcessSet && executor_.busy(static_cast<int>(response.request.splits[0]))) {
    held_removals_.emplace_back(process_set, response);
    return;
  }
  auto submission = table_->Find(process_set, response.request.name);
  const std::vector<int64_t>& list = response.request.splits;
  if (response.request.operation == Operation::kAddProcessSet) AddProcessSet(response.result, {list.begin(), list.end()});
  if (response.request.operation == Operation::kRemoveProcessSet) RemoveProcessSet(static_cast<int>(list[0]));
  if (submission != nullptr) {
    submission->handle->result = response.result;
    counters_->Add(Counter::kOperations, 1);
    table_->Finish(submission, Status());
  }
  Feed(process_set, event::BatchFinished{});
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

void Coordinator::SendBeat(int rank, bool last) {
  Frame beat;
  beat.type = FrameType::kBeat;
  beat.flag = last;
  Send(rank, std::move(beat));
}

// ---- process sets ----

void Coordinator::AddProcessSet(int process_set, const std::vector<int>& members) {
  const int lane = process_sets_->Add(process_set, members);
  newest_process_set_ = process_set;
  auto me = std::find(members.begin(), members.end(), world_.rank);
  if (me == members.end()) {
    early_frames_.erase(process_set);
    return;
  }
  NegotiatorOptions options;
  options.process_set = process_set;
  options.members = members;
  options.me = static_cast<int>(me - members.begin());
  options.cache_capacity = static_cast<size_t>(options_.cache_capacity);
  options.fusion_threshold_bytes = static_cast<size_t>(options_.fusion_threshold_bytes);
  options.stall_warning = FromSeconds(options_.stall_warning_seconds);
  options.stall_abort = options_.stall_abort_seconds == 0 ? kNever : FromSeconds(options_.stall_abort_seconds);
  executor_.AddGroup(process_set, lane, members);
  negotiators_.emplace(process_set, Negotiator(std::move(options)));
  auto early = early_frames_.find(process_set);
  if (early == early_frames_.end()) return;
  for (auto& frame : early->second) Feed(process_set, event::Arrived{MemberOf(process_set, frame.first), std::move(frame.second)});
  early_frames_.erase(early);
}

void Coordinator::RemoveProcessSet(int process_set) {
  process_sets_->Remove(process_set);
  negotiators_.erase(process_set);
  executor_.RemoveGroup(process_set);
}

int Coordinator::MemberOf(int process_set, int rank) const {
  const std::vector<int>& members = negotiators_.at(process_set).members();
  return static_cast<int>(std::lower_bound(members.begin(), members.end(), rank) - members.begin());
}

// ---- what the driver asks ----

bool Coordinator::HasWork() const {
  if (aborted_) return false;
  if (table_->has_news() || executor_.busy() || mail_.Busy()) return true;
  for (const auto& entry : negotiators_)
    if (entry.second.pending()) return true;
  return MustPoll() && (transport_->Busy() || Now() - last_active_ < kLinger);
}

bool Coordinator::MustPoll() const {
  if (mail_.Busy() || executor_.MustPoll()) return true;
  return !transport_->RingsDoorbell() && (world_.hosts.size() > 1 || transport_->Busy());
}

Nanoseconds Coordinator::next_timer() const {
  Nanoseconds next = aborted_ ? kNever : liveness_.next_look();
  for (const auto& entry : negotiators_) next = std::min(next, entry.second.next_timer());
  return next;
}

// ---- the end ----

void Coordinator::SayGoodbye(bool gone) {
  // What was submitted or refused before goes ahead, so that nobody takes it for left out.
  bool moved = false;
  TakeSubmissions(&moved);
  TickNegotiators(Now(), &moved);
  // Whoever decides for me, and everyone for whom I decide.
  std::set<int> concerned = {0};
  for (const auto& entry : negotiators_) {
    const std::vector<int>& members = entry.second.members();
    concerned.insert(members[0]);
    if (members[0] == world_.rank) concerned.insert(members.begin(), members.end());
  }
  for (int rank : concerned) {
    Frame goodbye;
    goodbye.type = FrameType::kGoodbye;
    goodbye.flag = gone;
    Send(rank, std::move(goodbye));
  }
}

void Coordinator::HearGoodbye(int rank, bool gone) {
  std::vector<int> process_sets;
  for (const auto& entry : negotiators_) process_sets.push_back(entry.first);
  for (int process_set : process_sets) {
    const std::vector<int>& members = negotiators_.at(process_set).members();
    if (std::binary_search(members.begin(), members.end(), rank)) Feed(process_set, event::Left{MemberOf(process_set, rank), gone});
  }
  if (world_.rank != 0 || gone) return;
  goodbyes_[rank] = true;
  if (std::find(goodbyes_.begin(), goodbyes_.end(), false) != goodbyes_.end()) return;
  for (int other = 0; other < world_.size; ++other) {
    Frame all;
    all.type = FrameType::kAllGoodbye;
    all.flag = true;
    Send(other, std::move(all));
  }
}

void Coordinator::GiveUpWaiting() {
  if (clean_ && !executor_.busy()) return;
  if (executor_.busy())
    return Abort(Status::Closed("rank " + std::to_string(world_.rank) +
                                " called shutdown() and left with operations under way. Wait for them before shutdown()."));
  SayGoodbye(true);
  for (int rank : liveness_.listeners()) SendBeat(rank, true);
  if (world_.rank != 0 || all_goodbye_) return;
  for (int other = 1; other < world_.size; ++other) {
    Frame all;
    all.type = FrameType::kAllGoodbye;
    Send(other, std::move(all));
  }
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

void Coordinator::CheckLongPhase() {
  if (long_phase_.load(std::memory_order_relaxed) < 0) return;  // each step looks: an exchange costs as much as the rest of it
  const Nanoseconds duration = long_phase_.exchange(-1, std::memory_order_acquire);
  for (const auto& entry : negotiators_) Feed(entry.first, event::LongPhase{duration});
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
  if (Ask('s')) insist_on_stacks_at_ = Now() + kSecond;
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
  if (aborted_) return;
  AbortNotice& notice = memory_->control().abort;
  if (notice.state.load(std::memory_order_acquire) == AbortNotice::kSet)
    Abort(Status::PeerLost(notice.text));
  else if (abort_requested_.load(std::memory_order_acquire))
    Abort(Status::PeerLost(RequestedCause()));
}

// What ended the world on this host first: this, or what another rank has written down before.
Status Coordinator::FirstCause(const Status& cause) {
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

void Coordinator::Abort(const Status& last) {
  if (std::exchange(aborted_, true)) return;
  const Status cause = FirstCause(last);
  for (int rank = 0; rank < world_.size; ++rank) {
    if (rank == world_.rank) continue;
    if (world_.host_of[rank] == world_.host_of[world_.rank]) {
      memory_->doorbell(world_.local_rank_of[rank]).Ring();
      continue;
    }
    Frame abort;
    abort.type = FrameType::kAbort;
    abort.text = cause.message();
    Send(rank, std::move(abort));
  }
  // The peers first, the submitters last: whoever hears of it may free the tensors.
  transport_->Abandon();
  executor_.Abandon(cause);
  table_->Close(cause);
}

}  // namespace ringtrain
