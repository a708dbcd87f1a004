// PromiseSlot: what one rank has promised of one process set's schedule (agree/schedule.h), in its host's memory. One
// rank writes it, the others of the host read it. All zeros, as fresh memory is, promises nothing.
//
// A counter must never be taken for another schedule's. The writer sets it to zero before it names another schedule,
// and raises it afterwards; a reader looks for the name before and behind the counter.
#ifndef RINGTRAIN_TRANSPORT_PROMISE_SLOT_H_
#define RINGTRAIN_TRANSPORT_PROMISE_SLOT_H_

#include <atomic>
#include <cstdint>

namespace ringtrain {

// Sets at one time that may run by a schedule.
constexpr int kMaxScheduledSets = 64;

struct alignas(64) PromiseSlot {
  struct Value {
    uint64_t promised = 0, agreed = 0;
    int64_t at = 0;
  };

  // key: of a process set and its schedule, never used again and not 0.
  void Write(uint64_t key, const Value& value) {
    if (key_.load(std::memory_order_relaxed) != key) {
      promised_.store(0, std::memory_order_relaxed);
      agreed_.store(0, std::memory_order_relaxed);
      key_.store(key, std::memory_order_release);
    }
    at_.store(value.at, std::memory_order_relaxed);
    agreed_.store(value.agreed, std::memory_order_release);
    promised_.store(value.promised, std::memory_order_release);
  }

  // Zeros if it is another schedule's.
  Value Read(uint64_t key) const {
    if (key_.load(std::memory_order_acquire) != key) return {};
    const Value value = {promised_.load(std::memory_order_acquire), agreed_.load(std::memory_order_acquire),
                         at_.load(std::memory_order_relaxed)};
    return key_.load(std::memory_order_relaxed) == key ? value : Value();
  }

 private:
  std::atomic<uint64_t> key_, promised_, agreed_;
  std::atomic<int64_t> at_;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_TRANSPORT_PROMISE_SLOT_H_
