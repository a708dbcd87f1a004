// HostMemory: the memory that the ranks of one host share, as one rank sees it.
//
// It holds a control block (doorbells, signs of life, mailboxes, the abort notice), mapped from the start, and one
// window for each process set, mapped at its first operation. All of it starts as zeros, which every structure in it
// takes for its initial state. Two forms: POSIX shared memory between processes, and plain memory between contexts of
// one process.
#ifndef RINGTRAIN_TRANSPORT_HOST_MEMORY_H_
#define RINGTRAIN_TRANSPORT_HOST_MEMORY_H_

#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/doorbell.h"
#include "base/status.h"
#include "transport/life_sign.h"
#include "transport/peer_process.h"
#include "transport/promise_slot.h"

namespace ringtrain {

// Cells of a mailbox; see mail.h for the protocol.
struct MailCell {
  std::atomic<uint32_t> sequence;  // 2 * round: free, 2 * round + 1: full
  uint16_t from;                   // local rank of the sender
  uint8_t bytes;
  uint8_t last;  // 1 in the last cell of a frame
  static constexpr int kCapacity = 248;
  char data[kCapacity];
};
static_assert(sizeof(MailCell) == 256, "a cell is four cache lines");

struct Mailbox {
  static constexpr uint64_t kCells = 128;
  alignas(64) std::atomic<uint64_t> tail;  // next cell to fill; any sender
  alignas(64) uint64_t head;               // next cell to read; the owner only
  alignas(64) MailCell cells[kCells];
};

// The first cause of the end of the world on this host, written once.
struct AbortNotice {
  static constexpr int kNone = 0, kWriting = 1, kSet = 2;
  std::atomic<uint32_t> state;
  char text[1020];

  // False if another one was there before.
  bool Write(const char* words) {
    uint32_t before = kNone;
    if (!state.compare_exchange_strong(before, kWriting)) return false;
    std::strncpy(text, words, sizeof text - 1);
    state.store(kSet, std::memory_order_release);
    return true;
  }
  bool written() const { return state.load(std::memory_order_acquire) == kSet; }
};

struct alignas(64) HostControl {
  std::atomic<uint64_t> nonce;  // proves to a rank that opened the file that it is the right one
  AbortNotice abort;

  struct Place {
    Doorbell doorbell;
    LifeSign life;
    ProcessName process;
    Mailbox mailbox;
    PromiseSlot promises[kMaxScheduledSets];  // by the lane of the set
  };
  Place& place(int local_rank) { return reinterpret_cast<Place*>(this + 1)[local_rank]; }
  static size_t Bytes(int local_size) { return sizeof(HostControl) + local_size * sizeof(Place); }
};
static_assert(sizeof(HostControl) % alignof(HostControl::Place) == 0, "places are aligned to cache lines");

class HostMemory {
 public:
  virtual ~HostMemory() = default;
  HostMemory(int local_rank, int local_size) : local_rank_(local_rank), local_size_(local_size) {}
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  int local_rank() const { return local_rank_; }
  int local_size() const { return local_size_; }
  HostControl& control() const { return *control_; }
  Doorbell& doorbell(int local_rank) const { return control_->place(local_rank).doorbell; }

  // The process of that rank is known to have ended. Asked by one thread at a time, once all ranks of the host are
  // here.
  virtual bool HasEnded(int) { return false; }

  // Maps the window of a process set: the same zeroed memory for its `participants` on this host, of `bytes` equal for
  // all.
  virtual Status MapWindow(int process_set, int participants, size_t bytes, char** memory) = 0;
  // This rank is done with the window, for good. Its pages go with the last participant: one that has joined may still
  // wait for the others in it.
  virtual void UnmapWindow(int process_set) = 0;

 protected:
  HostControl* control_ = nullptr;

 private:
  const int local_rank_;
  const int local_size_;
};

// Between contexts of one process: the block that they share, one object for each simulated host.
class ProcessHost;
std::shared_ptr<ProcessHost> MakeProcessHost(int local_size);
std::unique_ptr<HostMemory> OpenProcessMemory(std::shared_ptr<ProcessHost> host, int local_rank);

// Between processes. The creator makes a file, mode 0600, with the world's window reserved in it, and gives it a random
// name; the others open it by that name and prove by the nonce that it is the same file; Unlink ends the name once all
// have.
class PosixMemory : public HostMemory {
 public:
  static Status Create(int local_size, size_t world_window_bytes, std::unique_ptr<PosixMemory>* memory);
  static Status Open(const std::string& name, uint64_t nonce, int local_rank, int local_size,
                     std::unique_ptr<PosixMemory>* memory);
  ~PosixMemory() override;

  const std::string& name() const { return name_; }
  uint64_t nonce() const { return control_->nonce.load(); }
  void Unlink();

  bool HasEnded(int local_rank) override;
  Status MapWindow(int process_set, int participants, size_t bytes, char** memory) override;
  void UnmapWindow(int process_set) override;

 private:
  struct Window {
    char* memory;
    size_t bytes;
    uint32_t participants;
    // Those that are done with it; in its last bytes.
    std::atomic<uint32_t>& done() const;
  };

  PosixMemory(int local_rank, int local_size) : HostMemory(local_rank, local_size) {}
  static Status Create(int local_size, size_t world_window_bytes, bool named_at_once,
                       std::unique_ptr<PosixMemory>* memory);
  Status Link();
  Status MapControl();
  Status Reserve(size_t offset, size_t bytes);

  std::string name_;
  bool linked_ = false;  // the creator's file still has its name
  int file_ = -1;
  size_t control_bytes_ = 0;
  std::map<int, Window> windows_;                    // by process set
  std::vector<std::unique_ptr<PeerProcess>> peers_;  // by local rank; empty until the first question
};

}  // namespace ringtrain
#endif  // RINGTRAIN_TRANSPORT_HOST_MEMORY_H_
