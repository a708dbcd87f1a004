// Stream: tensors of one rank for another, one behind the other, in an order that both know. Each of the two has its
// end of it.
//
// Between hosts the bytes are messages of the wire. Within a host they pass through some slots of shared memory: chunk
// n of the stream uses slot n modulo their number, and two counters say how many chunks are written and read. The
// sender copies in while the receiver copies out, so that with a core each it takes about as long as one copy.
#ifndef RINGTRAIN_COLLECTIVES_STREAM_H_
#define RINGTRAIN_COLLECTIVES_STREAM_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "base/counters.h"
#include "base/doorbell.h"
#include "base/status.h"
#include "kernels/handover.h"
#include "transport/wire.h"

namespace ringtrain {

class StreamEnd {
 public:
  struct Piece {
    uint64_t number;  // of the send or receive
    char* data;       // of a sender's it is only read
    size_t bytes;     // above 0
  };

  virtual ~StreamEnd() = default;
  // The memory belongs to the stream until the number is done.
  virtual void Add(const Piece& piece) = 0;
  // Does what can be done without waiting; appends what is done. Bounded work.
  virtual Status Advance(bool* moved, std::vector<uint64_t>* done) = 0;
  virtual bool busy() const = 0;
};

// The memory of a stream within a host; all zeros at its start.
struct StreamMemory {
  static constexpr size_t kSlotBytes = 64 << 10;
  static constexpr int kSlots = 16;

  alignas(64) std::atomic<uint64_t> written;  // chunks; by the sender
  alignas(64) std::atomic<uint64_t> read;     // by the receiver
  alignas(64) char slots[kSlots][kSlotBytes];
};

// peer: the other end's doorbell.
std::unique_ptr<StreamEnd> OpenSharedStream(StreamMemory* memory, Doorbell* peer, bool sends, Counters* counters);
// tag: for no other messages between the two.
std::unique_ptr<StreamEnd> OpenWireStream(Wire* wire, int peer, int tag, bool sends);

}  // namespace ringtrain
#endif  // RINGTRAIN_COLLECTIVES_STREAM_H_
