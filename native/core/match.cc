#include "core/match.h"

#include <algorithm>
#include <cstdio>
#include <functional>

#include "base/ranks.h"

namespace ringtrain {
namespace {

std::string NumberText(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.9g", value);
  return text;
}

std::string ShapesText(const Request& request, bool without_rows) {
  std::string text;
  for (const TensorSpec& tensor : request.tensors) {
    text += text.empty() ? "[" : ", [";
    for (size_t dimension = 0; dimension < tensor.shape.size(); ++dimension)
      text += (dimension > 0 ? ", " : "") +
              (dimension == 0 && without_rows ? std::string("*") : std::to_string(tensor.shape[dimension]));
    text += "]";
  }
  return text;
}

std::string DTypesText(const Request& request) {
  std::string text;
  for (const TensorSpec& tensor : request.tensors) text += (text.empty() ? "" : ", ") + std::string(Text(tensor.dtype));
  return text;
}

std::string ListText(const std::vector<int64_t>& values) {
  std::string text = "[";
  for (int64_t value : values) text += (text.size() > 1 ? ", " : "") + std::to_string(value);
  return text + "]";
}

bool RaggedRows(const Request& request) {
  return request.operation == Operation::kAllgather || request.operation == Operation::kAlltoall;
}

// What must be equal on all ranks, in the order in which a difference is reported. An empty text: does not matter here.
struct Attribute {
  const char* name;
  std::function<std::string(const Request&)> text;
  const char* advice;
};

const std::vector<Attribute>& Attributes() {
  static const std::vector<Attribute> attributes = {
      {"operation", [](const Request& r) { return std::string(Text(r.operation)); }, "Use different names for different operations."},
      {"number of tensors", [](const Request& r) { return std::to_string(r.tensors.size()); }, "Group the same tensors on every rank."},
      {"dtype", DTypesText, "Cast before submitting."},
      {"shape", [](const Request& r) { return ShapesText(r, RaggedRows(r)); },
       "Pad or slice to one shape, or use allgather for ragged rows."},
      {"reduction",
       [](const Request& r) { return Find(r.operation)->reduces ? std::string(Text(r.reduction)) : std::string(); },
       "Pass the same op on every rank."},
      {"prescale factor", [](const Request& r) { return NumberText(r.prescale); }, "Pass the same prescale_factor on every rank."},
      {"postscale factor", [](const Request& r) { return NumberText(r.postscale); }, "Pass the same postscale_factor on every rank."},
      {"weighting", [](const Request& r) { return std::string(r.weight == Request::kUnweighted ? "none" : "by weights"); },
       "Pass a weight on every rank, or on none."},
      {"compression", [](const Request& r) { return std::string(Text(r.compression)); }, "Pass the same compression on every rank."},
      {"root", [](const Request& r) { return Find(r.operation)->rooted ? std::to_string(r.root) : std::string(); },
       "Pass the same root_rank on every rank."},
      {"device", [](const Request& r) { return std::string(r.device < 0 ? "host" : "CUDA"); },
       "Move the tensor to the same kind of device on every rank."},
      {"list", [](const Request& r) { return r.operation == Operation::kAlltoall ? std::string() : ListText(r.splits); },
       "Pass the same ranks on every rank."},
  };
  return attributes;
}

Status Compare(const Attribute& attribute, const std::vector<const Request*>& requests, const std::vector<int>& members) {
  std::vector<std::pair<std::string, std::vector<int>>> groups;  // by first appearance
  const Request* first = nullptr;
  for (size_t member = 0; member < requests.size(); ++member) {
    if (requests[member] == nullptr) continue;
    if (first == nullptr) first = requests[member];
    std::string text = attribute.text(*requests[member]);
    size_t group = 0;
    while (group < groups.size() && groups[group].first != text) ++group;
    if (group == groups.size()) groups.emplace_back(text, std::vector<int>());
    groups[group].second.push_back(members[member]);
  }
  if (groups.size() == 1) return {};
  std::string text = first->Subject() + ": " + attribute.name + " must be the same on all ranks, but is ";
  for (size_t group = 0; group < groups.size(); ++group) {
    if (group > 0) text += group + 1 == groups.size() ? " and " : ", ";
    text += groups[group].first + " on " + RanksText(groups[group].second);
  }
  return Status::Mismatch(text + ". " + attribute.advice);
}

Status CheckJoined(const std::vector<const Request*>& requests, const std::vector<int>& members, const Request& first) {
  if (!Find(first.operation)->rooted) return {};
  for (size_t member = 0; member < requests.size(); ++member)
    if (members[member] == first.root && requests[member] == nullptr)
      return Status::Mismatch(first.Subject() + ": root " + std::to_string(first.root) +
                              " has joined and has nothing to send. Choose a root that still takes part.");
  return {};
}

std::vector<int64_t> RowsOf(const std::vector<const Request*>& requests, const Request& first) {
  std::vector<int64_t> rows;
  for (const Request* request : requests) {
    if (first.operation == Operation::kAllgather)
      for (size_t tensor = 0; tensor < first.tensors.size(); ++tensor)
        rows.push_back(request == nullptr ? 0 : request->tensors[tensor].shape[0]);
    if (first.operation == Operation::kAlltoall)
      for (size_t to = 0; to < requests.size(); ++to) rows.push_back(request == nullptr ? 0 : request->splits[to]);
  }
  return rows;
}

std::vector<int64_t> WeightsOf(const std::vector<const Request*>& requests, const Request& first) {
  std::vector<int64_t> weights;
  if (first.weight == Request::kUnweighted) return weights;
  for (const Request* request : requests) weights.push_back(request == nullptr ? 0 : request->weight);
  return weights;
}

std::vector<int64_t> DevicesOf(const std::vector<const Request*>& requests, const Request& first) {
  std::vector<int64_t> devices;
  if (first.device < 0) return devices;
  for (const Request* request : requests) devices.push_back(request == nullptr ? -1 : request->device);
  return devices;
}

}  // namespace

Status Match(const std::vector<const Request*>& requests, const std::vector<int>& members, Response* response) {
  const Request* first = nullptr;
  for (const Request* request : requests)
    if (first == nullptr) first = request;
  bool same = true;
  for (const Request* request : requests) same = same && (request == nullptr || *request == *first);
  if (!same)
    for (const Attribute& attribute : Attributes()) RT_TRY(Compare(attribute, requests, members));
  RT_TRY(CheckJoined(requests, members, *first));

  response->request = *first;
  response->rows = RowsOf(requests, *first);
  response->weights = WeightsOf(requests, *first);
  response->devices = DevicesOf(requests, *first);
  if (response->weights.empty() || *std::max_element(response->weights.begin(), response->weights.end()) > 0) return {};
  return Status::Mismatch(first->Subject() + ": some weight must be above 0, but those of all ranks that take part are 0. "
                                             "Skip the operation on all ranks.");
}

}  // namespace ringtrain
