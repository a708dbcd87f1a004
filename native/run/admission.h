// Admission: what one rank alone can see wrong with a submission, before any other rank hears of it. Any thread.
#ifndef RINGTRAIN_RUN_ADMISSION_H_
#define RINGTRAIN_RUN_ADMISSION_H_

#include <vector>

#include "base/options.h"
#include "device/device.h"
#include "run/submission.h"
#include "world/process_sets.h"

namespace ringtrain {

// Whether the rank may submit this to its process set at all, which has these members. Not ok: the peers are not told.
Status CheckMembership(const Submission& submission, const std::vector<int>& members, int rank);

class Admission {
 public:
  Admission(const Options& options, int rank, const ProcessSetTable* process_sets, const SubmissionTable* table,
            DeviceTable* devices)
      : options_(options), rank_(rank), process_sets_(process_sets), table_(table), devices_(devices) {}

  // Fills in what the caller left to the core, and records on the caller's streams when tensors on a GPU may be read
  // and written. Not ok: the peers must hear of the refusal.
  Status Admit(const std::vector<int>& members, Submission* submission) const;

 private:
  Status CheckPair(const Request& request) const;
  Status CheckAddition(const Request& request) const;
  Status CheckRemoval(const Request& request) const;
  Status MarkReady(Submission* submission) const;

  const Options& options_;
  const int rank_;
  const ProcessSetTable* const process_sets_;
  const SubmissionTable* const table_;
  DeviceTable* const devices_;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_RUN_ADMISSION_H_
