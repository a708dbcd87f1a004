// PeerProcess: whether the process of another rank of this host has ended, as the kernel tells by a descriptor of it.
//
// Beside the life sign, which an older kernel that ends a process for want of memory may leave locked (before 5.18 it
// takes the list of locks away first), and which tells nothing of a process that ended before its rank's life sign
// began. It takes the process id, which each rank writes into its place in the shared memory, and a common PID
// namespace; without one, or with a kernel that has no such descriptors (before 5.3, or forbidden in a container),
// nothing is told.
#ifndef RINGTRAIN_TRANSPORT_PEER_PROCESS_H_
#define RINGTRAIN_TRANSPORT_PEER_PROCESS_H_

#include <atomic>
#include <cstdint>

namespace ringtrain {

// In shared memory. All zeros, as fresh memory is, names no process.
class ProcessName {
 public:
  // The calling process, in the namespace that it runs in.
  void Write();
  // The id of the named process for the calling one; 0 if it has none here, or is the calling one itself.
  int32_t Here() const;
  // What a descriptor of the named process shows and none of another; 0 if it is not known.
  uint64_t identity() const { return identity_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> pid_namespace_;  // its inode
  std::atomic<uint64_t> identity_;
  std::atomic<int32_t> pid_;
};

class PeerProcess {
 public:
  explicit PeerProcess(const ProcessName& name) : name_(name) {}
  ~PeerProcess();
  PeerProcess(const PeerProcess&) = delete;
  PeerProcess& operator=(const PeerProcess&) = delete;

  // By one thread at a time. The first question opens the descriptor: should the process have ended before and another
  // one have got its id, a kernel that shows no identity (before 6.9) tells of that one's end.
  bool HasEnded();

 private:
  void Open();

  const ProcessName& name_;
  bool opens_ = true;  // it has not been tried yet, or can be tried again
  bool gone_ = false;  // there was none when it was to be opened
  int descriptor_ = -1;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_TRANSPORT_PEER_PROCESS_H_
