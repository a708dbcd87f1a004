// OutputMemory: the memory of results that the core provides, from when it is allocated until its last user ends.
//
// Fresh memory is touched for the first time while it is written, and in pages of 4 KB that takes longer than the copy
// into it. So large blocks ask for huge pages; and what is given back is kept for the next result of its size, since a
// step brings the same sizes as the one before. The kernel may take kept pages whenever memory runs short.
#ifndef RINGTRAIN_RUN_OUTPUT_MEMORY_H_
#define RINGTRAIN_RUN_OUTPUT_MEMORY_H_

#include <array>
#include <cstddef>

#include "base/mutex.h"

namespace ringtrain {

// Any thread; in the child of a fork too, where a lock that another thread held stays locked. Nothing here throws.
class OutputMemory {
 public:
  static constexpr size_t kAlignment = 64;
  static constexpr size_t kLeastKept = size_t{128} << 10;  // bytes; malloc keeps smaller blocks mapped by itself
  static constexpr size_t kMostKept = size_t{256} << 20;   // bytes together

  ~OutputMemory() { Trim(); }

  // nullptr where there is not enough. Contents are left over from anything.
  void* Allocate(size_t bytes);
  // Takes back what Allocate, or malloc, has given; or nullptr.
  void Free(void* memory);
  // Gives back to malloc what is kept.
  void Trim();
  size_t kept_bytes() const;

 private:
  struct Block {
    void* memory;
    size_t bytes;  // that may be used
  };

  void* TakeKept(size_t bytes);
  void* TakeFitting(size_t bytes) RT_REQUIRES(mutex_);
  bool Keep(const Block& block);
  void ForgetOldest() RT_REQUIRES(mutex_);

  static constexpr size_t kMostBlocks = 64;

  void Forget(size_t index) RT_REQUIRES(mutex_);

  mutable Mutex mutex_;
  std::array<Block, kMostBlocks> kept_ RT_GUARDED_BY(mutex_);  // the first `blocks_`; the oldest first
  size_t blocks_ RT_GUARDED_BY(mutex_) = 0;
  size_t kept_bytes_ RT_GUARDED_BY(mutex_) = 0;
};

// That of this process. It is never destroyed: the last results end after all else.
OutputMemory& Outputs();

}  // namespace ringtrain
#endif  // RINGTRAIN_RUN_OUTPUT_MEMORY_H_
