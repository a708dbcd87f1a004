#include "agree/check.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "base/ranks.h"
#include "include/ringtrain.h"

namespace ringtrain {
namespace {

constexpr int64_t kHighestWeight = RT_HIGHEST_WEIGHT;

Status Refuse(const Request& request, const std::string& text) {
  return Status::InvalidArgument(request.Subject() + ": " + text);
}

bool IsNegative(const TensorSpec& tensor) {
  return std::any_of(tensor.shape.begin(), tensor.shape.end(), [](int64_t extent) { return extent < 0; });
}

// Extents of 0 do not help: products of the others are formed on the way.
bool TooLarge(const TensorSpec& tensor) {
  auto bytes = static_cast<int64_t>(Bytes(tensor.dtype));
  return std::any_of(tensor.shape.begin(), tensor.shape.end(), [&](int64_t extent) {
    return __builtin_mul_overflow(bytes, std::max<int64_t>(extent, 1), &bytes);
  });
}

Status CheckTensors(const Request& request) {
  const bool needs_rows = Find(request.operation)->output == Output::kRows;
  for (const TensorSpec& tensor : request.tensors) {
    if (needs_rows && tensor.shape.empty())
      return Refuse(request, "the tensor must have a first dimension, but is a scalar. Reshape it to (1,).");
    if (tensor.shape.size() > RT_MAX_DIMENSIONS)
      return Refuse(request, "a tensor may have " + std::to_string(RT_MAX_DIMENSIONS) +
                                 " dimensions at most, but has " + std::to_string(tensor.shape.size()) +
                                 ". Reshape it.");
    if (IsNegative(tensor)) return Refuse(request, "the shape must not be negative, but is " + tensor.Text() + ".");
    if (TooLarge(tensor))
      return Refuse(request,
                    "a tensor must have fewer than 2^63 bytes, but is " + tensor.Text() + ". Send it in parts.");
  }
  return {};
}

Status CheckFactor(const Request& request, const char* name, double factor) {
  if (std::isfinite(factor)) return {};
  return Refuse(request, std::string(name) + " must be finite, but is " +
                             (std::isnan(factor) ? "nan"
                              : factor > 0       ? "inf"
                                                 : "-inf") +
                             ". Look at what it is computed from.");
}

Status CheckAdasum(const Request& request) {
  if (request.operation != Operation::kAllreduce)
    return Status::Unsupported(request.Subject() +
                               ": reduction adasum must be an allreduce's. Allreduce, and slice the result.");
  for (const TensorSpec& tensor : request.tensors)
    if (Find(tensor.dtype)->arithmetic != Arithmetic::kFloat)
      return Refuse(request,
                    "adasum needs floating-point tensors, but found " + tensor.Text() + ". Cast first, or use sum.");
  return {};
}

// Between hosts sums of squares travel, which leave the range of 16 bits, or its precision, where no value does.
Status CheckSquares(const Request& request) {
  for (const TensorSpec& tensor : request.tensors)
    if (tensor.dtype != DType::kFloat32 && tensor.dtype != DType::kFloat64)
      return Refuse(request, "reduction " + std::string(Text(request.reduction)) +
                                 " needs float32 or float64, but found " + tensor.Text() + ". Cast first.");
  if (request.compression == Compression::kNone) return {};
  return Refuse(request, "reduction " + std::string(Text(request.reduction)) +
                             " must not be compressed, but found compression " +
                             std::string(Text(request.compression)) + ". Leave it out.");
}

// The bits of a floating-point number are no flags.
Status CheckBits(const Request& request) {
  const std::string reduction = "reduction " + std::string(Text(request.reduction));
  if (request.prescale != 1.0 || request.postscale != 1.0)
    return Refuse(request, reduction + " must not be scaled. Leave the factors out.");
  for (const TensorSpec& tensor : request.tensors) {
    const Arithmetic arithmetic = Find(tensor.dtype)->arithmetic;
    if (arithmetic != Arithmetic::kInteger && arithmetic != Arithmetic::kBool)
      return Refuse(request, reduction + " needs integers or bool, but found " + tensor.Text() +
                                 ". Use min, max or sum, or view the tensor as integers.");
  }
  return {};
}

// Whether the reduction has a meaning for elements of this type.
Status CheckComputable(const Request& request, const TensorSpec& tensor) {
  const ReductionRow& reduction = *Find(request.reduction);
  const bool scales = request.prescale != 1.0 || request.postscale != 1.0;
  switch (Find(tensor.dtype)->arithmetic) {
    case Arithmetic::kNone:
      return Refuse(request, tensor.Text() +
                                 " cannot be reduced: a sum would lose most of its few bits. Cast to "
                                 "bfloat16 or float32 first; allgather, alltoall and broadcast take it.");
    case Arithmetic::kComplex:
      if (reduction.adds() || reduction.fold == Fold::kProject) return {};
      return Refuse(request, "of complex numbers the reduction must be sum or average, but is " +
                                 std::string(reduction.text) + ". Gather them, and combine them there.");
    case Arithmetic::kBool:
      if (reduction.divides())
        return Refuse(request, "the average of bool is not defined. Use sum (OR), product (AND), or cast first.");
      if (scales) return Refuse(request, "bool cannot be scaled. Cast first.");
      return {};
    default:
      return {};
  }
}

Status CheckReduction(const Request& request) {
  if (Find(request.reduction) == nullptr)
    return Refuse(request, "reduction " + std::to_string(static_cast<int>(request.reduction)) + " does not exist.");
  RT_TRY(CheckFactor(request, "prescale_factor", request.prescale));
  RT_TRY(CheckFactor(request, "postscale_factor", request.postscale));
  if (request.reduction == Reduction::kAdasum) RT_TRY(CheckAdasum(request));
  if (Find(request.reduction)->map == Map::kSquare) RT_TRY(CheckSquares(request));
  if (Find(request.reduction)->takes_bits()) RT_TRY(CheckBits(request));
  for (const TensorSpec& tensor : request.tensors) RT_TRY(CheckComputable(request, tensor));
  return {};
}

Status CheckWeight(const Request& request) {
  const bool reduces = Find(request.operation)->reduces;
  if (request.weight == Request::kNoCount) {
    if (!reduces || Find(request.reduction)->finish != Finish::kDivideByWeights) return {};
    return Refuse(request, "reduction " + std::string(Text(request.reduction)) +
                               " needs a weight, of how many items this rank's tensor is the sum. Pass weight; an "
                               "optimizer gets it by count() before each backward pass.");
  }
  if (!reduces || !Find(request.reduction)->divides())
    return Refuse(request, "only an average may be weighted. Leave the weight out, or use Average.");
  if (request.weight < 0 || request.weight > kHighestWeight)
    return Refuse(request, "the weight must be in [0, " + std::to_string(kHighestWeight) + "], but is " +
                               std::to_string(request.weight) + ".");
  for (const TensorSpec& tensor : request.tensors)
    if (!Rounds(Find(tensor.dtype)->arithmetic))
      return Refuse(request,
                    "a weighted average needs floating-point tensors, but found " + tensor.Text() + ". Cast first.");
  return {};
}

Status CheckCompression(const Request& request) {
  if (Text(request.compression) == nullptr)
    return Refuse(request, "compression " + std::to_string(static_cast<int>(request.compression)) + " does not exist.");
  if (Find(request.operation)->reduces && Find(request.compression)->adds && !Find(request.reduction)->adds())
    return Refuse(request, "with compression " + std::string(Text(request.compression)) +
                               " the reduction must be sum or average, but is " + Text(request.reduction) +
                               ". Use float16, bfloat16 or no compression.");
  if (request.compression == Compression::kNone || Find(request.operation)->reduces) return {};
  return Refuse(request, "only operations that reduce may be compressed, but found compression " +
                             std::string(Text(request.compression)) + ". Leave it out, or cast the tensor.");
}

Status CheckRoot(const Request& request, const std::vector<int>& members, const std::string& label = "root") {
  if (std::binary_search(members.begin(), members.end(), request.root)) return {};
  const bool whole_range = members.back() - members.front() + 1 == static_cast<int>(members.size());
  const std::string expected =
      whole_range ? "in [" + std::to_string(members.front()) + ", " + std::to_string(members.back() + 1) + ")"
                  : "one of " + RanksText(members);
  return Refuse(request, label + " must be " + expected + ", got " + std::to_string(request.root) + ".");
}

Status CheckSplits(const Request& request, const std::vector<int>& members) {
  const int64_t rows = request.tensors[0].shape[0];
  if (request.splits.size() != members.size())
    return Refuse(request, "splits must have one entry for each of the " + std::to_string(members.size()) +
                               " members, got " + std::to_string(request.splits.size()) + ".");
  const auto lowest = std::min_element(request.splits.begin(), request.splits.end());
  if (*lowest < 0) return Refuse(request, "splits must not be negative, but one is " + std::to_string(*lowest) + ".");
  int64_t sum = 0;
  const bool many = std::any_of(request.splits.begin(), request.splits.end(),
                                [&](int64_t split) { return __builtin_add_overflow(sum, split, &sum); });
  if (many || sum != rows)
    return Refuse(request, "splits must add up to the " + std::to_string(rows) + " rows of the tensor, but add up to " +
                               (many ? "more than 2^63" : std::to_string(sum)) + ".");
  return {};
}

// The ranks of a new process set, or the id of one that goes. members: of the set that decides, the world.
Status CheckProcessSet(const Request& request, const std::vector<int>& members) {
  const std::vector<int64_t>& list = request.splits;
  if (request.operation == Operation::kRemoveProcessSet) {
    if (list.size() == 1 && list[0] > 0) return {};
    return Refuse(request, "expected the id of one process set other than the world.");
  }
  const bool ascending = std::adjacent_find(list.begin(), list.end(), std::greater_equal<int64_t>()) == list.end();
  if (!list.empty() && ascending && std::includes(members.begin(), members.end(), list.begin(), list.end())) return {};
  return Refuse(request, "expected different ranks of the world in ascending order, one at least.");
}

Status CheckNewSet(const Request& request, const std::vector<int>& world) {
  std::vector<int64_t> ranks = request.splits;
  std::sort(ranks.begin(), ranks.end());
  const int64_t size = static_cast<int64_t>(world.size());
  if (ranks.empty()) return Refuse(request, "the process set must have one rank at least, but has none.");
  for (int64_t rank : {ranks.front(), ranks.back()})
    if (rank < 0 || rank >= size)
      return Refuse(request, "ranks must be in [0, " + std::to_string(size) + "), got " + std::to_string(rank) + ".");
  auto twice = std::adjacent_find(ranks.begin(), ranks.end());
  if (twice != ranks.end())
    return Refuse(request, "each rank may be listed once, but " + std::to_string(*twice) + " is listed again.");
  return {};
}

// The other rank is the root; a receive may leave it open.
Status CheckPair(const Request& request, const std::vector<int>& members) {
  if (request.tensors.size() != 1 || request.splits.size() != 1)
    return Refuse(request, "takes one tensor and one tag, got " + std::to_string(request.tensors.size()) + " and " +
                               std::to_string(request.splits.size()) + ".");
  if (request.operation == Operation::kReceive && request.root == kAnyRank) return {};
  return CheckRoot(request, members, request.operation == Operation::kSend ? "the rank to send to" : "the source");
}

}  // namespace

Status Check(const Request& request, const std::vector<int>& members) {
  const OperationRow& row = *Find(request.operation);
  RT_TRY(CheckTensors(request));
  if (row.reduces) RT_TRY(CheckReduction(request));
  RT_TRY(CheckWeight(request));
  RT_TRY(CheckCompression(request));
  if (row.rooted) RT_TRY(CheckRoot(request, members));
  if (row.layout == Layout::kPair) RT_TRY(CheckPair(request, members));
  if (request.operation == Operation::kAddProcessSet) RT_TRY(CheckNewSet(request, members));
  if (row.layout == Layout::kExchange) {
    if (request.tensors.size() != 1)
      return Refuse(request, "takes one tensor, got " + std::to_string(request.tensors.size()) + ".");
    RT_TRY(CheckSplits(request, members));
  }
  if (request.operation == Operation::kAddProcessSet || request.operation == Operation::kRemoveProcessSet)
    RT_TRY(CheckProcessSet(request, members));
  return {};
}

bool IsPossible(const TensorSpec& tensor) { return !IsNegative(tensor) && !TooLarge(tensor); }

Status Check(const Response& response) {
  const std::vector<int64_t>& weights = response.weights;
  if (weights.empty() || *std::max_element(weights.begin(), weights.end()) > 0) return {};
  if (Find(response.request.reduction)->finish == Finish::kDivideByWeights) return {};  // a sum of nothing
  return Status::Mismatch(response.request.Subject() +
                          ": some weight must be above 0, but those of all ranks that take part are 0. "
                          "Skip the operation on all ranks.");
}

bool Fits(const Request& request, const std::vector<int>& members) {
  const OperationRow& row = *Find(request.operation);
  if (!CheckTensors(request).ok() || (row.rooted && !CheckRoot(request, members).ok())) return false;
  if (row.layout == Layout::kPair) return false;  // which no coordinator hears of
  if (row.layout == Layout::kExchange) return request.tensors.size() == 1 && CheckSplits(request, members).ok();
  if (request.operation == Operation::kAddProcessSet || request.operation == Operation::kRemoveProcessSet)
    return CheckProcessSet(request, members).ok();
  return true;
}

bool Fits(const Response& response, const std::vector<int>& members) {
  if (!Fits(response.request, members)) return false;
  const Layout layout = Find(response.request.operation)->layout;
  size_t rows = 0;
  if (layout == Layout::kGather) rows = members.size() * response.request.tensors.size();
  if (layout == Layout::kExchange) rows = members.size() + 1;
  const auto one_each = [&](const std::vector<int64_t>& list) { return list.empty() || list.size() == members.size(); };
  const auto counts = [](const std::vector<int64_t>& list) {
    return std::all_of(list.begin(), list.end(), [](int64_t count) { return count >= 0; });
  };
  bool fits = response.rows.size() == rows && counts(response.rows) && one_each(response.devices);
#define RT_ATTRIBUTE(name, kind, initial, scope, label, advice)
#define RT_OWN_ATTRIBUTE(name, kind, initial, scope, label, advice) \
  fits = fits && one_each(response.name##s) && counts(response.name##s);
#include "tables/attributes.def"
#undef RT_ATTRIBUTE
  return fits;
}

bool IsPlain(const Response& response, const Request& first) {
  const Request& request = response.request;
  return request.operation == Operation::kAllreduce && request.reduction != Reduction::kAdasum &&
         Find(request.compression)->casts && request.compression == first.compression && response.weights.empty() &&
         response.devices.empty();
}

}  // namespace ringtrain
