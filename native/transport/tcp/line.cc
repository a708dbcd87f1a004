#include "transport/tcp/line.h"

#include <algorithm>
#include <cmath>

#include "base/decimal.h"

namespace ringtrain {
namespace {

constexpr double kPacketBytes = 1448;     // that one carries over Ethernet
constexpr double kBufferOfOne = 2 << 20;  // what a connection may have under way: half of what kernels let it buffer
constexpr double kPacketsAfterRest = 20;  // that one sends within a round trip or two, once it has been idle
constexpr int kFirstStreams = 4;          // before the rate and the losses are known
constexpr double kMargin = 1.5;           // since some connections have just lost a packet
constexpr uint64_t kPacketsOfLately = 20000;
constexpr double kSecondsOfPiece = 4e-3;  // that sending it on its connection takes
constexpr uint32_t kLeastPiece = 16 << 10, kMostPiece = 256 << 10;

// Packets that a connection has under way on the mean, at such a share of losses (Mathis and others, 1997); cubic's are
// no fewer.
double WindowAt(double loss) { return 1.22 / std::sqrt(loss); }

int UpTo(double number, int most) { return static_cast<int>(std::clamp(std::ceil(number), 1.0, double(most))); }

}  // namespace

void LineSample::Add(const LineSample& other) {
  if (other.round_trip > 0) round_trip = round_trip > 0 ? std::min(round_trip, other.round_trip) : other.round_trip;
  rate += other.rate;
  sent += other.sent;
  lost += other.lost;
}

void Line::Note(const LineSample& sample, const std::string& congestion) {
  if (sample.round_trip > 0) round_trip_ = sample.round_trip;
  rate_ = std::max(sample.rate, 0.9 * rate_);
  sent_ += sample.sent - std::min(sample.sent, seen_sent_);
  lost_ += sample.lost - std::min(sample.lost, seen_lost_);
  seen_sent_ = sample.sent;
  seen_lost_ = sample.lost;
  if (sent_ > kPacketsOfLately) {
    sent_ /= 2;
    lost_ /= 2;
  }
  congestion_ = congestion;
  if (is_long()) streams_ = std::max(streams_, StreamsNeeded());
}

double Line::loss() const { return sent_ > 0 ? static_cast<double>(lost_) / static_cast<double>(sent_) : 0.0; }

int Line::StreamsNeeded() const {
  const double under_way = rate_ * round_trip_;
  const int for_buffers = UpTo(under_way / kBufferOfOne, kMostStreams);
  if (congestion_ == "bbr") return for_buffers;
  const double packets = under_way / kPacketBytes;
  const int for_losses = UpTo(kMargin * packets / WindowAt(loss()), kMostStreams);
  const int after_rest = UpTo(packets / kPacketsAfterRest, kMostStreams);
  return std::max({kFirstStreams, for_buffers, for_losses, after_rest});
}

uint32_t Line::PieceBytes(int streams) const {
  if (!is_long()) return kMostPiece;
  const double bytes = rate_ * kSecondsOfPiece / streams;
  return static_cast<uint32_t>(std::clamp(bytes, double(kLeastPiece), double(kMostPiece)));
}

std::string Line::Text() const {
  return Decimal("%.9g", round_trip_) + "|" + Decimal("%.9g", rate_) + "|" + Decimal("%.9g", loss());
}

}  // namespace ringtrain
