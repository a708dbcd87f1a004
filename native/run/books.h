// Books: what a context has beside its worlds, and what outlives each of them: its options, what has been submitted,
// and what is counted and told. Constant; each of them may be used by any thread.
#ifndef RINGTRAIN_RUN_BOOKS_H_
#define RINGTRAIN_RUN_BOOKS_H_

#include "base/counters.h"
#include "base/log.h"
#include "base/options.h"
#include "base/writer.h"
#include "observe/lateness.h"
#include "observe/timeline.h"
#include "observe/traffic.h"
#include "run/submission.h"

namespace ringtrain {

struct Books {
  const Options& options;
  SubmissionTable* const table;
  Counters* const counters;
  LatenessTable* const lateness;
  Timeline* const timeline;
  TrafficTable* const traffic;
  Log* const log;
  Writer* const writer;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_RUN_BOOKS_H_
