#include "run/rank_loop.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <new>

#include "run/signs.h"

namespace ringtrain {
namespace {

// MPI moves data only inside its calls, so a rank between hosts stays awake this long after its last work.
constexpr Nanoseconds kLinger = 10 * INT64_C(1000000);

constexpr int kMaxFrames = 64;  // taken in one step

}  // namespace

RankLoop::RankLoop(const World& world, const Books& books, Transport& transport, HostMemory* memory,
                   Residuals* residuals, ProcessSetTable* process_sets)
    : world_(world),
      books_(books),
      wire_(transport),
      progress_(transport),
      memory_(memory),
      table_(books.table),
      process_sets_(process_sets),
      flight_recorder_(world, *process_sets, books),
      stack_requests_(world.rank, books.options.stack_signal, books.writer),
      mail_(transport, memory, world.my_host()),
      board_(world, memory),
      executor_(world, books, transport, memory, residuals),
      point_to_point_(world, books, transport, memory),
      protocol_(world, books.options),
      no_memory_(Status::Internal(
          "rank " + std::to_string(world.rank) +
          ": its memory must suffice for the operations under way, but has run out. Start fewer ranks on its "
          "host, or send less at a time.")) {
  protocol_.Begin(Now(), &effects_);
  CarryOut();
}

// Nobody above a driver could take an exception: it would end the process without a word.
template <typename Action>
void RankLoop::Guarded(Action action) {
  try {
    action();
  } catch (const std::bad_alloc&) {
    EndForLackOfMemory();
  }
}

bool RankLoop::Step() {
  bool moved = true;
  Guarded([&] { moved = TryStep(); });
  return moved;
}

void RankLoop::EndForLackOfMemory() {
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
void RankLoop::EndHere() {
  try {
    protocol_.Abort(no_memory_, &effects_);
  } catch (const std::bad_alloc&) {  // it knows already
  }
  effects_.clear();
  notice().Write(no_memory_.message().c_str());
  try {
    wire_.Abandon();
    executor_.Abandon(no_memory_);
    point_to_point_.Abandon();
  } catch (const std::bad_alloc&) {  // tensors may be written that belong to their owners
    constexpr char kText[] =
        "ringtrain: no memory is left to end the world in an orderly way; this process ends here.\n";
    [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, kText, sizeof kText - 1);
    std::abort();
  }
  table_->Close(no_memory_);
}

bool RankLoop::TryStep() {
  bool moved = false;
  HeedAbort();
  LookForTheDead();
  stack_requests_.Insist();
  if (!protocol_.aborted()) flight_recorder_.LookForStalls();
  CheckLongPhase();
  TakeSubmissions(&moved);
  LookAtPromises(&moved);
  if (ReceiveMail(&moved)) AwaitLastWords();
  moved |= Tick();
  AdvanceBatches(&moved);
  AdvancePointToPoint(&moved);
  if (moved) last_active_ = Now();
  return moved;
}

void RankLoop::TakeSubmissions(bool* moved) {
  SubmissionTable::News news;
  if (!table_->TakeNews(&news)) return;
  *moved = true;
  for (auto& refusal : news.refusals) protocol_.Refused(Now(), refusal.first, std::move(refusal.second), &effects_);
  const Nanoseconds now = Now();
  for (const auto& submission : news.submissions) {
    submission->announced.store(now, std::memory_order_relaxed);
    if (PointToPoint::Takes(submission->request))
      point_to_point_.Submitted(submission, process_sets_->Members(submission->process_set));
    else if (protocol_.Knows(submission->process_set))
      protocol_.Submitted(now, submission->process_set, submission->request, &effects_);
    else
      table_->Finish(submission,
                     Status::InvalidArgument(submission->request.Subject() + ": process set " +
                                             std::to_string(submission->process_set) + " has been removed."));
  }
  CarryOut();
}

// Of the other ranks of this host, in process sets that run by a schedule.
void RankLoop::LookAtPromises(bool* moved) {
  if (protocol_.aborted()) return;
  protocol_.ForEachWatched(
      [&](int process_set, const std::vector<int>& ranks) { *moved |= board_.Look(process_set, ranks); });
  for (int process_set : board_.TakeChanged()) protocol_.Seen(Now(), process_set, board_.seen(process_set), &effects_);
  CarryOut();
}

// False if there may be more.
bool RankLoop::ReceiveMail(bool* moved) {
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
bool RankLoop::TakeMail(bool* moved) {
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
    if (frame.epoch == world_.epoch && frame.type == FrameType::kPromise && !executor_.ReceiveAhead(frame)) {
      Abort(Status::Internal("a promise of rank " + std::to_string(from) + " cannot be read."));
      return true;
    }
    if (frame.epoch != world_.epoch)
      books_.counters->Add(Counter::kStaleFrames, 1);
    else if (PointToPoint::Takes(frame))
      point_to_point_.Arrived(from, std::move(frame));
    else
      protocol_.Arrived(Now(), from, std::move(frame), &effects_);
    CarryOut();
  }
  return false;
}

void RankLoop::AdvanceBatches(bool* moved) {
  if (!executor_.busy() || protocol_.aborted()) return;  // after an abort the tensors belong to their owners again
  std::vector<int> finished;
  const Status status = executor_.Advance(moved, &finished);
  for (int process_set : finished) protocol_.BatchFinished(Now(), process_set, &effects_);
  CarryOut();
  if (!finished.empty()) *moved |= Tick();
  if (!status.ok()) Abort(status);
}

void RankLoop::AdvancePointToPoint(bool* moved) {
  if (!point_to_point_.busy() || protocol_.aborted()) return;
  std::vector<std::pair<int, Frame>> frames;
  const Status status = point_to_point_.Advance(moved, &frames);
  for (auto& [rank, frame] : frames) SendFrame(rank, std::move(frame));
  CarryOut();
  if (!status.ok()) Abort(status);
}

void RankLoop::AwaitLastWords() {
  if (!protocol_.awaits_last_words()) return;
  protocol_.MailTaken(Now(), &effects_);
  CarryOut();
}

void RankLoop::CheckLongPhase() {
  if (long_phase_.load(std::memory_order_relaxed) < 0)
    return;  // each step looks: an exchange costs as much as the rest of it
  protocol_.LongPhase(Now(), long_phase_.exchange(-1, std::memory_order_acquire), &effects_);
  CarryOut();
}

void RankLoop::LookForTheDead() {
  const Nanoseconds now = Now();
  if (now < protocol_.next_look()) return;
  const bool ran = !protocol_.aborted();
  protocol_.AwaitStateFrom(joins_from_.load(std::memory_order_relaxed));
  protocol_.Look(now, SignsNow(world_, wire_, memory_), &effects_);
  if (ran) suspicions_.Looked(protocol_, now);
  CarryOut();
}

bool RankLoop::Tick() {
  RemoveProcessSets();
  const bool moved = protocol_.Tick(Now(), &effects_);
  CarryOut();
  return moved;
}

void RankLoop::RemoveProcessSets() {
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

void RankLoop::CarryOut() {
  while (!effects_.empty()) {
    carried_out_.swap(effects_);  // what follows comes into the other list
    for (RankEffect& effect : carried_out_) std::visit([&](auto& what) { CarryOut(what); }, effect);
    carried_out_.clear();
    RemoveProcessSets();
  }
}

void RankLoop::CarryOut(rank_effect::Send& send) {
  if (!send.ahead.empty()) executor_.SendAhead(send.ahead, &send.frame);
  SendFrame(send.rank, std::move(send.frame));
}

void RankLoop::CarryOut(rank_effect::Start& start) {
  if (protocol_.aborted()) return;
  if (start.batch.scheduled) books_.counters->Add(Counter::kScheduledBatches, 1);
  const Status status = executor_.Start(start.process_set, std::move(start.batch));
  if (!status.ok()) protocol_.Abort(status, &effects_);
}

// Written before it looks: of two ranks that do so at the same time one at least sees both.
void RankLoop::CarryOut(rank_effect::Promise& promise) {
  if (!protocol_.Knows(promise.process_set)) return;  // it has gone since
  board_.Write(promise.process_set, promise.sign);
  protocol_.ForEachWatched([&](int process_set, const std::vector<int>& ranks) {
    if (process_set == promise.process_set) board_.Look(process_set, ranks);
  });
  for (int process_set : board_.TakeChanged()) protocol_.Seen(Now(), process_set, board_.seen(process_set), &effects_);
}

void RankLoop::CarryOut(rank_effect::Finish& finish) {
  const Response& response = finish.control.responses[0];
  const auto submission = table_->Find(finish.process_set, response.request.name);
  if (submission == nullptr) return;
  submission->handle->result = response.result;
  books_.counters->Add(Counter::kOperations, 1);
  table_->Finish(submission, Status());
}

void RankLoop::CarryOut(rank_effect::Fail& fail) {
  if (!fail.missing.empty()) suspicions_.Missing(fail.missing);
  if (auto submission = table_->Find(fail.process_set, fail.name)) table_->Finish(submission, fail.status);
}

void RankLoop::CarryOut(rank_effect::Count& count) {
  books_.counters->Add(Counter::kCacheHits, count.count.hits);
  books_.counters->Add(Counter::kCacheMisses, count.count.misses);
  if (!count.count.late.empty()) books_.lateness->Add(count.count.late);
}

void RankLoop::CarryOut(rank_effect::AddProcessSet& added) {
  const int lane = process_sets_->Add(added.process_set, added.members);
  board_.Add(added.process_set, lane);
  if (std::binary_search(added.members.begin(), added.members.end(), world_.rank))
    executor_.AddGroup(added.process_set, lane, added.members);
}

void RankLoop::CarryOut(rank_effect::End& end) {
  suspicions_.LooksNoMore();
  std::string record = flight_recorder_.Take(end.cause.message());  // while what is pending is so
  wire_.Abandon();
  executor_.Abandon(end.cause);
  point_to_point_.Abandon();
  table_->Close(end.cause);
  flight_recorder_.Leave(std::move(record));
}

void RankLoop::CarryOut(rank_effect::ShowStacks& show) {
  flight_recorder_.Leave(flight_recorder_.Take("the other ranks wait for " + show.awaited + "."));
  stack_requests_.Ask(show.awaited);
}

void RankLoop::SendFrame(int rank, Frame frame) {
  frame.epoch = world_.epoch;
  std::string bytes = frame.Encode();
  if (rank != world_.rank && frame.type != FrameType::kBeat) {
    books_.counters->Add(Counter::kFramesSent, 1);
    books_.counters->Add(Counter::kFrameBytesSent, static_cast<int64_t>(bytes.size()));
  }
  Status status = mail_.Send(rank, std::move(bytes));
  if (!status.ok() && frame.type != FrameType::kAbort) protocol_.Abort(status, &effects_);
}

// ---- what the driver asks ----

bool RankLoop::HasWork() const {
  if (protocol_.aborted()) return protocol_.awaits_last_words();
  if (table_->has_news() || executor_.busy() || point_to_point_.busy() || mail_.Busy() || protocol_.pending())
    return true;
  return MustPoll() && (progress_.Busy() || Now() - last_active_ < kLinger);
}

bool RankLoop::MustPoll() const {
  if (mail_.Busy() || executor_.MustPoll()) return true;
  return !progress_.RingsDoorbell() && (world_.hosts.size() > 1 || progress_.Busy());
}

// ---- the end ----

void RankLoop::SayGoodbye() {
  Guarded([&] {
    bool moved = false;
    TakeSubmissions(&moved);
    point_to_point_.Leave();
    AdvancePointToPoint(&moved);
    protocol_.SayGoodbye(Now(), &effects_);
    CarryOut();
  });
}

void RankLoop::GiveUpWaiting() {
  Guarded([&] { LeaveOthers(); });
}

void RankLoop::LeaveOthers() {
  if (executor_.busy() || point_to_point_.moving()) return Abort(protocol_.LeavesUnderWay());
  if (closed_cleanly()) return;
  bool moved = false;
  TakeSubmissions(&moved);
  protocol_.GiveUpWaiting(Now(), &effects_);
  CarryOut();
}

void RankLoop::Abort(const Status& last) {
  protocol_.Abort(last, &effects_);
  CarryOut();
}

void RankLoop::HeedAbort() {
  Guarded([&] { HeedWhatAsksForAnEnd(); });
}

void RankLoop::HeedWhatAsksForAnEnd() {
  if (protocol_.aborted() && !protocol_.awaits_last_words()) return;
  if (notice().written()) {
    protocol_.HearEnd(Status::PeerLost(notice().text), &effects_);
    CarryOut();
  }
  if (abort_request_.made()) Abort(Status::PeerLost(abort_request_.cause()));
}

Status RankLoop::NoteCause(const Status& cause) {
  if (notice().Write(cause.message().c_str())) return cause;
  return notice().written() ? Status::PeerLost(notice().text) : cause;  // who was writing may have died of it
}

}  // namespace ringtrain
