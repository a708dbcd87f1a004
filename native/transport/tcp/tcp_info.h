// TcpInfo: what the kernel says of a connection by TCP_INFO, as Linux has it since 4.9. The C library's own tcp_info
// ends earlier. Facts of the kernel's interface; tests/native/line_test.cc compares them with its header.
#ifndef RINGTRAIN_TRANSPORT_TCP_TCP_INFO_H_
#define RINGTRAIN_TRANSPORT_TCP_TCP_INFO_H_

#include <cstdint>

namespace ringtrain {

struct TcpInfo {
  uint8_t before[68];
  uint32_t rtt;  // microseconds, smoothed
  uint8_t between[28];
  uint32_t total_retrans;
  uint64_t pacing_rate, max_pacing_rate, bytes_acked, bytes_received;
  uint32_t segs_out, segs_in, notsent_bytes;
  uint32_t min_rtt;  // microseconds
  uint32_t data_segs_in, data_segs_out;
  uint64_t delivery_rate;  // bytes in a second
};

}  // namespace ringtrain
#endif  // RINGTRAIN_TRANSPORT_TCP_TCP_INFO_H_
