#include "core/fusion.h"

namespace ringtrain {
namespace {

bool OneDType(const Request& request) {
  for (const TensorSpec& tensor : request.tensors)
    if (tensor.dtype != request.tensors[0].dtype) return false;
  return !request.tensors.empty();
}

}  // namespace

bool CanFuse(const Response& one, const Response& other) {
  const Request &a = one.request, &b = other.request;
  if (a.operation != b.operation || !Find(a.operation)->fuses || one.devices != other.devices || a.root != b.root) return false;
  if (!Find(a.operation)->reduces) return true;  // bytes are bytes
  return OneDType(a) && OneDType(b) && a.tensors[0].dtype == b.tensors[0].dtype && a.reduction == b.reduction &&
         a.prescale == b.prescale && a.postscale == b.postscale && a.compression == b.compression &&
         one.weights == other.weights;
}

std::vector<std::vector<int>> Fuse(const std::vector<const Response*>& ready, size_t threshold_bytes) {
  std::vector<std::vector<int>> batches;
  std::vector<bool> taken(ready.size(), false);
  for (size_t first = 0; first < ready.size(); ++first) {
    if (taken[first]) continue;
    batches.push_back({static_cast<int>(first)});
    size_t bytes = ready[first]->request.bytes();
    for (size_t next = first + 1; next < ready.size() && bytes < threshold_bytes; ++next) {
      if (taken[next] || !CanFuse(*ready[first], *ready[next]) || bytes + ready[next]->request.bytes() > threshold_bytes) continue;
      taken[next] = true;
      bytes += ready[next]->request.bytes();
      batches.back().push_back(static_cast<int>(next));
    }
  }
  return batches;
}

}  // namespace ringtrain
