#include "collectives/contribution.h"

#include "collectives/partition.h"

namespace ringtrain {

// As Pipeline::ReduceCells does it, with one contribution.
std::string ContributionOf(const Batch& batch, const Group& group) {
  const Partition partition(batch, group.topology, group.geometry);
  const Scaling scaling = batch.scaling.of_sources();
  std::string bytes;
  for (int number = 0; number < partition.chunks(); ++number) {
    Chunk chunk;
    partition.Fill(number, &chunk);
    for (const Cell& cell : chunk.cells) {
      for (int s = cell.first; s < cell.end; ++s) {
        const Segment& segment = chunk.segments[s];
        const void* source = batch.tensors[segment.tensor].input + segment.input_offset;
        const size_t begin = bytes.size();
        bytes.resize(begin + segment.bytes);
        Reduce(batch.dtype, batch.reduction, &bytes[begin], &source, 1, segment.bytes / Bytes(batch.dtype), scaling);
      }
    }
  }
  return bytes;
}

}  // namespace ringtrain
