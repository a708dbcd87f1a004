// Line: what the way to another rank is like, and how TCP fills it. Pure: connections.cc measures and carries out.
//
// On a short way one connection fills the link, and nothing here is asked. On a long one, from kLongRoundTrip on, a
// loss costs a connection many round trips until it is back at its rate, if its congestion control takes losses for a
// full line, as cubic does. Several share the loss: each has a part of what is under way, so that one that has lost a
// packet slows a part down. BBR does not take losses for that, and needs several for their buffers alone.
#ifndef RINGTRAIN_TRANSPORT_TCP_LINE_H_
#define RINGTRAIN_TRANSPORT_TCP_LINE_H_

#include <cstdint>
#include <string>

namespace ringtrain {

constexpr double kLongRoundTrip = 5e-3;  // seconds
constexpr int kMostStreams = 32;         // that a rank opens by itself, over each link

// What the kernel says of connections to one rank, of all together.
struct LineSample {
  double round_trip = 0;  // the least of the last minutes, as many as the kernel looks back, in seconds; 0: none yet
  double rate = 0;        // bytes that are delivered in a second
  uint64_t sent = 0, lost = 0;  // packets with data so far, and how many of them were sent again

  void Add(const LineSample& other);
};

class Line {
 public:
  // Seconds; 0 before anything was measured.
  double round_trip() const { return round_trip_; }
  double rate() const { return rate_; }
  double loss() const;
  bool is_long() const { return round_trip_ >= kLongRoundTrip; }

  // congestion: by which its connections control their rate.
  void Note(const LineSample& sample, const std::string& congestion);
  const std::string& congestion() const { return congestion_; }

  // Connections that it needs. They never become fewer while it is long: what opens one is paid.
  int streams() const { return is_long() ? streams_ : 1; }
  // Bytes of a piece where several connections take turns: what one of them has taken waits for it, if it is held up.
  uint32_t PieceBytes(int streams) const;
  // "seconds of a round trip|bytes a second|share of the packets that was lost".
  std::string Text() const;

 private:
  int StreamsNeeded() const;

  double round_trip_ = 0, rate_ = 0;
  uint64_t sent_ = 0, lost_ = 0;            // of lately
  uint64_t seen_sent_ = 0, seen_lost_ = 0;  // in the last sample
  std::string congestion_;
  int streams_ = 1;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_TRANSPORT_TCP_LINE_H_
