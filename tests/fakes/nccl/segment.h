// The memory in which the ranks of one communicator of the fake NCCL meet, processes and threads alike.
//
// Every rank maps it for itself, also within one process, so that ThreadSanitizer sees no order between ranks that NCCL
// does not give. Its name disappears from /dev/shm as soon as all ranks are there, or with the process that waits for
// the rest.
#ifndef RINGTRAIN_TESTS_FAKES_NCCL_SEGMENT_H_
#define RINGTRAIN_TESTS_FAKES_NCCL_SEGMENT_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace fakes {

constexpr int kMaxRanks = 8;
constexpr int kMaxComms = 16;           // of one rank on one device
constexpr size_t kSlotBytes = 1 << 17;  // what a rank publishes at a time; divides by the size of every dtype
constexpr size_t kPairBytes = 1 << 14;  // the same for Send and Recv

// What a rank is about to do, for the others to compare.
struct Announcement {
  int32_t kind, dtype, op, root;
  uint64_t count, registered;
  // How many operations this rank had launched on its other communicators of this device.
  uint64_t others[kMaxComms], launched[kMaxComms];
};

struct Member {
  std::atomic<uint32_t> present;
  std::atomic<uint32_t> gone;   // aborted or destroyed
  std::atomic<uint64_t> phase;  // how far it came; see Segment::Meet
  int32_t version, ranks;
  char uuid[16];
  int64_t bus;
  Announcement announcement;
  std::atomic<uint64_t> splits;          // how many splits it has asked for
  int32_t split_color[2], split_key[2];  // of the last two
};

struct Pair {
  std::atomic<uint64_t> sent, received;  // pieces
  uint64_t count;                        // elements of the message that the piece belongs to
  int32_t dtype;
  bool registered;  // the sender's memory
  alignas(16) char data[kPairBytes];
};

struct Shared {
  std::atomic<uint32_t> bell;    // futex: rings whenever anything here changes
  std::atomic<int32_t> failure;  // ncclResult_t for every rank
  std::atomic<uint32_t> explaining;
  char explanation[512];
  char grown_id[128];
  std::atomic<uint32_t> grown;
  Member members[kMaxRanks];
  alignas(16) char slots[kMaxRanks][kSlotBytes];
  Pair pairs[kMaxRanks][kMaxRanks];  // from, to
};

class Segment {
 public:
  explicit Segment(const std::string& name);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  Shared* operator->() const { return shared_; }
  Shared& operator*() const { return *shared_; }

  void Ring() const;
  // Until ready() holds or given_up() does; whether it was the former.
  bool Await(const std::function<bool()>& ready, const std::function<bool()>& given_up) const;
  // The first failure stays.
  void Fail(int result, const std::string& explanation) const;
  // All ranks are there: nobody needs the name any more.
  void Forget();

 private:
  std::string name_;
  Shared* shared_;
};

}  // namespace fakes
#endif  // RINGTRAIN_TESTS_FAKES_NCCL_SEGMENT_H_
