// Which bytes of a batch go through a piece of pinned memory together. Pure, and the same on every member but for what
// only one has.
//
// Operations that keep the shape are cut into pieces, several tensors in one or one tensor in several. The others are
// one piece.
#ifndef RINGTRAIN_GPU_STAGING_PLAN_H_
#define RINGTRAIN_GPU_STAGING_PLAN_H_

#include <cstddef>
#include <vector>

#include "collectives/batch.h"
#include "collectives/topology.h"

namespace ringtrain {

// A run of bytes of one tensor: from `offset` on in its input and output, and where in the piece they lie.
struct StagedRun {
  int tensor;
  size_t offset;
  size_t input_bytes, output_bytes;
  size_t input_at, output_at;  // the same where the operation keeps the shape
};

struct StagedPiece {
  std::vector<StagedRun> runs;
  size_t bytes = 0;
};

// At least one piece. block_bytes: tensors are cut at multiples of it only, so that a piece is added up as the whole
// would be.
std::vector<StagedPiece> CutIntoPieces(const Batch& batch, const Topology& topology, size_t piece_bytes,
                                       size_t block_bytes);

}  // namespace ringtrain
#endif  // RINGTRAIN_GPU_STAGING_PLAN_H_
