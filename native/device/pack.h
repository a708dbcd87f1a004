// Packing: many tensors into one fusion buffer on a GPU and back, by one kernel launch for up to 1360 of them.
//
// Compiled twice: by nvcc as the body of the kernels (pack.cu), and by the C++ compiler for machines without a GPU,
// where tests call the same functions. The work is cut into chunks of 16384 elements, which the blocks of threads share
// out, so that a large tensor and many small ones keep all of the GPU busy alike. A block finds its first chunk and
// goes on from there; with a chunk for each, as they are launched, an H100 was not slower. Values are scaled in
// float32, whatever the types.
#ifndef RINGTRAIN_DEVICE_PACK_H_
#define RINGTRAIN_DEVICE_PACK_H_

#include <cstdint>
#include <type_traits>

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define RT_ON_DEVICE __device__ __forceinline__
#define RT_UNROLL _Pragma("unroll")
#else
#include "kernels/float16.h"
#define RT_ON_DEVICE inline
#define RT_UNROLL _Pragma("GCC unroll 16")
#endif

namespace ringtrain {

constexpr uint32_t kPackChunk = 16384;           // elements that a block moves at a time
constexpr uint32_t kPackThreads = 512;           // in a block
constexpr uint32_t kSlicesInLaunch = 1360;       // as many as the 32764 bytes of a kernel's parameters hold
constexpr uint32_t kElementsInSlice = 1u << 30;  // at most; longer tensors are several slices

// Consecutive elements of one tensor, and their place in the buffer.
struct PackSlice {
  uint64_t tensor;       // address of the first element
  uint64_t offset;       // of its place in the buffer, in elements
  uint32_t elements;     // 0 is allowed
  uint32_t first_chunk;  // chunks of the slices before this one
};

// The parameter of every kernel. There are as many blocks as chunks, or fewer; without chunks a kernel does nothing.
struct PackLaunch {
  uint64_t buffer;  // address
  float scale;      // factor on each value; words are not scaled
  uint32_t slice_count;
  uint64_t chunks;  // of all slices
  PackSlice slices[kSlicesInLaunch];
};
static_assert(sizeof(PackSlice) == 24 && sizeof(PackLaunch) == 32664, "the PTX is generated for this layout");

constexpr uint32_t ChunksOf(uint32_t elements) { return (elements + kPackChunk - 1) / kPackChunk; }

struct Float16Element {
  uint16_t bits;
};
struct BFloat16Element {
  uint16_t bits;
};

RT_ON_DEVICE float ToFloat(float value) { return value; }
#ifdef __CUDACC__
RT_ON_DEVICE float ToFloat(Float16Element value) { return __half2float(__ushort_as_half(value.bits)); }
RT_ON_DEVICE float ToFloat(BFloat16Element value) { return __bfloat162float(__ushort_as_bfloat16(value.bits)); }
RT_ON_DEVICE void FromFloat(float value, Float16Element* to) { to->bits = __half_as_ushort(__float2half_rn(value)); }
RT_ON_DEVICE void FromFloat(float value, BFloat16Element* to) {
  to->bits = __bfloat16_as_ushort(__float2bfloat16_rn(value));
}
#else
RT_ON_DEVICE float ToFloat(Float16Element value) { return Float16ToFloat32(value.bits); }
RT_ON_DEVICE float ToFloat(BFloat16Element value) { return BFloat16ToFloat32(value.bits); }
RT_ON_DEVICE void FromFloat(float value, Float16Element* to) { to->bits = Float32ToFloat16(value); }
RT_ON_DEVICE void FromFloat(float value, BFloat16Element* to) { to->bits = Float32ToBFloat16(value); }
#endif
RT_ON_DEVICE void FromFloat(float value, float* to) { *to = value; }

template <typename To, typename From>
RT_ON_DEVICE void MoveElement(To* to, From from, float scale) {
  if constexpr (std::is_integral_v<To>)
    *to = from;
  else
    FromFloat(ToFloat(from) * scale, to);
}

// Neighbours that are loaded and stored in transfers of 16 bytes.
template <typename T, uint32_t kCount>
struct alignas(16) PackGroup {
  T element[kCount];
};

template <typename To, typename From>
constexpr uint32_t kInGroup = 16 / (sizeof(To) < sizeof(From) ? sizeof(To) : sizeof(From));

template <typename To, typename From>
RT_ON_DEVICE void MoveGroup(PackGroup<To, kInGroup<To, From>>* to, const PackGroup<From, kInGroup<To, From>>& from,
                            float scale) {
  PackGroup<To, kInGroup<To, From>> converted;
  RT_UNROLL
  for (uint32_t i = 0; i < kInGroup<To, From>; ++i) MoveElement(&converted.element[i], from.element[i], scale);
  *to = converted;
}

// One thread's share of a chunk, interleaved with the others' so that neighbouring threads touch neighbouring memory.
// Groups where both sides are aligned, with four loads under way before the first store; single elements otherwise.
template <typename To, typename From>
RT_ON_DEVICE void MoveShare(To* to, const From* from, uint32_t elements, float scale, uint32_t thread,
                            uint32_t threads) {
  using ToGroup = PackGroup<To, kInGroup<To, From>>;
  using FromGroup = PackGroup<From, kInGroup<To, From>>;
  constexpr uint32_t kUnderWay = 4;
  const bool aligned = (reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from)) % 16 == 0;
  const uint32_t groups = aligned ? elements / kInGroup<To, From> : 0;
  ToGroup* const to_groups = reinterpret_cast<ToGroup*>(to);
  const FromGroup* const from_groups = reinterpret_cast<const FromGroup*>(from);
  uint32_t at = thread;
  for (; at + (kUnderWay - 1) * threads < groups; at += kUnderWay * threads) {
    FromGroup loaded[kUnderWay];
    RT_UNROLL
    for (uint32_t i = 0; i < kUnderWay; ++i) loaded[i] = from_groups[at + i * threads];
    RT_UNROLL
    for (uint32_t i = 0; i < kUnderWay; ++i) MoveGroup<To, From>(&to_groups[at + i * threads], loaded[i], scale);
  }
  for (; at < groups; at += threads) MoveGroup<To, From>(&to_groups[at], from_groups[at], scale);
  for (at = groups * kInGroup<To, From> + thread; at < elements; at += threads) MoveElement(&to[at], from[at], scale);
}

// The last slice that begins no later than the chunk: an empty one begins where its successor does.
RT_ON_DEVICE uint32_t SliceOf(const PackLaunch& launch, uint32_t chunk) {
  uint32_t low = 0, high = launch.slice_count;
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    if (launch.slices[middle].first_chunk <= chunk)
      low = middle;
    else
      high = middle;
  }
  return low;
}

// Calls move(tensor's elements, buffer's, how many) for each chunk of a block's.
template <typename Tensor, typename Buffer, typename Move>
RT_ON_DEVICE void ForEachChunk(const PackLaunch& launch, uint32_t block, uint32_t blocks, const Move& move) {
  uint32_t chunk = static_cast<uint32_t>(launch.chunks * block / blocks);
  const uint32_t end = static_cast<uint32_t>(launch.chunks * (block + 1) / blocks);
  for (uint32_t index = SliceOf(launch, chunk); chunk < end; ++chunk) {
    while (index + 1 < launch.slice_count && launch.slices[index + 1].first_chunk <= chunk) ++index;
    const PackSlice& slice = launch.slices[index];
    const uint32_t begin = (chunk - slice.first_chunk) * kPackChunk;
    const uint32_t left = slice.elements - begin;
    move(reinterpret_cast<Tensor*>(slice.tensor) + begin,
         reinterpret_cast<Buffer*>(launch.buffer) + slice.offset + begin, left < kPackChunk ? left : kPackChunk);
  }
}

// The kernels: what thread `thread` of `threads` does of a block's chunks.
template <typename Tensor, typename Buffer>
RT_ON_DEVICE void PackShare(const PackLaunch& launch, uint32_t block, uint32_t blocks, uint32_t thread,
                            uint32_t threads) {
  ForEachChunk<Tensor, Buffer>(launch, block, blocks, [&](Tensor* tensor, Buffer* buffer, uint32_t elements) {
    MoveShare<Buffer, Tensor>(buffer, tensor, elements, launch.scale, thread, threads);
  });
}

template <typename Tensor, typename Buffer>
RT_ON_DEVICE void UnpackShare(const PackLaunch& launch, uint32_t block, uint32_t blocks, uint32_t thread,
                              uint32_t threads) {
  ForEachChunk<Tensor, Buffer>(launch, block, blocks, [&](Tensor* tensor, Buffer* buffer, uint32_t elements) {
    MoveShare<Tensor, Buffer>(tensor, buffer, elements, launch.scale, thread, threads);
  });
}

}  // namespace ringtrain
#endif  // RINGTRAIN_DEVICE_PACK_H_
