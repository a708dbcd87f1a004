// Door: how connections begin. It listens, calls other ranks (calls.h), has both ends prove themselves (hello.h), and
// hands out connections that are proven. Nothing that a stranger sends gets further than this file.
//
// A thread of the transport sleeps in Wait; everything here but Call, Watch, Wake and Stop is that thread's alone. It
// has room for some hundred that have not proven themselves, or all ranks if they are more, for five seconds each and a
// few dozen bytes. Where there is none, those who come wait in the kernel's queue until somebody has gone, or has been
// there for kLeastVisit: of these one loses its place, any of them, so that a flood of strangers leaves a rank a chance
// in each try. Without descriptors they wait there, too.
#ifndef RINGTRAIN_TRANSPORT_TCP_DOOR_H_
#define RINGTRAIN_TRANSPORT_TCP_DOOR_H_

#include <atomic>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/mutex.h"
#include "transport/tcp/calls.h"
#include "transport/tcp/hello.h"
#include "transport/tcp/plan.h"
#include "transport/tcp/poll.h"
#include "transport/tcp/socket.h"
#include "transport/tcp/strangers.h"

namespace ringtrain {

class Door {
 public:
  static constexpr size_t kVisitors = 512;  // that there is room for, if the world has no more ranks
  static constexpr double kVisitSeconds = 5.0;
  static constexpr Nanoseconds kLeastVisit = INT64_C(100000000);

  // Who is told; on the thread.
  class Owner : public Calls::Owner {
   public:
    virtual void Notice(std::string line) = 0;  // for the log, see strangers.h

   protected:
    ~Owner() = default;
  };

  Door(const TcpPlan& plan, std::vector<Socket> listeners, Owner* owner);
  ~Door();
  // watched: the descriptor for Watch.
  Status Open(const Socket& watched);

  // Any thread: opens a lane to a rank; Opened or Unreachable follows.
  void Call(int peer, int lane);
  // Any thread: Wait returns once that descriptor is readable; once for each call.
  void Watch();
  void Wake();
  void Stop();

  // Serves whoever comes until the watched descriptor is readable, which *watched tells, or Wake. False after Stop.
  bool Wait(bool* watched);

 private:
  struct Visitor;
  using Source = Poll::Source;

  int NextTimeout() const;
  void ServeDeadlines();
  void TakeWanted();

  void Accept(const Socket& listener);
  void MakeRoom();
  void Rest(int error);
  void Listen();
  void StopListening(Nanoseconds until);
  void WatchListeners(uint32_t events);
  void ServeVisitor(uint32_t number);
  void TurnAway(std::list<Visitor>::iterator visitor, const char* reason);
  void TooLate(std::list<Visitor>::iterator visitor);
  void CutShort(std::list<Visitor>::iterator visitor);
  void SeeOff(std::list<Visitor>::iterator visitor);
  void TellOfStrangers(bool last);

  const TcpPlan& plan_;
  const std::vector<Socket> listeners_;
  Owner* const owner_;
  Poll poll_;
  Socket wake_;  // an eventfd
  int watched_ = -1;
  std::atomic<bool> stop_{false};

  std::list<Visitor> visitors_;  // oldest first
  size_t room_ = kVisitors;
  Calls calls_;
  uint32_t next_number_ = 0;
  Nanoseconds listen_again_ = kNever;  // without room, descriptors or memory nobody is let in
  bool is_full_ = false, has_rested_ = false;
  Strangers strangers_;

  Mutex mutex_;
  std::vector<std::pair<int, int>> wanted_ RT_GUARDED_BY(mutex_);  // calls that the thread has not seen yet
};

}  // namespace ringtrain
#endif  // RINGTRAIN_TRANSPORT_TCP_DOOR_H_
