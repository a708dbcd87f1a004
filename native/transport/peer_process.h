// PeerProcess: whether the process of another rank of this host has ended, as the kernel tells by a descriptor of it.
//
// Beside the life sign: it also tells of a process that ended before its rank's life sign began. It takes the process
// id, which each rank writes into its place in the shared memory, and a common PID namespace; without one, or with a
// kernel that has no such descriptors (before 5.3, or forbidden in a container), nothing is told.
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

 private:
  std::atomic<uint64_t> pid_namespace_;  // its inode
  std::atomic<int32_t> pid_;
};

class PeerProcess {
 public:
  // Should the process have ended before and another one have got its id, then the end of that one is taken for its
  // own, which is late and not wrong.
  explicit PeerProcess(const ProcessName& name);
  ~PeerProcess();
  PeerProcess(const PeerProcess&) = delete;
  PeerProcess& operator=(const PeerProcess&) = delete;

  bool HasEnded() const;

 private:
  bool gone_ = false;    // there was none when it was opened
  int descriptor_ = -1;  // -1: nothing will be told
};

}  // namespace ringtrain
#endif  // RINGTRAIN_TRANSPORT_PEER_PROCESS_H_
