// Transport: bytes between the ranks of a world. The seam behind which MPI and in-process queues are alike.
//
// Two kinds of traffic. Frames are small, unsolicited and ordered for each pair of ranks: negotiation. Messages are tensor
// bytes between two ranks that both know size and tag beforehand. Nothing blocks: work is started here and tested later, so
// that whoever drives the context can interleave negotiation and data. One thread at a time uses an instance (the context's
// driver); Abort alone may come from any thread.
#ifndef RINGTRAIN_TRANSPORT_TRANSPORT_H_
#define RINGTRAIN_TRANSPORT_TRANSPORT_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"

namespace ringtrain {

class Doorbell;

class Transport {
 public:
  using Ticket = int32_t;  // a started message, valid until Test says that it is complete

  virtual ~Transport() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Sends a frame of any size; the bytes are copied. Order is kept for each receiver.
  virtual Status SendFrame(int to, const std::string& frame) = 0;
  // Takes the next frame that has arrived, from any rank; *arrived is false if there is none.
  virtual Status ReceiveFrame(int* from, std::string* frame, bool* arrived) = 0;

  // Starts a message; memory belongs to the transport until the ticket is complete. Messages of one (pair, tag) match in order.
  // Sizes on both sides are equal and at most 1 GiB. 0 <= tag < kMaxTag.
  static constexpr int kMaxTag = 1 << 18;
  virtual Status StartSend(int to, int tag, const void* data, size_t bytes, Ticket* ticket) = 0;
  virtual Status StartReceive(int from, int tag, void* data, size_t bytes, Ticket* ticket) = 0;
  // Says whether the message is complete; a complete ticket is forgotten.
  virtual Status Test(Ticket ticket, bool* complete) = 0;
  // The world has failed: lets go of the memory of all messages under way, which go back to their owners now. Their tickets are void.
  virtual void Abandon() = 0;
  // Moves unfinished sends on; needed only where nothing else calls in.
  virtual Status Drive() = 0;

  // How many frames and messages have arrived from a rank: while it rises, the rank lives.
  uint64_t arrivals(int from) const { return arrivals_.empty() ? 0 : arrivals_[static_cast<size_t>(from)]; }

  // True while something of this rank can only move by calling in again: unfinished sends, posted receives.
  virtual bool Busy() const = 0;
  // True if arrivals ring the doorbell given to SetDoorbell, false if they must be polled for.
  virtual bool RingsDoorbell() const = 0;
  virtual void SetDoorbell(Doorbell* doorbell) = 0;

  // Ends the transport. clean: all ranks agreed to end, so that what is collective may be done: no frame of this one is left to
  // arrive in another. Unfinished sends of frames are completed up to `timeout_seconds`; after it the transport is of no further use.
  virtual void Close(bool clean, double timeout_seconds) = 0;
  // One line about the library behind it, for build_info and errors.
  virtual std::string Describe() const = 0;

 protected:
  void CountArrival(int from) {
    if (arrivals_.empty()) arrivals_.resize(static_cast<size_t>(size()));
    ++arrivals_[static_cast<size_t>(from)];
  }

 private:
  std::vector<uint64_t> arrivals_;  // by rank; empty until the first
};

}  // namespace ringtrain
#endif  // RINGTRAIN_TRANSPORT_TRANSPORT_H_
