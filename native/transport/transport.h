// Transport: what a rendezvous hands over and a backend implements. The interface that hides whether MPI or
// in-process queues carry the bytes. Its users take the part that they need: Wire to communicate, Progress to drive.
#ifndef RINGTRAIN_TRANSPORT_TRANSPORT_H_
#define RINGTRAIN_TRANSPORT_TRANSPORT_H_

#include "transport/progress.h"
#include "transport/wire.h"

namespace ringtrain {

class Log;

class Transport : public Wire, public Progress {
 public:
  // Where it says what a person should know while it is open; nothing is said before.
  virtual void SetLog(Log*) {}
};

}  // namespace ringtrain
#endif  // RINGTRAIN_TRANSPORT_TRANSPORT_H_
