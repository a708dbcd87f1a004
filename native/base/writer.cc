#include "base/writer.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <exception>
#include <utility>

#include "base/doorbell.h"
#include "base/mutex.h"

namespace ringtrain {

struct Writer::State {
  struct Job {
    std::string name;
    Work work;
    Failed failed;
  };

  // False if there is no writer any more.
  bool Take(Job* job);
  void Done(const Job& job, const std::string& problem);
  void Changed() {
    changes.fetch_add(1);
    FutexWake(&changes, INT32_MAX);
  }

  Mutex mutex;
  std::deque<Job> waiting RT_GUARDED_BY(mutex);
  std::string under_way RT_GUARDED_BY(mutex);  // name of what is being done
  bool busy RT_GUARDED_BY(mutex) = false;
  bool started RT_GUARDED_BY(mutex) = false;
  bool alone RT_GUARDED_BY(mutex) = false;  // there is no writer any more
  std::atomic<uint32_t> changes{0};         // futex of all who wait
};

bool Writer::State::Take(Job* job) {
  for (;;) {
    const uint32_t before = changes.load();
    {
      MutexLock lock(mutex);
      if (alone) return false;
      if (!waiting.empty()) {
        *job = std::move(waiting.front());
        waiting.pop_front();
        under_way = job->name;
        busy = true;
        return true;
      }
    }
    FutexWait(&changes, before, kNever);
  }
}

void Writer::State::Done(const Job& job, const std::string& problem) {
  {
    MutexLock lock(mutex);
    busy = false;
    if (!problem.empty() && !alone) job.failed(problem);
  }
  Changed();
}

Writer::Writer() : state_(std::make_shared<State>()) {}

Writer::~Writer() {
  bool hangs = false;
  {
    MutexLock lock(state_->mutex);
    state_->alone = true;
    hangs = state_->busy;
  }
  state_->Changed();
  if (!thread_.joinable()) return;
  if (hangs)
    thread_.detach();
  else
    thread_.join();
}

void Writer::Do(const std::string& name, Work work, Failed failed) {
  MutexLock lock(state_->mutex);
  auto& waiting = state_->waiting;
  const auto same = std::find_if(waiting.begin(), waiting.end(), [&](const auto& each) { return each.name == name; });
  if (same != waiting.end()) {
    *same = {name, std::move(work), std::move(failed)};
    return;
  }
  if (!state_->started) {
    try {
      thread_ = std::thread(Run, state_);
    } catch (const std::exception& no_thread) {
      return failed(no_thread.what());
    }
    state_->started = true;
  }
  waiting.push_back({name, std::move(work), std::move(failed)});
  state_->Changed();
}

std::string Writer::Await(double seconds) {
  const Nanoseconds deadline = DeadlineAfter(seconds);
  for (;;) {
    const uint32_t before = state_->changes.load();
    {
      MutexLock lock(state_->mutex);
      if (!state_->busy && state_->waiting.empty()) return "";
      if (Now() >= deadline) return state_->busy ? state_->under_way : state_->waiting.front().name;
    }
    FutexWait(&state_->changes, before, deadline);
  }
}

void Writer::Run(const std::shared_ptr<State>& state) {
  pthread_setname_np(pthread_self(), "ringtrain files");
  for (State::Job job; state->Take(&job);) {
    std::string problem;
    try {
      problem = job.work();
    } catch (const std::exception& exception) {  // no memory
      problem = exception.what();
    }
    job.work = nullptr;  // with what it owns
    state->Done(job, problem);
  }
}

}  // namespace ringtrain
