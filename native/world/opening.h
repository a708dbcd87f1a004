// Opening: how a world begins. The ranks compare what must be equal on all of them, then meet.
#ifndef RINGTRAIN_WORLD_OPENING_H_
#define RINGTRAIN_WORLD_OPENING_H_

#include "base/options.h"
#include "base/status.h"
#include "transport/rendezvous.h"

namespace ringtrain {

// All ranks must call this; it waits for them up to start_timeout_seconds.
Status OpenWorld(Rendezvous& rendezvous, const Options& options, Meeting* meeting);

}  // namespace ringtrain
#endif  // RINGTRAIN_WORLD_OPENING_H_
