#include "device/pack_plan.h"

#include <algorithm>

namespace ringtrain {

Status InLaunches(const std::vector<PackedTensor>& tensors, size_t bytes_of_element, PackLaunch* launch,
                  const std::function<Status(uint32_t chunks)>& perform) {
  uint32_t chunks = 0;
  launch->slice_count = 0;
  const auto flush = [&] {
    launch->chunks = chunks;
    const Status status = chunks > 0 ? perform(chunks) : Status();
    launch->slice_count = chunks = 0;
    return status;
  };
  for (const PackedTensor& tensor : tensors)
    for (uint64_t begin = 0; begin < tensor.elements; begin += kElementsInSlice) {
      const uint32_t elements = static_cast<uint32_t>(std::min<uint64_t>(kElementsInSlice, tensor.elements - begin));
      launch->slices[launch->slice_count++] = {tensor.address + begin * bytes_of_element, tensor.offset + begin,
                                               elements, chunks};
      chunks += ChunksOf(elements);
      if (launch->slice_count < kSlicesInLaunch) continue;
      if (const Status status = flush(); !status.ok()) return status;
    }
  return flush();
}

}  // namespace ringtrain
