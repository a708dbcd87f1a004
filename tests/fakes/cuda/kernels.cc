#include "cuda/kernels.h"

#include <algorithm>
#include <memory>

#include "cuda/memory.h"
#include "device/pack.h"
#include "device/sum.h"
#include "strict.h"

namespace fakes {
namespace {

using ringtrain::PackLaunch;
using ringtrain::PackSlice;

// A launch whose addresses are those at which a stream's thread reaches the memory. Released when it goes.
class Reachable {
 public:
  Reachable(const void* parameters, size_t tensor_bytes, size_t buffer_bytes)
      : asked_(*static_cast<const PackLaunch*>(parameters)), launch_(std::make_unique<PackLaunch>(asked_)) {
    uint64_t end = 0;
    for (uint32_t i = 0; i < asked_.slice_count; ++i) {
      const PackSlice& slice = asked_.slices[i];
      if (slice.elements == 0) continue;
      launch_->slices[i].tensor = Use(slice.tensor, slice.elements * tensor_bytes);
      end = std::max(end, slice.offset + slice.elements);
    }
    launch_->buffer = Use(asked_.buffer, end * buffer_bytes);
  }
  ~Reachable() {
    for (uint32_t i = 0; i < asked_.slice_count; ++i)
      if (asked_.slices[i].elements > 0) ReleaseMemory(asked_.slices[i].tensor);
    ReleaseMemory(asked_.buffer);
  }
  const PackLaunch& launch() const { return *launch_; }

 private:
  static uint64_t Use(uint64_t address, size_t bytes) {
    return reinterpret_cast<uint64_t>(UseMemory(address, bytes, "a pack kernel"));
  }

  const PackLaunch& asked_;
  std::unique_ptr<PackLaunch> launch_;
};

// The chunks of a launch.
uint64_t CheckGrid(const PackLaunch& launch, Launch3 grid, Launch3 block) {
  if ((launch.slice_count == 0) != (launch.chunks == 0) || launch.slice_count > ringtrain::kSlicesInLaunch)
    Violation("a pack kernel with %u slices", launch.slice_count);
  uint64_t chunks = 0;
  for (uint32_t i = 0; i < launch.slice_count; ++i) {
    if (launch.slices[i].first_chunk != chunks)
      Violation("slice %u of a pack kernel begins at chunk %u, not at %lu", i, launch.slices[i].first_chunk, chunks);
    chunks += ringtrain::ChunksOf(launch.slices[i].elements);
  }
  if (launch.chunks != chunks || grid.x != std::max<uint64_t>(chunks, 1) || grid.y * grid.z != 1 ||
      block.x != ringtrain::kPackThreads || block.y * block.z != 1)
    Violation("a pack kernel of %lu chunks is launched as %u blocks of %u threads", chunks, grid.x, block.x);
  return chunks;
}

template <typename Tensor, typename Buffer, bool kUnpack>
void Run(const void* parameters, Launch3 grid, Launch3 block) {
  if (CheckGrid(*static_cast<const PackLaunch*>(parameters), grid, block) == 0) return;
  const Reachable reachable(parameters, sizeof(Tensor), sizeof(Buffer));
  for (uint32_t one = 0; one < grid.x; ++one) {
    if constexpr (kUnpack)
      ringtrain::UnpackShare<Tensor, Buffer>(reachable.launch(), one, grid.x, 0, 1);
    else
      ringtrain::PackShare<Tensor, Buffer>(reachable.launch(), one, grid.x, 0, 1);
  }
}

// Memory that one launch of a summing kernel reads or writes; released when it goes.
class Used {
 public:
  Used(uint64_t address, size_t bytes) : address_(bytes > 0 ? address : 0) {
    if (address_ != 0) reached_ = reinterpret_cast<uint64_t>(UseMemory(address, bytes, "a summing kernel"));
  }
  ~Used() {
    if (address_ != 0) ReleaseMemory(address_);
  }
  Used(const Used&) = delete;
  Used& operator=(const Used&) = delete;
  uint64_t reached() const { return reached_; }

 private:
  const uint64_t address_;
  uint64_t reached_ = 0;
};

template <typename Element, typename Value>
void RunSum(const void* parameters, Launch3 grid, Launch3 block) {
  const auto& asked = *static_cast<const ringtrain::SumLaunch*>(parameters);
  const uint64_t chunks = (asked.elements + ringtrain::kPackChunk - 1) / ringtrain::kPackChunk;
  if (chunks > 0 && (asked.members < 2 || asked.members > ringtrain::kMaxSummed || asked.me >= asked.members))
    Violation("a summing kernel of %u members by member %u", asked.members, asked.me);
  if (grid.x != std::max<uint64_t>(chunks, 1) || grid.y * grid.z != 1 || block.x != ringtrain::kPackThreads ||
      block.y * block.z != 1)
    Violation("a summing kernel of %lu chunks is launched as %u blocks of %u threads", chunks, grid.x, block.x);
  if (chunks == 0) return;
  const Used to(asked.to, asked.elements * sizeof(Element)), own(asked.own, asked.elements * sizeof(Element));
  const Used received(asked.received, ((asked.members - 2) * asked.stride + asked.elements) * sizeof(Element));
  const auto launch = std::make_unique<ringtrain::SumLaunch>(asked);
  launch->to = to.reached();
  launch->own = own.reached();
  launch->received = received.reached();
  for (uint32_t chunk = 0; chunk < grid.x; ++chunk) ringtrain::SumShare<Element, Value>(*launch, chunk, 0, 1);
}

}  // namespace

decltype(Function::body) FindKernel(const std::string& name) {
  using namespace ringtrain;
#define RT_PACKING(kernel, Tensor, Buffer)                        \
  if (name == "pack_" #kernel) return Run<Tensor, Buffer, false>; \
  if (name == "unpack_" #kernel) return Run<Tensor, Buffer, true>;
#include "device/pack.def"
#undef RT_PACKING
#define RT_SUMMING(kernel, Element, Value) \
  if (name == "sum_" #kernel) return RunSum<Element, Value>;
#include "device/sum.def"
#undef RT_SUMMING
  return nullptr;
}

}  // namespace fakes
