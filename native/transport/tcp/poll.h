// Poll: what one thread waits for, by kinds and numbers of its own; a thin layer over epoll.
#ifndef RINGTRAIN_TRANSPORT_TCP_POLL_H_
#define RINGTRAIN_TRANSPORT_TCP_POLL_H_

#include <sys/epoll.h>

#include <cstdint>

#include "transport/tcp/socket.h"

namespace ringtrain {

class Poll {
 public:
  enum class Source : uint32_t { kWake, kWatched, kListener, kVisitor, kCall };
  struct Event {
    Source source;
    uint32_t number;
  };
  static constexpr int kMostEvents = 32;  // at once

  // False, with errno, as the others.
  bool Open() {
    events_ = Socket::Made([] { return epoll_create1(EPOLL_CLOEXEC); });
    return events_.open();
  }
  bool Add(int descriptor, uint32_t events, Source source, uint32_t number = 0) const {
    return Control(EPOLL_CTL_ADD, descriptor, events, source, number);
  }
  bool Change(int descriptor, uint32_t events, Source source, uint32_t number = 0) const {
    return Control(EPOLL_CTL_MOD, descriptor, events, source, number);
  }
  void Remove(int descriptor) const { epoll_ctl(events_.fd(), EPOLL_CTL_DEL, descriptor, nullptr); }

  // For so many milliseconds at most; -1: for ever. Returns how many there are, 0 after a signal too.
  int Wait(int timeout, Event* events) const {
    epoll_event ready[kMostEvents];
    const int count = epoll_wait(events_.fd(), ready, kMostEvents, timeout);
    for (int i = 0; i < count; ++i)
      events[i] = {static_cast<Source>(ready[i].data.u64 >> 32), static_cast<uint32_t>(ready[i].data.u64)};
    return count < 0 ? 0 : count;
  }

 private:
  bool Control(int operation, int descriptor, uint32_t events, Source source, uint32_t number) const {
    epoll_event event{};
    event.events = events;
    event.data.u64 = uint64_t{static_cast<uint32_t>(source)} << 32 | number;
    return epoll_ctl(events_.fd(), operation, descriptor, &event) == 0;
  }

  Socket events_;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_TRANSPORT_TCP_POLL_H_
