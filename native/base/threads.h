// Threads of the core's own, and what is said where there can be none.
#ifndef RINGTRAIN_BASE_THREADS_H_
#define RINGTRAIN_BASE_THREADS_H_

#include <time.h>

#include <system_error>
#include <thread>
#include <utility>

#include "base/status.h"

namespace ringtrain {

// Starts one that runs `function(arguments...)`. rank: whose it is.
template <typename Function, typename... Arguments>
Status StartThread(int rank, std::thread* thread, Function function, Arguments&&... arguments) {
  try {
    *thread = std::thread(function, std::forward<Arguments>(arguments)...);
    return {};
  } catch (const std::system_error& error) {
    return Status::Internal("rank " + std::to_string(rank) +
                            ": it must be able to start a thread, but cannot: " + error.code().message() +
                            ". Raise the number of processes that this user or container may have (ulimit -u, "
                            "pids.max).");
  }
}

// For what nothing wakes.
inline void SleepBriefly() {
  const timespec pause = {0, 100000};
  nanosleep(&pause, nullptr);
}

}  // namespace ringtrain
#endif  // RINGTRAIN_BASE_THREADS_H_
