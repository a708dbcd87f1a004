// Memory of results: what is given back serves the next one of its size, within bounds.
#include "run/output_memory.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "check.h"

namespace ringtrain {
namespace {

constexpr size_t kMegabyte = size_t{1} << 20;

RT_TEST(what_is_given_back_serves_the_next_result_of_its_size) {
  OutputMemory outputs;
  void* const first = outputs.Allocate(8 * kMegabyte);
  std::memset(first, 1, 8 * kMegabyte);
  outputs.Free(first);
  RT_CHECK(outputs.kept_bytes() >= 8 * kMegabyte);
  void* const second = outputs.Allocate(8 * kMegabyte - 100);
  RT_CHECK(second == first);
  std::memset(second, 2, 8 * kMegabyte - 100);
  void* const third = outputs.Allocate(8 * kMegabyte);
  RT_CHECK(third != first);
  outputs.Free(second);
  outputs.Free(third);
}

RT_TEST(a_block_serves_no_much_smaller_result_and_no_larger_one) {
  OutputMemory outputs;
  void* const block = outputs.Allocate(4 * kMegabyte);
  outputs.Free(block);
  for (size_t bytes : {kMegabyte, 5 * kMegabyte}) {
    void* const other = outputs.Allocate(bytes);
    RT_CHECK(other != block);
    std::free(other);
  }
  RT_CHECK(outputs.kept_bytes() >= 4 * kMegabyte);
  outputs.Trim();
  RT_CHECK_EQ(outputs.kept_bytes(), size_t{0});
}

RT_TEST(small_blocks_are_mallocs_and_all_are_aligned) {
  OutputMemory outputs;
  for (size_t bytes : {size_t{0}, size_t{1}, size_t{4096}, OutputMemory::kLeastKept / 2, OutputMemory::kLeastKept}) {
    void* const memory = outputs.Allocate(bytes);
    RT_CHECK(memory != nullptr && reinterpret_cast<uintptr_t>(memory) % OutputMemory::kAlignment == 0);
    outputs.Free(memory);
    RT_CHECK(bytes == OutputMemory::kLeastKept || outputs.kept_bytes() == 0);
  }
  outputs.Free(nullptr);
  outputs.Free(std::malloc(10));
}

RT_TEST(what_is_kept_has_a_bound_and_the_oldest_goes_first) {
  OutputMemory outputs;
  std::vector<void*> blocks;
  const size_t bytes = OutputMemory::kMostKept / 4 + kMegabyte;  // three fit
  for (int i = 0; i < 4; ++i) blocks.push_back(outputs.Allocate(bytes));
  for (void* block : blocks) outputs.Free(block);
  RT_CHECK(outputs.kept_bytes() <= OutputMemory::kMostKept);
  RT_CHECK(outputs.kept_bytes() >= 3 * bytes);
  for (size_t index = 4; index-- > 1;) RT_CHECK(outputs.Allocate(bytes) == blocks[index]);
  RT_CHECK_EQ(outputs.kept_bytes(), size_t{0});
  for (size_t index = 1; index < 4; ++index) std::free(blocks[index]);
  void* const large = outputs.Allocate(OutputMemory::kMostKept + kMegabyte);
  outputs.Free(large);
  RT_CHECK_EQ(outputs.kept_bytes(), size_t{0});
}

}  // namespace
}  // namespace ringtrain
