#include "collectives/partition.h"

#include <algorithm>

#include "collectives/rows.h"

namespace ringtrain {
namespace {

constexpr int kMaxBlocks = 256;                // in a chunk; see kResultSlack in window.cc
constexpr size_t kReplicatedBytes = 16 << 10;  // contributions of all members together

// Whole blocks of the codec as far as there is room for one.
size_t InWholeBlocks(size_t elements, size_t codec_block) {
  return elements < codec_block ? elements : elements / codec_block * codec_block;
}

}  // namespace

size_t BlockElements(const Batch& batch, const WindowGeometry& geometry) {
  const size_t half = std::max<size_t>(1, geometry.chunk_bytes / Bytes(batch.dtype) / 2);
  return InWholeBlocks(half, batch.codec->form().block);
}

Partition::Partition(const Batch& batch, const Topology& topology, const WindowGeometry& geometry)
    : topology_(topology),
      geometry_(geometry),
      element_bytes_(Bytes(batch.dtype)),
      codec_block_(topology.host_count() == 1 ? 1 : batch.codec->form().block),
      rings_(topology.rings) {
  const OperationRow& operation = *Find(batch.operation);
  if (operation.reduces && operation.layout == Layout::kWhole) {
    CutBlocks(batch);
    return;
  }
  if (operation.rooted) {
    rings_ = 1;
    broadcast_host_ = topology.host_of[batch.root];
    broadcast_local_ = topology.local_of[batch.root];
  }
  MakeStreams(batch);
}

void Partition::CutBlocks(const Batch& batch) {
  const bool one_host = topology_.host_count() == 1;
  const size_t capacity = geometry_.chunk_bytes / element_bytes_;
  const size_t block = one_host ? capacity : BlockElements(batch, geometry_);
  const size_t ring_capacity = geometry_.result_bytes / element_bytes_;
  if (!one_host) codec_block_ = std::min(codec_block_, ring_capacity - block / static_cast<size_t>(rings_) - 1);
  // Where no host has several members, a large tensor's blocks lie where they travel (Pipeline::ResultOf), each by
  // itself.
  const size_t by_itself = topology_.most_locals == 1 && !one_host ? block : SIZE_MAX;
  size_t room = 0, ring_room = 0, total = 0;
  for (size_t tensor = 0; tensor < batch.tensors.size(); ++tensor) {
    size_t count = batch.tensors[tensor].bytes / element_bytes_;
    total += batch.tensors[tensor].bytes;
    for (size_t begin = 0; begin < count;) {
      size_t whole = std::min(block, count - begin);
      const size_t of_a_ring = codec_block_ == 1 ? 0 : MostOfARing(whole);
      bool full = room == 0 || whole == by_itself || (!one_host && room < whole) || ring_room < of_a_ring ||
                  static_cast<int>(blocks_.size()) - chunk_blocks_.back() == kMaxBlocks;
      if (full) {
        chunk_blocks_.push_back(static_cast<int>(blocks_.size()));
        room = capacity;
        ring_room = ring_capacity;
      }
      ring_room -= of_a_ring;
      size_t cut = std::min(whole, room);
      blocks_.push_back({static_cast<int>(tensor), begin, cut});
      begin += cut;
      room = cut == by_itself ? 0 : room - cut;
    }
  }
  chunks_ = static_cast<int>(chunk_blocks_.size());
  chunk_blocks_.push_back(static_cast<int>(blocks_.size()));
  replicated_ =
      one_host && topology_.local_count() > 1 && chunks_ == 1 && total * topology_.local_count() <= kReplicatedBytes;
}

// Elements of a block that the ring with the most of them may have: cuts move back to where a block of the codec
// begins.
size_t Partition::MostOfARing(size_t count) const {
  return std::min(count, count / static_cast<size_t>(rings_) + codec_block_ + 1);
}

void Partition::MakeStreams(const Batch& batch) {
  const int members = topology_.member_count();
  // As much of every stream as the fullest ring's result slot, and for reductions everyone's contribution slot, can
  // take.
  const OperationRow& operation = *Find(batch.operation);
  const int streams_of_a_ring =
      operation.rooted ? 1 : (topology_.most_locals + rings_ - 1) / rings_ * topology_.host_count();
  step_bytes_ = geometry_.result_bytes / streams_of_a_ring;
  step_bytes_ = std::min(step_bytes_, operation.reduces ? geometry_.chunk_bytes / members : geometry_.chunk_bytes);
  step_bytes_ = step_bytes_ / 16 * 16;  // of whole elements, whatever they are
  const size_t codec_block = std::min(codec_block_ * element_bytes_, step_bytes_);  // bytes
  step_bytes_ = step_bytes_ / codec_block * codec_block;

  streams_.resize(members);
  for (size_t index = 0; index < batch.tensors.size(); ++index) {
    const std::vector<Share> shares = SharesOf(batch, batch.tensors[index], members);
    for (int member = 0; member < members; ++member) {
      const Share& share = shares[member];
      // The next run begins where a block of the codec does.
      const size_t in_stream = (share.bytes + codec_block - 1) / codec_block * codec_block;
      if (share.bytes > 0)
        streams_[member].push_back(
            {static_cast<int>(index), share.input_offset, share.output_offset, share.bytes, in_stream});
    }
  }

  for (const Stream& stream : streams_) {
    size_t bytes = 0;
    for (const Run& run : stream) bytes += run.in_stream;
    chunks_ = std::max(chunks_, static_cast<int>((bytes + step_bytes_ - 1) / step_bytes_));
  }
}

void Partition::Fill(int chunk, Chunk* filled) const {
  filled->segments.clear();
  filled->cells.clear();
  filled->replicated = replicated_;
  if (!streams_.empty())
    FillFromStreams(chunk, filled);
  else if (topology_.host_count() == 1)
    FillInParts(chunk, filled);
  else
    FillFromBlocks(chunk, filled);

  size_t slot_offset = 0;
  for (int ring = 0; ring < rings_; ++ring) {
    size_t result_offset = 0;
    for (int host = 0; host < topology_.host_count(); ++host) {
      Cell& cell = filled->cells[ring * topology_.host_count() + host];
      for (int segment = cell.first; segment < cell.end; ++segment) cell.bytes += filled->segments[segment].bytes;
      cell.slot_offset = slot_offset;
      cell.result_offset = result_offset;
      slot_offset += cell.bytes;
      result_offset += cell.bytes;
    }
  }
}

void Partition::FillFromBlocks(int chunk, Chunk* filled) const {
  const size_t cells = static_cast<size_t>(rings_) * topology_.host_count();
  for (size_t index = 0; index < cells; ++index) {
    Cell cell;
    cell.first = static_cast<int>(filled->segments.size());
    for (int b = chunk_blocks_[chunk]; b < chunk_blocks_[chunk + 1]; ++b) {
      const Block& block = blocks_[b];
      size_t begin = (block.begin + Cut(block, index, cells)) * element_bytes_;
      size_t end = (block.begin + Cut(block, index + 1, cells)) * element_bytes_;
      if (end > begin) filled->segments.push_back({block.tensor, -1, begin, begin, end - begin});
    }
    cell.end = static_cast<int>(filled->segments.size());
    filled->cells.push_back(cell);
  }
}

// Within one host no sum depends on the cell: each is one part of the whole chunk, so that small tensors stay in one
// piece.
void Partition::FillInParts(int chunk, Chunk* filled) const {
  const int first = chunk_blocks_[chunk], end = chunk_blocks_[chunk + 1];
  size_t total = 0;
  for (int b = first; b < end; ++b) total += blocks_[b].count;
  const auto cells = static_cast<size_t>(rings_);
  size_t start = 0;  // of the block within the chunk
  for (size_t index = 0, b = static_cast<size_t>(first); index < cells; ++index) {
    const size_t from = total * index / cells, to = total * (index + 1) / cells;
    Cell cell;
    cell.first = static_cast<int>(filled->segments.size());
    while (b < static_cast<size_t>(end)) {
      const Block& block = blocks_[b];
      const size_t begin = std::max(from, start), stop = std::min(to, start + block.count);
      const size_t offset = (block.begin + begin - start) * element_bytes_;
      if (stop > begin) filled->segments.push_back({block.tensor, -1, offset, offset, (stop - begin) * element_bytes_});
      if (start + block.count > to) break;  // the rest is the next cell's
      start += block.count;
      ++b;
    }
    cell.end = static_cast<int>(filled->segments.size());
    filled->cells.push_back(cell);
  }
}

// Where cell `index` of a block begins.
size_t Partition::Cut(const Block& block, size_t index, size_t cells) const {
  const size_t at = block.count * index / cells;
  return codec_block_ == 1 || index == cells ? at : at / codec_block_ * codec_block_;
}

void Partition::FillFromStreams(int chunk, Chunk* filled) const {
  for (int ring = 0; ring < rings_; ++ring)
    for (int host = 0; host < topology_.host_count(); ++host) {
      Cell cell;
      cell.first = static_cast<int>(filled->segments.size());
      const std::vector<int>& locals = topology_.hosts[host];
      for (size_t local = ring; local < locals.size(); local += rings_) AppendStream(locals[local], chunk, filled);
      cell.end = static_cast<int>(filled->segments.size());
      filled->cells.push_back(cell);
    }
}

void Partition::AppendStream(int member, int chunk, Chunk* filled) const {
  const size_t begin = chunk * step_bytes_, end = begin + step_bytes_;
  size_t start = 0;  // of the run within the stream
  for (const Run& run : streams_[member]) {
    size_t from = std::max(begin, start), to = std::min(end, start + run.bytes);
    if (from < to)
      filled->segments.push_back(
          {run.tensor, member, run.input_offset + from - start, run.output_offset + from - start, to - from});
    start += run.in_stream;
    if (start >= end) break;
  }
}

}  // namespace ringtrain
