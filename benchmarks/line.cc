// A long line between hosts in network namespaces: carries IPv4 packets between TUN devices, at a rate, with a delay,
// and loses some. For kernels without netem. lines.py compiles and starts it.
//
//     line BITS_PER_SECOND DELAY_MICROSECONDS LOST_OF_A_MILLION BUFFER_BYTES SEED SITES DEVICE...
//
// It makes the devices, says so by a line, and carries until its input ends. A line of input with the first four
// numbers changes them; what is under way arrives as it would have. The packet for an address that ends in k
// goes to the kth device. The devices are at sites, as many at each, one site behind the other; within a site packets
// arrive at once. What the devices of a site send to others leaves at the rate, one packet behind the other; the buffer
// in front of that is bounded, and a packet that finds no room is dropped. The delay comes behind it, one way.
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr int64_t kNever = INT64_MAX;
constexpr int kPacketsInTurn = 64;  // of one device, before what is due is delivered

int64_t Now() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

struct Line {
  double bits_per_second = 0;
  int64_t delay = 0;  // nanoseconds
  double lost = 0;    // share of the packets
  int64_t buffer_bytes = 0;
  size_t sites = 0;

  int64_t TimeFor(int64_t bytes) const {
    return static_cast<int64_t>(static_cast<double>(bytes) * 8e9 / bits_per_second);
  }
};

struct Packet {
  int64_t arrives;
  int to;
  std::string bytes;
};

// One host's end.
struct Device {
  int descriptor = -1;
  size_t site = 0;
  std::deque<Packet> under_way;
};

int OpenTun(const char* name) {
  const int descriptor = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
  ifreq wanted{};
  wanted.ifr_flags = IFF_TUN | IFF_NO_PI;
  std::strncpy(wanted.ifr_name, name, IFNAMSIZ - 1);
  if (descriptor < 0 || ioctl(descriptor, TUNSETIFF, &wanted) != 0) {
    std::perror(name);
    std::exit(1);
  }
  return descriptor;
}

class Carrier {
 public:
  Carrier(const Line& line, unsigned seed, const std::vector<const char*>& names)
      : line_(line), random_(seed), free_at_(line.sites) {
    for (const char* name : names) devices_.push_back({OpenTun(name), devices_.size() * line.sites / names.size(), {}});
  }

  // Until the input ends.
  void Run() {
    while (Wait()) {
      for (Device& device : devices_) Take(&device);
      for (Device& device : devices_) Deliver(&device);
    }
  }

 private:
  // False if the input has ended.
  bool Wait() {
    int64_t next = kNever;
    std::vector<pollfd> polled = {{STDIN_FILENO, POLLIN, 0}};
    for (const Device& device : devices_) {
      polled.push_back({device.descriptor, POLLIN, 0});
      if (!device.under_way.empty()) next = std::min(next, device.under_way.front().arrives);
    }
    const int64_t wait = std::max<int64_t>(next - Now(), 0);
    const timespec timeout = {wait / 1000000000, wait % 1000000000};
    if (ppoll(polled.data(), polled.size(), next == kNever ? nullptr : &timeout, nullptr) <= 0) return true;
    return polled[0].revents == 0 || Change();
  }

  bool Change() {
    char text[256] = "";
    const ssize_t got = read(STDIN_FILENO, text, sizeof text - 1);
    long long delay = 0, buffer_bytes = 0;
    double lost = 0;
    if (std::sscanf(text, "%lf %lld %lf %lld", &line_.bits_per_second, &delay, &lost, &buffer_bytes) == 4) {
      line_.delay = delay * 1000;
      line_.lost = lost * 1e-6;
      line_.buffer_bytes = buffer_bytes;
    }
    return got > 0;
  }

  void Take(Device* from) {
    for (int count = 0; count < kPacketsInTurn; ++count) {
      const ssize_t got = read(from->descriptor, buffer_, sizeof buffer_);
      if (got <= 0) return;
      Send(from, static_cast<size_t>(got));
    }
  }

  void Send(Device* from, size_t bytes) {
    constexpr size_t kIpHeader = 20, kLastOfDestination = 19;
    if (bytes < kIpHeader || (buffer_[0] & 0xf0) != 0x40) return;
    const int to = static_cast<unsigned char>(buffer_[kLastOfDestination]) - 1;
    if (to < 0 || to >= static_cast<int>(devices_.size())) return;
    if (devices_[static_cast<size_t>(to)].site == from->site) return Write(to, buffer_, bytes);
    int64_t& free_at = free_at_[from->site];
    const int64_t now = Now(), begins = std::max(now, free_at);
    if (begins - now > line_.TimeFor(line_.buffer_bytes)) return;
    free_at = begins + line_.TimeFor(static_cast<int64_t>(bytes));
    if (share_(random_) < line_.lost) return;
    from->under_way.push_back({free_at + line_.delay, to, std::string(buffer_, bytes)});
  }

  void Deliver(Device* from) {
    const int64_t now = Now();
    while (!from->under_way.empty() && from->under_way.front().arrives <= now) {
      const Packet& packet = from->under_way.front();
      Write(packet.to, packet.bytes.data(), packet.bytes.size());
      from->under_way.pop_front();
    }
  }

  void Write(int to, const char* packet, size_t bytes) {
    [[maybe_unused]] const ssize_t written = write(devices_[static_cast<size_t>(to)].descriptor, packet, bytes);
  }

  Line line_;
  std::mt19937 random_;
  std::uniform_real_distribution<double> share_;
  std::vector<int64_t> free_at_;  // by site: when the last packet that it sends has left
  std::vector<Device> devices_;
  char buffer_[65536];
};

}  // namespace

int main(int count, char** words) {
  constexpr int kFirstDevice = 7;
  if (count <= kFirstDevice) return 2;
  const Line line = {std::atof(words[1]), std::atoll(words[2]) * 1000, std::atof(words[3]) * 1e-6, std::atoll(words[4]),
                     static_cast<size_t>(std::atoi(words[6]))};
  Carrier carrier(line, static_cast<unsigned>(std::atoi(words[5])), {words + kFirstDevice, words + count});
  setpriority(PRIO_PROCESS, 0, -15);  // or the line is slower than it says where those who use it compute
  std::puts("ready");
  std::fflush(stdout);
  carrier.Run();
}
