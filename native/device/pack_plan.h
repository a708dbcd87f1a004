// The launches that pack a list of tensors: which slices go into which, whatever the number and the size of the
// tensors.
#ifndef RINGTRAIN_DEVICE_PACK_PLAN_H_
#define RINGTRAIN_DEVICE_PACK_PLAN_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "base/status.h"
#include "device/pack.h"

namespace ringtrain {

// A tensor of any size and its place in the fusion buffer.
struct PackedTensor {
  uint64_t address;  // of its first element
  uint64_t offset;   // in elements of the buffer
  uint64_t elements;
};

// Fills the slices and chunks of *launch and calls `perform(number of chunks)` as often as it takes; ends at the first
// failure. The other fields of *launch are the caller's. Nothing is performed where there are no elements.
Status InLaunches(const std::vector<PackedTensor>& tensors, size_t bytes_of_element, PackLaunch* launch,
                  const std::function<Status(uint32_t chunks)>& perform);

}  // namespace ringtrain
#endif  // RINGTRAIN_DEVICE_PACK_PLAN_H_
