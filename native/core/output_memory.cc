#include "core/output_memory.h"

#include <malloc.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>

namespace ringtrain {
namespace {

constexpr size_t kPage = 4096, kHugePage = size_t{2} << 20;
constexpr size_t kMostBlocks = 64;

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
  while (!kept_.empty()) ForgetOldest();
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
  for (size_t index = kept_.size(); index-- > 0;) {
    const Block block = kept_[index];
    if (block.bytes < bytes || block.bytes > bytes + bytes / 4 + kPage) continue;
    kept_.erase(kept_.begin() + static_cast<std::ptrdiff_t>(index));
    kept_bytes_ -= block.bytes;
    return block.memory;
  }
  return nullptr;
}

bool OutputMemory::Keep(const Block& block) {
  if (block.bytes > kMostKept || !mutex_.TryLock()) return false;
  while (kept_.size() == kMostBlocks || kept_bytes_ + block.bytes > kMostKept) ForgetOldest();
  Advise(block.memory, block.bytes, kPage, MADV_FREE);
  kept_.push_back(block);
  kept_bytes_ += block.bytes;
  mutex_.Unlock();
  return true;
}

void OutputMemory::ForgetOldest() {
  kept_bytes_ -= kept_.front().bytes;
  std::free(kept_.front().memory);
  kept_.erase(kept_.begin());
}

size_t OutputMemory::kept_bytes() const {
  MutexLock lock(mutex_);
  return kept_bytes_;
}

OutputMemory& Outputs() {
  static OutputMemory* const outputs = new OutputMemory;
  return *outputs;
}

}  // namespace ringtrain
