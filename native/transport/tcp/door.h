// Door: how connections begin. It listens, calls other ranks, has both ends prove themselves (hello.h), and hands out
// connections that are proven. Nothing that a stranger sends gets further than this file.
//
// A thread of the transport sleeps in Wait; everything here but Call, Watch, Wake and Stop is that thread's alone. It
// has room for some hundred that have not proven themselves, or all ranks if they are more, for five seconds each and a
// few dozen bytes. Where there is none, those who come wait in the kernel's queue until somebody has gone, or has been
// there for kLeastVisit: of these one loses its place, any of them, so that a flood of strangers leaves a rank a chance
// in each try. Without descriptors they wait there, too.
//
// A call that fails is tried again. Refused for kPatience it is given up, and the rank lost; silent, or cut short as
// for want of room, it is tried for as long as a world may take to start.
#ifndef RINGTRAIN_TRANSPORT_TCP_DOOR_H_
#define RINGTRAIN_TRANSPORT_TCP_DOOR_H_

#include <atomic>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/mutex.h"
#include "transport/tcp/hello.h"
#include "transport/tcp/socket.h"
#include "transport/tcp/strangers.h"

namespace ringtrain {

// Who this rank is, and where the others are.
struct TcpPlan {
  int rank = 0;
  uint64_t epoch = 0;
  HmacKey hello_key;
  std::vector<std::vector<Address>> peers;  // by rank: an address for each link; its own too
  int streams = 0;                          // data lanes for each link; 0: what the way needs (line.h)
  std::string congestion = "auto";          // of data lanes: a name, "auto" (line.h) or "kernel"
  double connect_seconds = 60;              // until a rank that does not answer is given up
  double dead_after_seconds = 15;           // until the kernel gives up a connection; 0: never

  int size() const { return static_cast<int>(peers.size()); }
  int links(int to) const { return static_cast<int>(peers[static_cast<size_t>(to)].size()); }
  // Data lanes to a rank: 1 to so many at most.
  int lanes(int to) const { return links(to) * (streams > 0 ? streams : kMostStreams); }
  // The link of a lane; the control lane takes the first.
  size_t link(int to, int lane) const {
    return lane == 0 ? 0 : static_cast<size_t>(lane - 1) % peers[static_cast<size_t>(to)].size();
  }
  // "10.0.0.2:4711 (rank 3)"
  std::string Name(int peer, int lane = 0) const;
};

// A connection of which both ends are proven. Records travel from the rank that called to the one that answered.
struct Connection {
  Socket socket;
  Claim claim;
  HmacKey record_key;
};

class Door {
 public:
  static constexpr size_t kVisitors = 512;  // that there is room for, if the world has no more ranks
  static constexpr double kVisitSeconds = 5.0;
  static constexpr Nanoseconds kLeastVisit = INT64_C(100000000);

  // Who is told; on the thread.
  class Owner {
   public:
    virtual void Opened(Connection connection) = 0;
    virtual void Unreachable(int peer, std::string cause) = 0;
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
  struct Outgoing;
  enum class Source : uint32_t { kWake, kWatched, kListener, kVisitor, kCall };

  bool Register(int descriptor, uint32_t events, Source source, uint32_t number, int operation);
  int NextTimeout() const;
  void ServeDeadlines();
  void TakeCalls();

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

  void Try(Outgoing* call);
  void ServeCall(uint32_t number);
  void HearAnswer(Outgoing* call);
  void Failed(Outgoing* call, int error);
  void Refused(Outgoing* call, std::string cause);
  void TryLater(Outgoing* call, std::string cause);
  void GiveUp(Outgoing* call);
  void Forget(uint32_t number);

  const TcpPlan& plan_;
  const std::vector<Socket> listeners_;
  Owner* const owner_;
  Socket events_, wake_;  // epoll, eventfd
  int watched_ = -1;
  std::atomic<bool> stop_{false};

  std::list<Visitor> visitors_;  // oldest first
  size_t room_ = kVisitors;
  std::list<Outgoing> calls_;
  uint32_t next_number_ = 0;
  Nanoseconds listen_again_ = kNever;  // without room, descriptors or memory nobody is let in
  bool is_full_ = false, has_rested_ = false;
  Strangers strangers_;

  Mutex mutex_;
  std::vector<std::pair<int, int>> wanted_ RT_GUARDED_BY(mutex_);  // calls that the thread has not seen yet
};

}  // namespace ringtrain
#endif  // RINGTRAIN_TRANSPORT_TCP_DOOR_H_
