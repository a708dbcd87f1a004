#include "core/request.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "base/ranks.h"
#include "include/ringtrain.h"

namespace ringtrain {
namespace {

constexpr int64_t kHighestWeight = int64_t{1} << 40;  // sums of many are exact in double

int64_t ElementsFrom(const std::vector<int64_t>& shape, size_t first) {
  int64_t elements = 1;
  for (size_t dimension = first; dimension < shape.size(); ++dimension) elements *= shape[dimension];
  return elements;
}


Status Refuse(const Request& request, const std::string& text) {
  return Status::InvalidArgument(request.Subject() + ": " + text);
}

Status CheckTensors(const Request& request) {
  const bool needs_rows = Find(request.operation)->output == Output::kRows;
  for (const TensorSpec& tensor : request.tensors) {
    if (needs_rows && tensor.shape.empty())
      return Refuse(request, "the tensor must have a first dimension, but is a scalar. Reshape it to (1,).");
    if (tensor.shape.size() > RT_MOST_DIMENSIONS)
      return Refuse(request, "a tensor may have " + std::to_string(RT_MOST_DIMENSIONS) + " dimensions at most, but has " +
                                 std::to_string(tensor.shape.size()) + ". Reshape it.");
    if (std::any_of(tensor.shape.begin(), tensor.shape.end(), [](int64_t extent) { return extent < 0; }))
      return Refuse(request, "the shape must not be negative, but is " + tensor.Text() + ".");
  }
  return {};
}

Status CheckReduction(const Request& request) {
  if (Text(request.reduction) == nullptr)
    return Refuse(request, "reduction " + std::to_string(static_cast<int>(request.reduction)) + " does not exist.");
  const bool scales = request.prescale != 1.0 || request.postscale != 1.0;
  for (const TensorSpec& tensor : request.tensors) {
    if (tensor.dtype != DType::kBool) continue;
    if (request.reduction == Reduction::kAverage)
      return Refuse(request, "the average of bool is not defined. Use sum (OR), product (AND), or cast first.");
    if (scales) return Refuse(request, "bool cannot be scaled. Cast first.");
  }
  return {};
}

Status CheckWeight(const Request& request) {
  if (request.weight == Request::kUnweighted) return {};
  if (!Find(request.operation)->reduces || request.reduction != Reduction::kAverage)
    return Refuse(request, "only an average may be weighted. Leave the weight out, or use Average.");
  if (request.weight < 0 || request.weight > kHighestWeight)
    return Refuse(request, "the weight must be in [0, " + std::to_string(kHighestWeight) + "], but is " +
                               std::to_string(request.weight) + ".");
  for (const TensorSpec& tensor : request.tensors)
    if (!Find(tensor.dtype)->floating)
      return Refuse(request, "a weighted average needs floating-point tensors, but found " + tensor.Text() + ". Cast first.");
  return {};
}

Status CheckCompression(const Request& request) {
  if (Text(request.compression) == nullptr)
    return Refuse(request, "compression " + std::to_string(static_cast<int>(request.compression)) + " does not exist.");
  if (request.compression == Compression::kNone || Find(request.operation)->reduces) return {};
  return Refuse(request, "only operations that reduce may be compressed, but found compression " +
                             std::string(Text(request.compression)) + ". Leave it out, or cast the tensor.");
}

Status CheckRoot(const Request& request, const std::vector<int>& members) {
  if (std::binary_search(members.begin(), members.end(), request.root)) return {};
  const bool whole_range = members.back() - members.front() + 1 == static_cast<int>(members.size());
  const std::string expected = whole_range ? "in [" + std::to_string(members.front()) + ", " + std::to_string(members.back() + 1) + ")"
                                           : "one of " + RanksText(members);
  return Refuse(request, "root must be " + expected + ", got " + std::to_string(request.root) + ".");
}

Status CheckSplits(const Request& request, const std::vector<int>& members) {
  const int64_t rows = request.tensors[0].shape[0];
  if (request.splits.size() != members.size())
    return Refuse(request, "splits must have one entry for each of the " + std::to_string(members.size()) + " members, got " +
                               std::to_string(request.splits.size()) + ".");
  if (std::any_of(request.splits.begin(), request.splits.end(), [](int64_t split) { return split < 0; }))
    return Refuse(request, "splits must not be negative.");
  const int64_t sum = std::accumulate(request.splits.begin(), request.splits.end(), int64_t{0});
  if (sum != rows)
    return Refuse(request, "splits must add up to the " + std::to_string(rows) + " rows of the tensor, but add up to " +
                               std::to_string(sum) + ".");
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
  if (twice != ranks.end()) return Refuse(request, "each rank may be listed once, but " + std::to_string(*twice) + " is listed again.");
  return {};
}

}  // namespace

int64_t TensorSpec::elements() const { return ElementsFrom(shape, 0); }
int64_t TensorSpec::row_elements() const { return ElementsFrom(shape, 1); }

std::string TensorSpec::Text() const {
  std::string text = std::string(ringtrain::Text(dtype)) + "[";
  for (size_t dimension = 0; dimension < shape.size(); ++dimension)
    text += (dimension > 0 ? ", " : "") + std::to_string(shape[dimension]);
  return text + "]";
}

bool Request::operator==(const Request& other) const {
  return operation == other.operation && reduction == other.reduction && prescale == other.prescale &&
         postscale == other.postscale && weight == other.weight && compression == other.compression && root == other.root &&
         device == other.device && cacheable == other.cacheable &&
         name == other.name && tensors == other.tensors && splits == other.splits;
}

std::string Request::Subject() const { return std::string(Text(operation)) + " '" + name + "'"; }

size_t Request::bytes() const {
  size_t bytes = 0;
  for (const TensorSpec& tensor : tensors) bytes += tensor.bytes();
  return bytes;
}

Request Response::RequestOf(int member, int members) const {
  Request mine = request;
  const size_t tensors = mine.tensors.size();
  if (!weights.empty()) mine.weight = weights[member];
  if (!devices.empty()) mine.device = static_cast<int>(devices[member]);
  if (request.operation == Operation::kAllgather)
    for (size_t tensor = 0; tensor < tensors; ++tensor) mine.tensors[tensor].shape[0] = rows[member * tensors + tensor];
  if (request.operation == Operation::kAlltoall) {
    mine.splits.assign(rows.begin() + member * members, rows.begin() + (member + 1) * members);
    mine.tensors[0].shape[0] = std::accumulate(mine.splits.begin(), mine.splits.end(), int64_t{0});
  }
  return mine;
}

DType WireDType(Compression compression, DType dtype) {
  if (compression == Compression::kNone || (dtype != DType::kFloat32 && dtype != DType::kFloat64)) return dtype;
  return compression == Compression::kFloat16 ? DType::kFloat16 : DType::kBFloat16;
}

Status Check(const Request& request, const std::vector<int>& members) {
  const OperationRow& row = *Find(request.operation);
  RT_TRY(CheckTensors(request));
  if (row.reduces) RT_TRY(CheckReduction(request));
  RT_TRY(CheckWeight(request));
  RT_TRY(CheckCompression(request));
  if (row.rooted) RT_TRY(CheckRoot(request, members));
  if (request.operation == Operation::kAddProcessSet) RT_TRY(CheckNewSet(request, members));
  if (request.operation == Operation::kAlltoall) {
    if (request.tensors.size() != 1) return Refuse(request, "takes one tensor, got " + std::to_string(request.tensors.size()) + ".");
    RT_TRY(CheckSplits(request, members));
  }
  if (request.operation == Operation::kAddProcessSet || request.operation == Operation::kRemoveProcessSet)
    RT_TRY(CheckProcessSet(request, members));
  return {};
}

void Encode(const Request& request, Encoder* encoder) {
  encoder->Text(request.name);
  encoder->Byte(static_cast<uint8_t>(request.operation));
  encoder->Byte(static_cast<uint8_t>(request.reduction));
  encoder->Number(request.prescale);
  encoder->Number(request.postscale);
  encoder->Signed(request.weight);
  encoder->Byte(static_cast<uint8_t>(request.compression));
  encoder->Signed(request.root);
  encoder->Signed(request.device);
  encoder->Byte(request.cacheable);
  encoder->Unsigned(request.tensors.size());
  for (const TensorSpec& tensor : request.tensors) {
    encoder->Byte(static_cast<uint8_t>(tensor.dtype));
    encoder->SignedList(tensor.shape);
  }
  encoder->SignedList(request.splits);
}

Request DecodeRequest(Decoder* decoder) {
  Request request;
  request.name = decoder->Text();
  request.operation = static_cast<Operation>(decoder->Byte());
  request.reduction = static_cast<Reduction>(decoder->Byte());
  request.prescale = decoder->Number();
  request.postscale = decoder->Number();
  request.weight = decoder->Signed();
  request.compression = static_cast<Compression>(decoder->Byte());
  request.root = static_cast<int>(decoder->Signed());
  request.device = static_cast<int>(decoder->Signed());
  request.cacheable = decoder->Byte() != 0;
  request.tensors.resize(decoder->Count());
  for (TensorSpec& tensor : request.tensors) {
    tensor.dtype = static_cast<DType>(decoder->Byte());
    tensor.shape = decoder->SignedList();
    if (Find(tensor.dtype) == nullptr || tensor.shape.size() > RT_MOST_DIMENSIONS) decoder->Refuse();
  }
  request.splits = decoder->SignedList();
  if (Find(request.operation) == nullptr || Text(request.reduction) == nullptr || Text(request.compression) == nullptr)
    decoder->Refuse();
  return request;
}

void Encode(const Response& response, Encoder* encoder) {
  Encode(response.request, encoder);
  encoder->SignedList(response.rows);
  encoder->SignedList(response.weights);
  encoder->SignedList(response.devices);
  encoder->Signed(response.result);
}

Response DecodeResponse(Decoder* decoder) {
  Response response;
  response.request = DecodeRequest(decoder);
  response.rows = decoder->SignedList();
  response.weights = decoder->SignedList();
  response.devices = decoder->SignedList();
  response.result = static_cast<int>(decoder->Signed());
  return response;
}

}  // namespace ringtrain
