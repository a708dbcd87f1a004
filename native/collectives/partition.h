// Partition: which element of a batch is reduced where, and in which chunk it travels. Pure.
//
// A chunk is cut into cells, one for each (ring, host). On every host the member that *leads* a ring reduces the ring's
// cells within the host; across hosts, host h is the last to add to the cells (·, h) and hands them out again. An
// example with two hosts of two members, and one tensor in one chunk:
//
//     cell (ring, host)    (0,0)    (0,1)    (1,0)    (1,1)
//     within each host     first member      second member      reduces
//     across hosts         host 0   host 1   host 0   host 1    finishes
//
// Order of additions: within a host always by rank; across hosts it depends on the cell's host. For allreduce the cells
// are cut from blocks, and the blocks from the start of each tensor, so an element's cell, and with it every bit of its
// sum, depends on (tensor, element, world) alone and not on what was fused. Within one host no order hangs on the cell:
// blocks may be cut to fill chunks, and cells are parts of the chunk, whatever tensors they cut.
//
// A batch that is compressed between hosts is cut where blocks of its codec begin, counted from the start of a tensor,
// or of a member's share of one.
//
// The same cells serve the other operations, cut from their shares (rows.h): what its members will receive where the
// layout scatters, what they contribute where it gathers, the root's data in a single ring led by the root on its host.
#ifndef RINGTRAIN_COLLECTIVES_PARTITION_H_
#define RINGTRAIN_COLLECTIVES_PARTITION_H_

#include <cstddef>
#include <vector>

#include "collectives/batch.h"
#include "collectives/topology.h"
#include "collectives/window.h"

namespace ringtrain {

// A run of bytes of one tensor.
struct Segment {
  int tensor;
  int member;            // whose contribution it is, or whose result of an operation that scatters; -1: everyone's
  size_t input_offset;   // in the contributor's input
  size_t output_offset;  // in the receiver's output
  size_t bytes;
};

struct Cell {
  int first = 0, end = 0;  // segments [first, end)
  size_t bytes = 0;
  size_t slot_offset = 0;    // reductions: in everyone's contribution slot
  size_t result_offset = 0;  // in the ring leader's result slot
};

struct Chunk {
  std::vector<Segment> segments;
  std::vector<Cell> cells;  // [ring * hosts + host]
  bool replicated = false;  // so small that every member reduces all of it, which saves handing results out
};

// Elements of a block that is cut into cells, where there are several hosts: a tensor that is moved in pieces must be
// cut between them.
size_t BlockElements(const Batch& batch, const WindowGeometry& geometry);

class Partition {
 public:
  Partition(const Batch& batch, const Topology& topology, const WindowGeometry& geometry);

  int chunks() const { return chunks_; }
  int rings() const { return rings_; }
  // The member's place on `host` that leads `ring`.
  int Leader(int host, int ring) const { return broadcast_host_ == host ? broadcast_local_ : ring; }
  void Fill(int chunk, Chunk* filled) const;

 private:
  struct Block {
    int tensor;
    size_t begin, count;  // elements
  };
  // Bytes of a tensor that belong to one member, and where they lie.
  struct Run {
    int tensor;
    size_t input_offset, output_offset, bytes;
    size_t in_stream;  // bytes that it takes of its stream
  };
  using Stream = std::vector<Run>;

  void CutBlocks(const Batch& batch);
  size_t MostOfARing(size_t count) const;
  size_t Cut(const Block& block, size_t index, size_t cells) const;
  void MakeStreams(const Batch& batch);
  void FillFromBlocks(int chunk, Chunk* filled) const;
  void FillInParts(int chunk, Chunk* filled) const;
  void FillFromStreams(int chunk, Chunk* filled) const;
  void AppendStream(int member, int chunk, Chunk* filled) const;

  const Topology& topology_;
  const WindowGeometry& geometry_;
  const size_t element_bytes_;
  size_t codec_block_;  // elements
  int rings_;
  int chunks_ = 0;
  int broadcast_host_ = -1;
  int broadcast_local_ = 0;
  bool replicated_ = false;
  std::vector<Block> blocks_;      // allreduce
  std::vector<int> chunk_blocks_;  // allreduce: chunk c has blocks [chunk_blocks_[c], chunk_blocks_[c + 1])
  std::vector<Stream> streams_;    // the others: by member
  size_t step_bytes_ = 0;          // the others: bytes of each stream in one chunk
};

}  // namespace ringtrain
#endif  // RINGTRAIN_COLLECTIVES_PARTITION_H_
