#include "gpu/staging_plan.h"

#include <algorithm>

#include "collectives/rows.h"

namespace ringtrain {
namespace {

constexpr size_t kAlignment = 64;

size_t Align(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

StagedPiece WholeBatch(const Batch& batch, const Topology& topology) {
  StagedPiece piece;
  for (size_t index = 0; index < batch.tensors.size(); ++index) {
    const size_t input = InputBytes(batch, batch.tensors[index], topology);
    const size_t output = OutputBytes(batch, batch.tensors[index], topology);
    piece.runs.push_back({static_cast<int>(index), 0, input, output, piece.bytes, piece.bytes + Align(input)});
    piece.bytes += Align(input) + Align(output);
  }
  return piece;
}

}  // namespace

std::vector<StagedPiece> CutIntoPieces(const Batch& batch, const Topology& topology, size_t piece_bytes,
                                       size_t block_bytes) {
  if (Find(batch.operation)->output != Output::kSame) return {WholeBatch(batch, topology)};
  const size_t room = std::max(piece_bytes, block_bytes);
  std::vector<StagedPiece> pieces(1);
  for (size_t index = 0; index < batch.tensors.size(); ++index) {
    const size_t bytes = batch.tensors[index].bytes;
    for (size_t offset = 0; offset < bytes;) {
      const size_t left = bytes - offset, free = room - std::min(room, pieces.back().bytes);
      const size_t cut = left <= free ? left : free / block_bytes * block_bytes;
      if (cut == 0) {
        pieces.emplace_back();
        continue;
      }
      StagedPiece& piece = pieces.back();
      piece.runs.push_back({static_cast<int>(index), offset, cut, cut, piece.bytes, piece.bytes});
      piece.bytes += Align(cut);
      offset += cut;
    }
  }
  return pieces;
}

}  // namespace ringtrain
