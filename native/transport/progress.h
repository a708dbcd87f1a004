// Progress: what makes a transport move, for whoever drives a rank and decides when it may sleep.
#ifndef RINGTRAIN_TRANSPORT_PROGRESS_H_
#define RINGTRAIN_TRANSPORT_PROGRESS_H_

#include "base/status.h"

namespace ringtrain {

class Doorbell;

class Progress {
 public:
  virtual ~Progress() = default;

  // Moves unfinished sends on; needed only where nothing else calls in.
  virtual Status Drive() = 0;
  // True while something of this rank can only move by calling in again: unfinished sends, posted receives.
  virtual bool Busy() const = 0;
  // True if arrivals ring the doorbell given to SetDoorbell, false if they must be polled for.
  virtual bool RingsDoorbell() const = 0;
  // nullptr: none is rung any more.
  virtual void SetDoorbell(Doorbell* doorbell) = 0;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_TRANSPORT_PROGRESS_H_
