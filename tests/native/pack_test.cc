// The bodies of the pack kernels, run on the processor and compared with the plainest loops, and the plan of launches.
#include "device/pack.h"

#include <cstring>
#include <string>
#include <vector>

#include "check.h"
#include "device/pack_kernels.h"

namespace ringtrain {
namespace {

using Kernel = void (*)(const PackLaunch&, uint32_t, uint32_t, uint32_t, uint32_t);
constexpr uint32_t kMargin = 16;  // elements around each tensor, of which none may change
constexpr float kScale = 0.37f;

template <typename T>
T ElementOf(float value) {
  if constexpr (std::is_integral_v<T>)
    return static_cast<T>(static_cast<int64_t>(value * 1000));
  else {
    T element;
    FromFloat(value, &element);
    return element;
  }
}

template <typename To, typename From>
To Expected(From from, float scale) {
  if constexpr (std::is_integral_v<To>)
    return from;
  else
    return ElementOf<To>(ToFloat(from) * scale);
}

float ValueAt(uint64_t i) { return static_cast<float>(static_cast<int>(i * 2654435761u % 20011) - 10005) / 64; }

// Tensors of these sizes, each `shift` elements behind an aligned address, in a buffer where each begins at a multiple
// of `slot` elements.
template <typename Tensor, typename Buffer>
struct Scene {
  std::vector<std::vector<Tensor>> memory;
  std::vector<Buffer> buffer;
  std::vector<PackedTensor> tensors;
  PackLaunch launch{};

  Scene(const std::vector<uint64_t>& sizes, uint32_t shift, uint64_t slot) {
    uint64_t offset = kMargin;
    for (const uint64_t size : sizes) {
      memory.emplace_back(size + 2 * kMargin + shift, ElementOf<Tensor>(77));
      Tensor* const data = memory.back().data() + kMargin + shift;
      for (uint64_t i = 0; i < size; ++i) data[i] = ElementOf<Tensor>(ValueAt(i + offset));
      tensors.push_back({reinterpret_cast<uint64_t>(data), offset, size});
      offset += (size + kMargin + slot - 1) / slot * slot;
    }
    buffer.assign(offset + kMargin, ElementOf<Buffer>(55));
    launch.buffer = reinterpret_cast<uint64_t>(buffer.data());
    launch.scale = kScale;
  }

  // By blocks of so many threads, one after the other, each of which has `at_a_time` chunks. Returns how many launches
  // it took.
  int Run(Kernel kernel, uint32_t threads, uint32_t at_a_time = 1) {
    int launches = 0;
    RT_CHECK_OK(InLaunches(tensors, sizeof(Tensor), &launch, [&](uint32_t chunks) {
      ++launches;
      const uint32_t blocks = (chunks + at_a_time - 1) / at_a_time;
      for (uint32_t block = 0; block < blocks; ++block)
        for (uint32_t thread = 0; thread < threads; ++thread) kernel(launch, block, blocks, thread, threads);
      return Status();
    }));
    return launches;
  }
};

template <typename Tensor, typename Buffer>
void CheckPack(const std::vector<uint64_t>& sizes, uint32_t shift, uint64_t slot, uint32_t threads,
               uint32_t at_a_time = 1) {
  Scene<Tensor, Buffer> scene(sizes, shift, slot);
  std::vector<Buffer> expected = scene.buffer;
  for (const PackedTensor& tensor : scene.tensors)
    for (uint64_t i = 0; i < tensor.elements; ++i)
      expected[tensor.offset + i] = Expected<Buffer>(reinterpret_cast<const Tensor*>(tensor.address)[i], kScale);
  scene.Run(&PackShare<Tensor, Buffer>, threads, at_a_time);
  RT_CHECK(std::memcmp(scene.buffer.data(), expected.data(), expected.size() * sizeof(Buffer)) == 0);
}

template <typename Tensor, typename Buffer>
void CheckUnpack(const std::vector<uint64_t>& sizes, uint32_t shift, uint64_t slot, uint32_t threads,
                 uint32_t at_a_time = 1) {
  Scene<Tensor, Buffer> scene(sizes, shift, slot);
  for (size_t i = 0; i < scene.buffer.size(); ++i) scene.buffer[i] = ElementOf<Buffer>(ValueAt(i * 7));
  std::vector<std::vector<Tensor>> expected = scene.memory;
  for (size_t t = 0; t < sizes.size(); ++t)
    for (uint64_t i = 0; i < sizes[t]; ++i)
      expected[t][kMargin + shift + i] = Expected<Tensor>(scene.buffer[scene.tensors[t].offset + i], kScale);
  scene.Run(&UnpackShare<Tensor, Buffer>, threads, at_a_time);
  for (size_t t = 0; t < sizes.size(); ++t)
    RT_CHECK(std::memcmp(scene.memory[t].data(), expected[t].data(), expected[t].size() * sizeof(Tensor)) == 0);
}

const std::vector<uint64_t> kSizes = {0, 1, 3, 16383, 16384, 16385, (1 << 20) + 1};

template <typename Tensor, typename Buffer>
void CheckAll() {
  for (const uint64_t slot : {1, 64})
    for (const uint32_t shift : {0, 1, 2}) {
      CheckPack<Tensor, Buffer>(kSizes, shift, slot, 1);
      CheckUnpack<Tensor, Buffer>(kSizes, shift, slot, 1);
    }
  CheckPack<Tensor, Buffer>(kSizes, 0, 64, kPackThreads);
  CheckUnpack<Tensor, Buffer>(kSizes, 0, 64, kPackThreads);
}

#define RT_PACKING(name, Tensor, Buffer) \
  RT_TEST(name##_moves_every_element_and_no_other) { CheckAll<Tensor, Buffer>(); }
#include "device/pack.def"
#undef RT_PACKING

RT_TEST(any_number_of_tensors) {
  for (const size_t count : {1, 161, 1360, 1361, 3000}) {
    std::vector<uint64_t> sizes(count);
    for (size_t i = 0; i < count; ++i) sizes[i] = i % 5 == 0 ? 0 : i % 97;
    for (const uint32_t at_a_time : {1, 3, 5000}) {
      CheckPack<float, BFloat16Element>(sizes, 1, 64, 1, at_a_time);
      CheckUnpack<BFloat16Element, float>(sizes, 0, 64, 1, at_a_time);
    }
  }
}

RT_TEST(a_launch_is_as_full_as_it_may_be) {
  const std::vector<uint64_t> ones(2 * kSlicesInLaunch, 1);
  Scene<float, float> scene(ones, 0, 1);
  RT_CHECK_EQ(scene.Run(&PackShare<float, float>, 1), 2);
  scene.tensors.pop_back();
  RT_CHECK_EQ(scene.Run(&PackShare<float, float>, 1), 2);
  scene.tensors.assign(5, {0, 0, 0});
  RT_CHECK_EQ(scene.Run(&PackShare<float, float>, 1), 0);
}

RT_TEST(a_huge_tensor_becomes_slices) {
  const uint64_t elements = (uint64_t{5} << 30) + 3;
  PackLaunch launch{};
  std::vector<PackSlice> slices;
  RT_CHECK_OK(InLaunches({{4096, 10, elements}}, 2, &launch, [&](uint32_t chunks) {
    slices.assign(launch.slices, launch.slices + launch.slice_count);
    RT_CHECK_EQ(chunks, 5u * 65536 + 1);
    return Status();
  }));
  RT_REQUIRE_EQ(slices.size(), 6u);
  for (size_t i = 0; i < slices.size(); ++i) {
    RT_CHECK_EQ(slices[i].tensor, 4096 + i * 2 * kElementsInSlice);
    RT_CHECK_EQ(slices[i].offset, 10 + i * kElementsInSlice);
    RT_CHECK_EQ(slices[i].first_chunk, i * 65536);
  }
  RT_CHECK_EQ(slices.back().elements, 3u);
}

RT_TEST(a_failed_launch_ends_the_plan) {
  const std::vector<uint64_t> ones(3 * kSlicesInLaunch, 1);
  Scene<float, float> scene(ones, 0, 1);
  int launches = 0;
  const Status status = InLaunches(scene.tensors, sizeof(float), &scene.launch, [&](uint32_t) {
    return ++launches == 2 ? Status(StatusCode::kInternal, "out of memory") : Status();
  });
  RT_CHECK_EQ(status.message(), "out of memory");
  RT_CHECK_EQ(launches, 2);
}

RT_TEST(a_kernel_for_each_pair_that_is_fused) {
  for (const DType same : {DType::kUInt8, DType::kInt16, DType::kInt64, DType::kFloat64, DType::kBool}) {
    RT_CHECK(PackKernels::Can(same, same, false));
    RT_CHECK(!PackKernels::Can(same, same, true));
    RT_CHECK(!PackKernels::Can(same, DType::kFloat32, false));
  }
  for (const DType floating : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    RT_CHECK(PackKernels::Can(floating, floating, true));
    RT_CHECK(PackKernels::Can(DType::kFloat32, floating, true));
  }
  RT_CHECK(!PackKernels::Can(DType::kBFloat16, DType::kFloat32, true));
  RT_CHECK(!PackKernels::Can(DType::kFloat16, DType::kBFloat16, true));
}

}  // namespace
}  // namespace ringtrain
