// How many connections a way is given, by what the kernel has said of it; and what the kernel's words are.
#include "transport/tcp/line.h"

#include <linux/tcp.h>

#include <cstddef>

#include "check.h"
#include "transport/tcp/tcp_info.h"

using namespace ringtrain;

static_assert(offsetof(TcpInfo, rtt) == offsetof(tcp_info, tcpi_rtt));
static_assert(offsetof(TcpInfo, total_retrans) == offsetof(tcp_info, tcpi_total_retrans));
static_assert(offsetof(TcpInfo, min_rtt) == offsetof(tcp_info, tcpi_min_rtt));
static_assert(offsetof(TcpInfo, data_segs_out) == offsetof(tcp_info, tcpi_data_segs_out));
static_assert(offsetof(TcpInfo, delivery_rate) == offsetof(tcp_info, tcpi_delivery_rate));

namespace {

constexpr double kRate = 24e6;  // 200 Mbit/s

Line LineOf(double round_trip, double rate, double loss, const char* congestion) {
  Line line;
  line.Note({round_trip, rate, 10000, static_cast<uint64_t>(10000 * loss)}, congestion);
  return line;
}

}  // namespace

RT_TEST(a_short_way_has_one_connection_whatever_is_lost) {
  for (const double loss : {0.0, 0.01}) RT_CHECK_EQ(LineOf(0.004, 1e9, loss, "cubic").streams(), 1);
  RT_CHECK_EQ(LineOf(0.004, 1e9, 0, "cubic").PieceBytes(2), 256u << 10);
}

RT_TEST(a_long_way_has_as_many_as_its_losses_need) {
  constexpr double kSlow = 2e6;
  RT_CHECK_EQ(LineOf(0.05, 0, 0, "cubic").streams(), 4);  // before anything is known
  RT_CHECK_EQ(LineOf(0.05, kSlow, 1e-4, "cubic").streams(), 4);
  RT_CHECK_EQ(LineOf(0.05, kSlow, 1e-2, "cubic").streams(), 9);
  RT_CHECK_EQ(LineOf(0.05, kSlow, 0.5, "cubic").streams(), kMostStreams);
}

RT_TEST(a_long_way_has_as_many_as_fill_it_soon_after_a_rest) {
  RT_CHECK_EQ(LineOf(0.05, 8e6, 0, "cubic").streams(), 14);
  RT_CHECK_EQ(LineOf(0.05, kRate, 0, "cubic").streams(), kMostStreams);
}

RT_TEST(bbr_needs_several_for_their_buffers_alone) {
  RT_CHECK_EQ(LineOf(0.05, kRate, 1e-3, "bbr").streams(), 1);
  RT_CHECK_EQ(LineOf(0.05, 4e8, 0, "bbr").streams(), 10);
  RT_CHECK_EQ(LineOf(0.05, 2e9, 0, "bbr").streams(), kMostStreams);
}

RT_TEST(streams_never_become_fewer_while_the_way_is_long) {
  Line line = LineOf(0.05, kRate, 1e-3, "cubic");
  line.Note({0.05, 1e6, 1000000, 10}, "cubic");
  RT_CHECK_EQ(line.streams(), kMostStreams);
  line.Note({0.001, 1e6, 1000000, 10}, "cubic");  // a busy host had answered late
  RT_CHECK_EQ(line.streams(), 1);
}

// The kernel's least round trip is that of its last minutes.
RT_TEST(a_way_may_become_long) {
  Line line = LineOf(0.001, kRate, 0, "cubic");
  RT_CHECK(!line.is_long());
  line.Note({0.2, kRate, 20000, 0}, "cubic");
  RT_CHECK(line.is_long() && line.streams() > 1);
}

RT_TEST(old_losses_are_forgotten) {
  Line line = LineOf(0.05, kRate, 0.1, "cubic");
  uint64_t sent = 10000;
  for (int i = 0; i < 20; ++i) line.Note({0.05, kRate, sent += 20000, 1000}, "cubic");
  RT_CHECK(line.loss() < 1e-4);
}

RT_TEST(pieces_take_a_moment_of_their_connection) {
  const Line line = LineOf(0.05, kRate, 1e-3, "cubic");
  RT_CHECK_EQ(line.PieceBytes(16), 16u << 10);
  RT_CHECK(line.PieceBytes(1) > 64u << 10);
  RT_CHECK_EQ(LineOf(0.05, 1e9, 0, "cubic").PieceBytes(4), 256u << 10);
}

RT_TEST(samples_of_several_connections_are_one) {
  LineSample sample;
  sample.Add({0, 1, 10, 1});
  sample.Add({0.06, 2, 20, 2});
  sample.Add({0.05, 3, 30, 3});
  RT_CHECK_EQ(sample.round_trip, 0.05);
  RT_CHECK_EQ(sample.rate, 6.0);
  RT_CHECK_EQ(sample.sent, 60u);
  RT_CHECK_EQ(sample.lost, 6u);
}
