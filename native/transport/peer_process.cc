#include "transport/peer_process.h"

#include <errno.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

namespace ringtrain {
namespace {

#ifdef SYS_pidfd_open
constexpr long kPidfdOpen = SYS_pidfd_open;
#else
constexpr long kPidfdOpen = 434;  // on all machines that we are built for; older headers lack it
#endif
constexpr long kPidfs = 0x50494446;  // the file system of such descriptors, from Linux 6.9 on

// Closed by exec; negative if there is none.
int DescriptorOf(int32_t pid) { return static_cast<int>(syscall(kPidfdOpen, pid, 0)); }

// The inode of the calling process's PID namespace; 0 if there is no /proc to ask.
uint64_t OwnNamespace() {
  struct stat information;
  return stat("/proc/self/ns/pid", &information) == 0 ? information.st_ino : 0;
}

// 0 if the kernel shows none: it has one inode for the descriptors of all processes then.
uint64_t IdentityBy(int descriptor) {
  struct statfs system{};
  struct stat information;
  if (fstatfs(descriptor, &system) != 0 || static_cast<long>(system.f_type) != kPidfs) return 0;
  return fstat(descriptor, &information) == 0 ? information.st_ino : 0;
}

}  // namespace

void ProcessName::Write() {
  const int own = DescriptorOf(getpid());
  if (own >= 0) {
    identity_.store(IdentityBy(own), std::memory_order_relaxed);
    close(own);
  }
  pid_namespace_.store(OwnNamespace(), std::memory_order_relaxed);
  pid_.store(getpid(), std::memory_order_release);
}

int32_t ProcessName::Here() const {
  const int32_t pid = pid_.load(std::memory_order_acquire);
  const uint64_t its_namespace = pid_namespace_.load(std::memory_order_relaxed);
  return pid != getpid() && its_namespace != 0 && its_namespace == OwnNamespace() ? pid : 0;
}

PeerProcess::~PeerProcess() {
  if (descriptor_ >= 0) close(descriptor_);
}

void PeerProcess::Open() {
  const int32_t pid = name_.Here();
  if (pid == 0) return;
  descriptor_ = DescriptorOf(pid);
  if (descriptor_ < 0) {
    gone_ = errno == ESRCH;
    opens_ = errno == EMFILE || errno == ENFILE || errno == ENOMEM;
    return;
  }
  const uint64_t found = IdentityBy(descriptor_);
  gone_ = found != 0 && name_.identity() != 0 && found != name_.identity();  // another one has its id
}

bool PeerProcess::HasEnded() {
  if (opens_) {
    opens_ = false;
    Open();
  }
  if (gone_ || descriptor_ < 0) return gone_;
  pollfd ended = {descriptor_, POLLIN, 0};
  return poll(&ended, 1, 0) == 1;
}

}  // namespace ringtrain
