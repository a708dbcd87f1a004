#include "collectives/contribution.h"

#include <algorithm>
#include <vector>

#include "collectives/image.h"
#include "collectives/partition.h"

namespace ringtrain {

// As Pipeline::ReduceCells does it, with one contribution.
std::string ContributionOf(const Batch& batch, const Group& group) {
  const Partition partition(batch, group.topology, group.geometry);
  const Scaling scaling = batch.scaling.of_sources();
  Image image(batch, group.counters);
  std::vector<char> slot;
  std::string bytes;
  for (int number = 0; number < partition.chunks(); ++number) {
    Chunk chunk;
    partition.Fill(number, &chunk);
    for (const Cell& cell : chunk.cells) slot.resize(std::max(slot.size(), cell.result_offset + cell.bytes));
    for (const Cell& cell : chunk.cells) {
      char* to = slot.data() + cell.result_offset;
      for (int s = cell.first; s < cell.end; to += chunk.segments[s++].bytes) {
        const Segment& segment = chunk.segments[s];
        const void* source = batch.tensors[segment.tensor].input + segment.input_offset;
        Reduce(batch.dtype, batch.reduction, to, &source, 1, segment.bytes / Bytes(batch.dtype), scaling);
      }
    }
    image.Take(slot.data(), chunk, 0, group.topology.host_count());
    bytes.append(image.at(0), image.total());
  }
  return bytes;
}

}  // namespace ringtrain
