#include "transport/peer_process.h"

#include <errno.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace ringtrain {
namespace {

#ifdef SYS_pidfd_open
constexpr long kPidfdOpen = SYS_pidfd_open;
#else
constexpr long kPidfdOpen = 434;  // on all machines that we are built for; older headers lack it
#endif

// The inode of the calling process's PID namespace; 0 if there is no /proc to ask.
uint64_t OwnNamespace() {
  struct stat information;
  return stat("/proc/self/ns/pid", &information) == 0 ? information.st_ino : 0;
}

}  // namespace

void ProcessName::Write() {
  pid_namespace_.store(OwnNamespace(), std::memory_order_relaxed);
  pid_.store(getpid(), std::memory_order_release);
}

int32_t ProcessName::Here() const {
  const int32_t pid = pid_.load(std::memory_order_acquire);
  const uint64_t its_namespace = pid_namespace_.load(std::memory_order_relaxed);
  return pid != getpid() && its_namespace != 0 && its_namespace == OwnNamespace() ? pid : 0;
}

PeerProcess::PeerProcess(const ProcessName& name) {
  const int32_t pid = name.Here();
  if (pid == 0) return;
  descriptor_ = static_cast<int>(syscall(kPidfdOpen, pid, 0));  // closed by exec
  gone_ = descriptor_ < 0 && errno == ESRCH;
}

PeerProcess::~PeerProcess() {
  if (descriptor_ >= 0) close(descriptor_);
}

bool PeerProcess::HasEnded() const {
  if (descriptor_ < 0) return gone_;
  pollfd ended = {descriptor_, POLLIN, 0};
  return poll(&ended, 1, 0) == 1;
}

}  // namespace ringtrain
