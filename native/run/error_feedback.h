// ErrorFeedback: what rounding has lost of a batch's tensors before, and loses now (collectives/residuals.h): each
// tensor whose codec has feedback gets its residual, and pays what this rank owes of earlier worlds.
#ifndef RINGTRAIN_RUN_ERROR_FEEDBACK_H_
#define RINGTRAIN_RUN_ERROR_FEEDBACK_H_

#include <cstddef>
#include <memory>
#include <vector>

#include "agree/request.h"
#include "base/log.h"
#include "collectives/batch.h"
#include "collectives/group.h"
#include "collectives/residuals.h"

namespace ringtrain {

class ErrorFeedback {
 public:
  ErrorFeedback(const Group& group, Residuals* residuals, Log* log) : group_(group), residuals_(residuals), log_(log) {}

  // `tensor` is at this place of the request, and goes into `batch`. counts: by what this rank's input is multiplied in
  // the sum; 0 if nothing can be added to it. On one host nothing is rounded, but what was lost on several may be owed.
  void Add(const Request& request, size_t place, const Batch& batch, double counts, BatchTensor* tensor);
  // The batch is over: what it has lost is what the next ones make up for.
  void Turn();

 private:
  struct Rounded {
    Residual* residual;
    double divisor;
    bool paid;  // there was no debt, or it is in the input
  };

  bool PayDebt(const Batch& batch, const Residual& residual, double counts, BatchTensor* tensor);

  const Group& group_;
  Residuals* const residuals_;
  Log* const log_;
  std::vector<Rounded> rounded_;
  std::vector<std::unique_ptr<char[]>> with_debt_;  // inputs
};

}  // namespace ringtrain
#endif  // RINGTRAIN_RUN_ERROR_FEEDBACK_H_
