// Calls: the connections that this rank opens. Each is tried until the other end has proven itself; on the door's
// thread.
//
// A call that fails is tried again. Refused for kPatience it is given up, and the rank lost; silent, or cut short as
// for want of room, it is tried for as long as a world may take to start.
#ifndef RINGTRAIN_TRANSPORT_TCP_CALLS_H_
#define RINGTRAIN_TRANSPORT_TCP_CALLS_H_

#include <list>
#include <string>

#include "base/clock.h"
#include "transport/tcp/plan.h"
#include "transport/tcp/poll.h"

namespace ringtrain {

class Calls {
 public:
  // Who is told.
  class Owner {
   public:
    virtual void Opened(Connection connection) = 0;
    virtual void Unreachable(int peer, std::string cause) = 0;

   protected:
    ~Owner() = default;
  };

  // What is awaited comes to Serve, as Poll::Source::kCall.
  Calls(const TcpPlan& plan, const Poll& poll, Owner* owner);
  ~Calls();

  // Opens a lane to a rank; Opened or Unreachable follows.
  void Call(int peer, int lane);
  void Serve(uint32_t number);
  // When ServeDeadlines has something to do.
  Nanoseconds due() const;
  void ServeDeadlines(Nanoseconds now);

 private:
  struct Outgoing;

  void Try(Outgoing* call);
  void HearAnswer(Outgoing* call);
  void Failed(Outgoing* call, int error);
  void Refused(Outgoing* call, std::string cause);
  void TryLater(Outgoing* call, std::string cause);
  void GiveUp(Outgoing* call);
  void Forget(uint32_t number);

  const TcpPlan& plan_;
  const Poll& poll_;
  Owner* const owner_;
  std::list<Outgoing> calls_;
  uint32_t next_number_ = 0;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_TRANSPORT_TCP_CALLS_H_
