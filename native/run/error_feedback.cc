#include "run/error_feedback.h"

namespace ringtrain {
namespace {

template <typename Element>
void AddScaledTo(Element* sum, const Element* input, const float* more, size_t count, Element factor) {
  for (size_t i = 0; i < count; ++i) sum[i] = input[i] + static_cast<Element>(more[i]) * factor;
}

// sum[i] = input[i] + more[i] * factor, of the dtypes that codecs with feedback know. Addresses as malloc gives them.
void AddScaled(DType dtype, char* sum, const char* input, const float* more, size_t count, double factor) {
  if (dtype == DType::kFloat64)
    AddScaledTo(reinterpret_cast<double*>(sum), reinterpret_cast<const double*>(input), more, count, factor);
  else
    AddScaledTo(reinterpret_cast<float*>(sum), reinterpret_cast<const float*>(input), more, count,
                static_cast<float>(factor));
}

}  // namespace

void ErrorFeedback::Add(const Request& request, size_t place, const Batch& batch, double counts, BatchTensor* tensor) {
  const auto elements = static_cast<size_t>(request.tensors[place].elements());
  Residual* const residual = group_.topology.host_count() > 1
                                 ? residuals_->Of(group_.process_set, request.name, place, elements)
                                 : residuals_->Find(group_.process_set, request.name, place, elements);
  if (residual == nullptr) return;
  if (residuals_->HasForgotten())
    log_->Warning(request.Subject() +
                  ": compressed operations must have names that come again, since what rounding "
                  "loses is kept for each, but so many came once that the oldest were forgotten. Leave numbers of "
                  "steps out of the names.");
  tensor->residual = residual;
  rounded_.push_back({residual, batch.scaling.divisor, PayDebt(batch, *residual, counts, tensor)});
}

// Adds what this rank owes to its input, so that it comes out of the sum as that part of the result. False if it stays:
// on a rank that contributes nothing.
bool ErrorFeedback::PayDebt(const Batch& batch, const Residual& residual, double counts, BatchTensor* tensor) {
  const float* const debt = residual.Debt();
  if (debt == nullptr) return true;
  if (tensor->input == nullptr || counts == 0.0) return false;
  with_debt_.push_back(std::make_unique<char[]>(tensor->bytes));
  AddScaled(batch.dtype, with_debt_.back().get(), tensor->input, debt, residual.elements(),
            batch.scaling.divisor / counts);
  tensor->input = with_debt_.back().get();
  return true;
}

void ErrorFeedback::Turn() {
  for (const Rounded& each : rounded_) residuals_->Turn(each.residual, each.divisor, each.paid);
}

}  // namespace ringtrain
