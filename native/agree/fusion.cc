#include "agree/fusion.h"

namespace ringtrain {
namespace {

bool OneDType(const Request& request) {
  for (const TensorSpec& tensor : request.tensors)
    if (tensor.dtype != request.tensors[0].dtype) return false;
  return !request.tensors.empty();
}

// Whether what counts for the operation is equal.
bool SameAttributes(const Response& one, const Response& other, const OperationRow& operation) {
#define RT_ATTRIBUTE(name, kind, initial, scope, label, advice) \
  if (Counts(Scope::scope, operation) && one.request.name != other.request.name) return false;
#define RT_OWN_ATTRIBUTE(name, kind, initial, scope, label, advice) \
  if (one.name##s != other.name##s) return false;
#include "tables/attributes.def"
#undef RT_ATTRIBUTE
  return true;
}

}  // namespace

bool CanFuse(const Response& one, const Response& other) {
  const Request &a = one.request, &b = other.request;
  const OperationRow& operation = *Find(a.operation);
  if (a.operation != b.operation || !operation.fuses || one.devices != other.devices) return false;
  if (!SameAttributes(one, other, operation)) return false;
  if (!operation.reduces) return true;  // bytes are bytes
  return OneDType(a) && OneDType(b) && a.tensors[0].dtype == b.tensors[0].dtype;
}

std::vector<std::vector<int>> Fuse(const std::vector<const Response*>& ready, size_t threshold_bytes) {
  std::vector<std::vector<int>> batches;
  std::vector<bool> taken(ready.size(), false);
  for (size_t first = 0; first < ready.size(); ++first) {
    if (taken[first]) continue;
    batches.push_back({static_cast<int>(first)});
    size_t bytes = ready[first]->request.bytes();
    for (size_t next = first + 1; next < ready.size() && bytes < threshold_bytes; ++next) {
      if (taken[next] || !CanFuse(*ready[first], *ready[next]) ||
          bytes + ready[next]->request.bytes() > threshold_bytes)
        continue;
      taken[next] = true;
      bytes += ready[next]->request.bytes();
      batches.back().push_back(static_cast<int>(next));
    }
  }
  return batches;
}

}  // namespace ringtrain
