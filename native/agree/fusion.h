// Tensor fusion: which of the operations that are ready travel together. Pure: the same ready set gives the same
// batches.
#ifndef RINGTRAIN_AGREE_FUSION_H_
#define RINGTRAIN_AGREE_FUSION_H_

#include <cstddef>
#include <vector>

#include "agree/request.h"

namespace ringtrain {

// May these two share a batch at all?
bool CanFuse(const Response& a, const Response& b);

// Batches as indices into `ready`, each in the order given and led by the earliest that is not in one before. A batch
// holds at most `threshold_bytes`, unless one operation alone is larger. Operations that do not fit are looked past.
std::vector<std::vector<int>> Fuse(const std::vector<const Response*>& ready, size_t threshold_bytes);

}  // namespace ringtrain
#endif  // RINGTRAIN_AGREE_FUSION_H_
