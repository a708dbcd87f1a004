// Wire: bytes between the ranks of a world, for those who have something to send or to receive. What moves them on is
// progress.h; a transport (transport.h) is both.
//
// Two kinds of traffic. Frames are small, unsolicited and ordered for each pair of ranks: negotiation. Messages are
// tensor bytes between two ranks that both know size and tag beforehand. Nothing blocks: work is started here and
// tested later, so that whoever drives the context can interleave negotiation and data. One thread at a time uses an
// instance (the context's driver).
#ifndef RINGTRAIN_TRANSPORT_WIRE_H_
#define RINGTRAIN_TRANSPORT_WIRE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"

namespace ringtrain {

// A peer whose connection has gone. cause: the wire's own words, without a full stop at their end, for the error.
// loses_large: the peer is there, but large packets to it are lost on the way.
struct LostPeer {
  int rank;
  std::string cause;
  bool loses_large = false;
};

// A function returns a bad Status only for what is not one peer's loss: a bug, wrong sizes, a library that is broken as
// a whole. A lost peer is an event of its own.
class Wire {
 public:
  using Ticket = int32_t;  // a started message, valid until Test says that it is complete

  virtual ~Wire() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Sends a frame of any size; the bytes are copied. Order is kept for each receiver.
  virtual Status SendFrame(int to, const std::string& frame) = 0;
  // Takes the next frame that has arrived, from any rank; *arrived is false if there is none.
  virtual Status ReceiveFrame(int* from, std::string* frame, bool* arrived) = 0;

  // Starts a message; memory belongs to the wire until the ticket is complete. Messages of one (pair, tag) match in
  // order. Sizes on both sides are equal and at most 1 GiB. 0 <= tag < kMaxTag.
  static constexpr int kMaxTag = 1 << 18;
  virtual Status StartSend(int to, int tag, const void* data, size_t bytes, Ticket* ticket) = 0;
  virtual Status StartReceive(int from, int tag, void* data, size_t bytes, Ticket* ticket) = 0;
  // Says whether the message is complete; a complete ticket is forgotten.
  virtual Status Test(Ticket ticket, bool* complete) = 0;
  // The world has failed: lets go of the memory of all messages under way, which go back to their owners now. Their
  // tickets are void.
  virtual void Abandon() = 0;

  // Takes the next peer whose connection has gone; false if there is none. Each peer is reported once, and only after
  // every frame that had arrived from it was taken by ReceiveFrame. From then on frames to it are dropped, and messages
  // with it never complete (their memory is given back by Abandon). A peer that has called Close has left and is not
  // lost. Called in every step of the driver: it costs one look at a flag while nobody is lost.
  virtual bool TakeLostPeer(LostPeer* lost) = 0;

  // How many frames and messages have arrived from a rank: while it rises, the rank lives.
  uint64_t arrivals(int from) const { return arrivals_.empty() ? 0 : arrivals_[static_cast<size_t>(from)]; }

  // Ends the wire. clean: all ranks agreed to end, so that what is collective may be done: no frame of this one is left
  // to arrive in another. Unfinished sends of frames are completed up to `timeout_seconds`; after it the wire is of no
  // further use.
  virtual void Close(bool clean, double timeout_seconds) = 0;
  // One line about the library behind it, for build_info and errors.
  virtual std::string Describe() const = 0;
  // Of the ways to the ranks that it is connected with, the longest, there and back, in seconds; 0 where that is not
  // known.
  virtual double LongestRoundTrip() { return 0; }
  // What it has found of the way to each rank that it sends tensors to, and what it has taken for it: a line each, as
  // rt_lines has it. Any thread's.
  virtual std::string Lines() { return ""; }

 protected:
  void CountArrival(int from) {
    if (arrivals_.empty()) arrivals_.resize(static_cast<size_t>(size()));
    ++arrivals_[static_cast<size_t>(from)];
  }

 private:
  std::vector<uint64_t> arrivals_;  // by rank; empty until the first
};

}  // namespace ringtrain
#endif  // RINGTRAIN_TRANSPORT_WIRE_H_
