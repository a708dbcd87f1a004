// Window: the memory through which the members of one process set on one host run their pipeline of chunks.
//
// Each participant owns a few *contribution* slots, where it lays what others will reduce or fetch, a few *result*
// slots, where it lays what it has reduced or received for all, and four counters that only it writes. A counter says
// how many chunks of the window's endless sequence have passed a stage; chunk n uses slot n modulo the number of slots.
#ifndef RINGTRAIN_COLLECTIVES_WINDOW_H_
#define RINGTRAIN_COLLECTIVES_WINDOW_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/clock.h"
#include "collectives/topology.h"

namespace ringtrain {

struct alignas(64) StageCounters {
  std::atomic<uint64_t> packed;     // my contribution lies in its slot
  std::atomic<uint64_t> reduced;    // I no longer need anyone's contribution
  std::atomic<uint64_t> published;  // my result lies in its slot
  std::atomic<uint64_t> consumed;   // I no longer need anyone's result
};

// From this round trip on a step between hosts costs more than what is under way.
constexpr Nanoseconds kFarHosts = 1 * INT64_C(1000000);

struct WindowGeometry {
  size_t chunk_bytes = 0;   // of a contribution slot
  size_t result_bytes = 0;  // of a result slot
  int chunk_slots = 0;
  int result_slots = 0;

  size_t participant_bytes() const { return chunk_slots * chunk_bytes + result_slots * result_bytes; }
  size_t Bytes(int participants) const { return participants * (sizeof(StageCounters) + participant_bytes()); }
};

// The same on every member. chunk_bytes 0 chooses: small enough for the caches within one host, long enough to fill a
// wire between hosts; either shrinks until the window of the largest host keeps within most_bytes. round_trip: between
// hosts, the longest; 0: not known.
WindowGeometry MakeGeometry(const Topology& topology, size_t chunk_bytes, size_t most_bytes,
                            Nanoseconds round_trip = 0);

class Window {
 public:
  Window() = default;
  Window(char* memory, const WindowGeometry& geometry, int participants)
      : memory_(memory), geometry_(geometry), participants_(participants) {}

  bool mapped() const { return memory_ != nullptr; }
  StageCounters& counters(int local) const { return reinterpret_cast<StageCounters*>(memory_)[local]; }
  char* contribution(int local, uint64_t chunk) const {
    return Slots(local) + chunk % geometry_.chunk_slots * geometry_.chunk_bytes;
  }
  char* result(int local, uint64_t chunk) const {
    return Slots(local) + geometry_.chunk_slots * geometry_.chunk_bytes +
           chunk % geometry_.result_slots * geometry_.result_bytes;
  }

 private:
  char* Slots(int local) const {
    return memory_ + participants_ * sizeof(StageCounters) + local * geometry_.participant_bytes();
  }

  char* memory_ = nullptr;
  WindowGeometry geometry_;
  int participants_ = 0;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_COLLECTIVES_WINDOW_H_
