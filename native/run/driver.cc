#include "run/driver.h"

#include <pthread.h>

#include <algorithm>

#include "base/scheduling.h"
#include "base/threads.h"

namespace ringtrain {
namespace {

constexpr Nanoseconds kMicrosecond = 1000;
// Small operations that nobody waits for yet gather this long, so that a backward pass of many small gradients costs a
// few wake-ups and not a few for each; larger ones leave at once, because their transfer is worth overlapping.
constexpr Nanoseconds kGather = 1000 * kMicrosecond;

constexpr Nanoseconds kShortestPoll = 20 * kMicrosecond, kLongestPoll = 500 * kMicrosecond;

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Without a choice of the user's. A thread that waits has nothing else to do: it looks about as long as it takes to
// sleep and to be woken on a core that has gone to sleep, too, which on a virtual machine is 100 us; so a look in vain
// at most doubles what the wait costs. The context's thread may take its core from the program's, and looks for the
// time of a step within a host, or of a message to another host and its answer.
Spinning SpinningFor(const Options& options, const World& world, bool waiter) {
  constexpr Nanoseconds kAsleep = 100 * kMicrosecond, kWithinHost = 20 * kMicrosecond,
                        kBetweenHosts = 60 * kMicrosecond;
  if (options.spin_microseconds >= 0) return {options.spin_microseconds * kMicrosecond, true};
  if (world.local_size() > UsableCores()) return {0, true};
  if (waiter) return {kAsleep, false};
  return {world.local_size() < world.size ? kBetweenHosts : kWithinHost, false};
}

}  // namespace

ContextDriver::ContextDriver(const Books& books, Progress& progress, Epoch* epoch)
    : options_(books.options),
      progress_(progress),
      doorbell_(epoch->memory().doorbell(epoch->world().local_rank())),
      life_(epoch->memory().control().place(epoch->world().local_rank()).life),
      table_(books.table),
      counters_(books.counters),
      timeline_(books.timeline),
      of_waiters_(SpinningFor(books.options, epoch->world(), true)),
      of_thread_(SpinningFor(books.options, epoch->world(), false)),
      loop_(&epoch->loop()) {}

ContextDriver::~ContextDriver() {
  stop_.store(true);
  EndThread();
}

Status ContextDriver::Start(int rank) {
  progress_.SetDoorbell(&doorbell_);
  RT_TRY(StartThread(rank, &thread_, &ContextDriver::RunThread, this));
  while (lives_.load(std::memory_order_acquire) == 0) FutexWait(&lives_, 0, kNever);
  return {};
}

// ---- submitting and waiting ----

void ContextDriver::OnNews(bool caller_waits, bool urgent, int64_t bytes) {
  urgent |= gathered_bytes_.fetch_add(bytes) + bytes >= kBurstBytes;
  std::atomic_thread_fence(std::memory_order_seq_cst);  // the news before the promise: see CancelPollPromise
  if (!urgent && !caller_waits && Now() < polls_by_.load(std::memory_order_relaxed)) return;
  gathered_bytes_.store(0);
  if (driven_.load(std::memory_order_seq_cst))
    doorbell_.Ring();
  else if (!caller_waits)
    WakeThread(urgent);
}

void ContextDriver::TryNews(const Handle& handle, bool caller_waits) {
  if (!caller_waits && !stop_.load() && drive_mutex_.TryLock()) {
    loop_->Step();
    CancelPollPromise();
    const bool more = loop_->HasWork();
    drive_mutex_.Unlock();
    if (!more && handle.done()) return;
  }
  OnNews(caller_waits, true, 0);
}

void ContextDriver::Call() {
  doorbell_.Ring();
  WakeThread(true);
}

void ContextDriver::Wait(Handle& handle, Nanoseconds deadline) {
  if (handle.done()) return;
  const Nanoseconds begin = Now();
  WaitOn(handle, deadline);
  const Nanoseconds end = Now();
  counters_->Add(Counter::kWaitNanoseconds, end - begin);
  if (timeline_->enabled() && deadline > begin) timeline_->Span("(waiting)", "WAIT", begin, end, 0, "wait");
}

void ContextDriver::WaitOn(Handle& handle, Nanoseconds deadline) {
  while (!handle.done() && Now() < deadline) {
    if (stop_.load() || !drive_mutex_.TryLock()) {
      // Another thread drives, or Leave will end the operation. That driver may be about to stop: then the context's
      // thread must take over.
      if (table_->has_news()) doorbell_.Ring();
      WakeThread(true);
      handle.Sleep(deadline);
      continue;
    }
    Drive([&] { return handle.done() || stop_.load(); }, deadline, &of_waiters_);
    CancelPollPromise();
    const bool more = loop_->HasWork();
    drive_mutex_.Unlock();
    timeline_->Flush();  // the context's thread may not do so for a second
    if (more) WakeThread(true);
  }
}

// ---- driving ----

template <typename Finished>
void ContextDriver::Drive(Finished finished, Nanoseconds deadline, Spinning* spinning) {
  driven_.store(true, std::memory_order_seq_cst);
  constexpr Nanoseconds kLooked = -1;
  Nanoseconds poll = kShortestPoll, look_until = 0;  // 0: the wait has not begun
  while (!finished()) {
    const bool news = table_->has_news();
    if (loop_->Step()) {
      if (news) polls_by_.store(Now() + 2 * kGather, std::memory_order_relaxed);
      if (look_until > 0) spinning->Ended(true);
      poll = kShortestPoll;
      look_until = 0;
      continue;
    }
    const Nanoseconds now = Now();
    if (now >= deadline) break;
    if (look_until == 0) {
      const Nanoseconds look = spinning->Begin();
      look_until = look > 0 ? now + look : kLooked;
    }
    if (now < look_until) {
      Pause();
      continue;
    }
    if (look_until > 0) spinning->Ended(false);
    look_until = kLooked;
    Nanoseconds until = std::min({deadline, loop_->next_timer(), now + kSecond});
    if (loop_->MustPoll()) {
      until = std::min(until, now + poll);
      poll = std::min(poll * 2, kLongestPoll);
    }
    const Nanoseconds polls_by = polls_by_.load(std::memory_order_relaxed);
    if (now < polls_by)
      until = std::min(until, polls_by);
    else
      CancelPollPromise();
    const uint32_t ticket = doorbell_.PrepareSleep();
    if (finished() || loop_->Step()) {
      doorbell_.CancelSleep();
      continue;
    }
    timeline_->Flush();
    doorbell_.Sleep(ticket, until);
    counters_->Add(Counter::kWakeups, 1);
  }
  driven_.store(false, std::memory_order_seq_cst);
}

void ContextDriver::RunThread() {
  pthread_setname_np(pthread_self(), "ringtrain");
  RunPromptly();
  life_.Begin();
  lives_.store(1, std::memory_order_release);
  FutexWake(&lives_, 1);
  while (!stop_.load()) {
    const uint32_t ticket = parked_.load(std::memory_order_acquire);
    Nanoseconds idle_period = 0;
    {
      MutexLock lock(drive_mutex_);
      RankLoop& loop = driven();
      loop.Step();
      Drive([&] { return stop_.load() || !loop.HasWork(); }, kNever, &of_thread_);
      timeline_->Flush();
      CancelPollPromise();
      idle_period = loop.idle_period();
      if (loop.HasWork()) continue;  // its submitter saw this thread drive, so it rang and did not wake
    }
    if (stop_.load()) break;
    FutexWait(&parked_, ticket, Now() + idle_period);
    counters_->Add(Counter::kWakeups, 1);
    CoalesceSubmissions();
  }
  // Leave drives from here on. The life sign belongs to this thread, and the other ranks need it until this one has
  // left.
  for (uint32_t ticket; ticket = parked_.load(std::memory_order_acquire), !left_.load();)
    FutexWait(&parked_, ticket, kNever);
  life_.End();
}

// The thread was woken for a small submission: waits for those that follow it, unless something urgent comes.
void ContextDriver::CoalesceSubmissions() {
  const uint32_t ticket = parked_.load(std::memory_order_acquire);
  if (!table_->has_news() || urgent_.exchange(false) || stop_.load()) return;
  const Nanoseconds until = Now() + kGather;
  polls_by_.store(until, std::memory_order_relaxed);
  FutexWait(&parked_, ticket, until);
  if (driven_.load(std::memory_order_seq_cst))
    doorbell_.Ring();  // a waiter drives by now: it keeps the promise instead
}

// Whoever calls this looks for news afterwards: a submitter may just have relied on the promise.
void ContextDriver::CancelPollPromise() {
  polls_by_.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

void ContextDriver::WakeThread(bool urgent) {
  if (urgent) urgent_.store(true);
  parked_.fetch_add(1, std::memory_order_release);
  FutexWake(&parked_, 1);
}

// ---- leaving ----

Nanoseconds ContextDriver::Leave(Nanoseconds deadline) {
  stop_.store(true);
  Call();
  Serve(&deadline);
  EndThread();
  return deadline;
}

void ContextDriver::EndThread() {
  left_.store(true);
  WakeThread(true);
  if (thread_.joinable()) thread_.join();
}

// Serves the others until all have said goodbye or the deadline has passed, then lowers the deadline and delivers the
// last frames. Nobody drives after it.
void ContextDriver::Serve(Nanoseconds* deadline) {
  MutexLock lock(drive_mutex_);
  RankLoop& loop = driven();
  loop.HeedAbort();  // one just requested: the others must hear the cause, and no goodbye before it
  if (table_->closed().ok()) {
    loop.SayGoodbye();
    Drive([&] { return loop.ready_to_close() || !table_->closed().ok(); }, *deadline, &of_waiters_);
    if (table_->closed().ok()) loop.GiveUpWaiting();
  }
  // After a long wait the delivery still gets this much time and no more.
  *deadline = std::min(*deadline, DeadlineAfter(options_.shutdown_timeout_seconds));
  if (table_->closed().ok())
    Drive([&] { return !loop.HasWork() || !loop.MustPoll() || !table_->closed().ok(); }, *deadline, &of_waiters_);
  progress_.SetDoorbell(nullptr);
}

}  // namespace ringtrain
