#include "run/output_memory.h"

#include <malloc.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace ringtrain {
namespace {

constexpr size_t kPage = 4096, kHugePage = size_t{2} << 20;

// Advises on the whole pages of this size within a block.
void Advise(void* memory, size_t bytes, size_t page, int advice) {
  const auto begin = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t first = (begin + page - 1) / page * page, end = (begin + bytes) / page * page;
  if (first < end) madvise(static_cast<char*>(memory) + (first - begin), end - first, advice);
}

void* AllocateFresh(size_t bytes) {
  void* memory = nullptr;
  return posix_memalign(&memory, OutputMemory::kAlignment, std::max(bytes, OutputMemory::kAlignment)) == 0 ? memory
                                                                                                           : nullptr;
}

}  // namespace

void OutputMemory::Trim() {
  if (!mutex_.TryLock()) return;
  while (blocks_ > 0) ForgetOldest();
  mutex_.Unlock();
}

void* OutputMemory::Allocate(size_t bytes) {
  if (bytes < kLeastKept) return AllocateFresh(bytes);
  if (void* kept = TakeKept(bytes)) return kept;
  void* memory = AllocateFresh(bytes);
  if (memory == nullptr) {
    Trim();  // what is kept counts where a process has a limit
    memory = AllocateFresh(bytes);
  }
  if (memory != nullptr) Advise(memory, bytes, kHugePage, MADV_HUGEPAGE);
  return memory;
}

void OutputMemory::Free(void* memory) {
  const size_t bytes = memory == nullptr ? 0 : malloc_usable_size(memory);
  if (bytes < kLeastKept || !Keep({memory, bytes})) std::free(memory);
}

void* OutputMemory::TakeKept(size_t bytes) {
  if (!mutex_.TryLock()) return nullptr;
  void* memory = TakeFitting(bytes);
  mutex_.Unlock();
  return memory;
}

// Of those that fit, the newest: the caches may still hold of it. A much larger one waits for a result of its own size.
void* OutputMemory::TakeFitting(size_t bytes) {
  for (size_t index = blocks_; index-- > 0;) {
    const Block block = kept_[index];
    if (block.bytes < bytes || block.bytes > bytes + bytes / 4 + kPage) continue;
    Forget(index);
    return block.memory;
  }
  return nullptr;
}

bool OutputMemory::Keep(const Block& block) {
  if (block.bytes > kMostKept || !mutex_.TryLock()) return false;
  while (blocks_ == kMostBlocks || kept_bytes_ + block.bytes > kMostKept) ForgetOldest();
  Advise(block.memory, block.bytes, kPage, MADV_FREE);
  kept_[blocks_++] = block;
  kept_bytes_ += block.bytes;
  mutex_.Unlock();
  return true;
}

void OutputMemory::ForgetOldest() {
  std::free(kept_[0].memory);
  Forget(0);
}

void OutputMemory::Forget(size_t index) {
  kept_bytes_ -= kept_[index].bytes;
  std::copy(kept_.begin() + index + 1, kept_.begin() + blocks_, kept_.begin() + index);
  --blocks_;
}

size_t OutputMemory::kept_bytes() const {
  MutexLock lock(mutex_);
  return kept_bytes_;
}

OutputMemory& Outputs() {
  alignas(OutputMemory) static char place[sizeof(OutputMemory)];
  static OutputMemory* const outputs = new (place) OutputMemory;
  return *outputs;
}

}  // namespace ringtrain
