#include "agree/match.h"

#include <algorithm>
#include <functional>
#include <map>
#include <type_traits>

#include "agree/check.h"
#include "base/decimal.h"
#include "base/ranks.h"
#include "collectives/rows.h"

namespace ringtrain {
namespace {

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

template <typename Enum, typename = std::enable_if_t<std::is_enum_v<Enum>>>
std::string AttributeText(const char*, Enum value) {
  return Text(value);
}
std::string AttributeText(const char*, double value) { return Decimal("%.9g", value); }
std::string AttributeText(const char*, int value) { return std::to_string(value); }
// Of a member's own only whether there is one must agree: "by" the attribute's name, in the plural.
std::string AttributeText(const char* name, int64_t value) {
  return value == Request::kNoCount ? "none" : "by " + std::string(name) + "s";
}

// What must be equal on all ranks, in the order in which a difference is reported. An empty text: does not matter here.
struct Attribute {
  const char* name;
  std::function<std::string(const Request&)> text;
  const char* advice;
};

const std::vector<Attribute>& Attributes() {
  static const std::vector<Attribute> attributes = {
      {"operation", [](const Request& r) { return std::string(Text(r.operation)); },
       "Use different names for different operations, and the same mode for an optimizer."},
      {"number of tensors", [](const Request& r) { return std::to_string(r.tensors.size()); },
       "Group the same tensors on every rank; of gradients, freeze the same layers everywhere."},
      {"dtype", DTypesText, "Cast before submitting."},
      {"shape", [](const Request& r) { return ShapesText(r, Ragged(Find(r.operation)->layout)); },
       "Pad or slice to one shape; allgather and alltoall take rows of any number, but of one shape."},
#define RT_ATTRIBUTE(name, kind, initial, scope, label, advice)                                      \
  {label,                                                                                            \
   [](const Request& r) {                                                                            \
     return Counts(Scope::scope, *Find(r.operation)) ? AttributeText(#name, r.name) : std::string(); \
   },                                                                                                \
   advice},
#include "tables/attributes.def"
#undef RT_ATTRIBUTE
      {"device", [](const Request& r) { return std::string(r.device < 0 ? "host" : "CUDA"); },
       "Move the tensor to the same kind of device on every rank."},
      {"list", [](const Request& r) { return Ragged(Find(r.operation)->layout) ? std::string() : ListText(r.splits); },
       "Pass the same ranks on every rank."},
  };
  return attributes;
}

constexpr size_t kMostValues = 8;  // that a text has: with more the ranks of each say nothing any more

Status Compare(const Attribute& attribute, const std::vector<const Request*>& requests,
               const std::vector<int>& members) {
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
  const size_t told = std::min(groups.size(), kMostValues);
  for (size_t group = 0; group < told; ++group) {
    if (group > 0) text += group + 1 == groups.size() ? " and " : ", ";
    text += groups[group].first + " on " + RanksText(groups[group].second);
  }
  std::vector<int> others;
  for (size_t group = told; group < groups.size(); ++group)
    others.insert(others.end(), groups[group].second.begin(), groups[group].second.end());
  std::sort(others.begin(), others.end());
  if (!others.empty()) text += " and " + std::to_string(groups.size() - told) + " more on " + RanksText(others);
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
  const size_t count = first.own_rows().size();
  if (count == 0) return rows;
  rows.reserve(count * requests.size());
  for (const Request* request : requests) {
    std::vector<int64_t> own;
    if (request != nullptr) own = request->own_rows();
    own.resize(count);  // none of a member that has joined
    rows.insert(rows.end(), own.begin(), own.end());
  }
  return rows;
}

// An attribute of the members' own, by member.
std::vector<int64_t> OwnOf(const std::vector<const Request*>& requests, const Request& first,
                           int64_t Request::* attribute) {
  std::vector<int64_t> own;
  if (first.*attribute == Request::kNoCount) return own;
  for (const Request* request : requests) own.push_back(request == nullptr ? 0 : request->*attribute);
  return own;
}

std::vector<int64_t> DevicesOf(const std::vector<const Request*>& requests, const Request& first) {
  std::vector<int64_t> devices;
  if (first.device < 0) return devices;
  for (const Request* request : requests) devices.push_back(request == nullptr ? -1 : request->device);
  return devices;
}

// What any two members of one host have for each other, at most.
int64_t MostWithinHosts(const std::vector<int64_t>& rows, const std::vector<int>& hosts, size_t members) {
  std::map<int, std::vector<size_t>> members_of;
  for (size_t member = 0; member < members; ++member) members_of[hosts.empty() ? 0 : hosts[member]].push_back(member);
  int64_t most = 0;
  for (const auto& host : members_of)
    for (size_t from : host.second)
      for (size_t to : host.second)
        if (from != to) most = std::max(most, rows[from * members + to]);
  return most;
}

// The coordinator's share of what members have for each other, which it keeps beside it.
void ShareOut(std::vector<int64_t> rows, const std::vector<int>& hosts, size_t members, Response* response) {
  const int64_t most = MostWithinHosts(rows, hosts, members);
  response->exchanged = std::make_shared<const std::vector<int64_t>>(std::move(rows));
  response->rows.assign(members + 1, most);
  auto exchanged = response->exchanged;
  *response = response->For(0, static_cast<int>(members));
  response->exchanged = std::move(exchanged);
}

// The result of an allgather, or of an alltoall on any member, has no more rows than all have together.
Status CheckRows(const std::vector<int64_t>& all, const Response& response) {
  int64_t rows = 0;
  bool many =
      std::any_of(all.begin(), all.end(), [&](int64_t own) { return __builtin_add_overflow(rows, own, &rows); });
  for (const TensorSpec& tensor : response.request.tensors) {
    int64_t bytes;
    many = many || __builtin_mul_overflow(rows, std::max<int64_t>(1, static_cast<int64_t>(tensor.row_bytes())), &bytes);
  }
  if (!many || all.empty()) return {};
  return Status::Mismatch(response.request.Subject() +
                          ": the rows of all ranks must have fewer than 2^63 bytes together, but have more. "
                          "Send them in parts.");
}

}  // namespace

Status Match(const std::vector<const Request*>& requests, const std::vector<int>& members,
             const std::vector<int>& hosts, Response* response) {
  const Request* first = nullptr;
  for (const Request* request : requests)
    if (first == nullptr) first = request;
  bool same = true;
  const Request* seen = first;  // members whose requests came in one share it
  for (const Request* request : requests) {
    if (request == nullptr || request == seen) continue;
    same = same && *request == *first;
    seen = request;
  }
  if (!same)
    for (const Attribute& attribute : Attributes()) RT_TRY(Compare(attribute, requests, members));
  RT_TRY(CheckJoined(requests, members, *first));

  response->request = *first;
  std::vector<int64_t> rows = RowsOf(requests, *first);
  RT_TRY(CheckRows(rows, *response));
  if (Find(first->operation)->layout == Layout::kExchange)
    ShareOut(std::move(rows), hosts, requests.size(), response);
  else
    response->rows = std::move(rows);
#define RT_ATTRIBUTE(name, kind, initial, scope, label, advice)
#define RT_OWN_ATTRIBUTE(name, kind, initial, scope, label, advice) \
  response->name##s = OwnOf(requests, *first, &Request::name);
#include "tables/attributes.def"
#undef RT_ATTRIBUTE
  response->devices = DevicesOf(requests, *first);
  return Check(*response);
}

}  // namespace ringtrain
