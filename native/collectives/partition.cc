#include "collectives/partition.h"

#include <algorithm>

namespace ringtrain {
namespace {

constexpr int kMostBlocks = 256;                // in a chunk; see kResultSlack in window.cc
constexpr size_t kReplicatedBytes = 16 << 10;   // contributions of all members together

}  // namespace

Partition::Partition(const Batch& batch, const Topology& topology, const WindowGeometry& geometry)
    : topology_(topology), geometry_(geometry), element_bytes_(Bytes(batch.dtype)), rings_(topology.rings) {
  if (batch.operation == Operation::kAllreduce) {
    CutBlocks(batch);
    return;
  }
  if (batch.operation == Operation::kBroadcast) {
    rings_ = 1;
    broadcast_host_ = topology.host_of[batch.root];
    broadcast_local_ = topology.local_of[batch.root];
  }
  MakeStreams(batch);
}

void Partition::CutBlocks(const Batch& batch) {
  const bool one_host = topology_.host_count() == 1;
  const size_t capacity = geometry_.chunk_bytes / element_bytes_;
  const size_t block = one_host ? capacity : std::max<size_t>(1, capacity / 2);
  size_t room = 0, total = 0;
  for (size_t tensor = 0; tensor < batch.tensors.size(); ++tensor) {
    size_t count = batch.tensors[tensor].bytes / element_bytes_;
    total += batch.tensors[tensor].bytes;
    for (size_t begin = 0; begin < count;) {
      size_t whole = std::min(block, count - begin);
      bool full = room == 0 || (!one_host && room < whole) ||
                  static_cast<int>(blocks_.size()) - chunk_blocks_.back() == kMostBlocks;
      if (full) {
        chunk_blocks_.push_back(static_cast<int>(blocks_.size()));
        room = capacity;
      }
      size_t cut = std::min(whole, room);
      blocks_.push_back({static_cast<int>(tensor), begin, cut});
      begin += cut;
      room -= cut;
    }
  }
  chunks_ = static_cast<int>(chunk_blocks_.size());
  chunk_blocks_.push_back(static_cast<int>(blocks_.size()));
  replicated_ = one_host && topology_.local_count() > 1 && chunks_ == 1 && total * topology_.local_count() <= kReplicatedBytes;
}

void Partition::MakeStreams(const Batch& batch) {
  const int members = topology_.member_count();
  streams_.resize(members);
  for (size_t index = 0; index < batch.tensors.size(); ++index) {
    const BatchTensor& tensor = batch.tensors[index];
    const int which = static_cast<int>(index);
    if (batch.operation == Operation::kBroadcast) {
      if (tensor.bytes > 0) streams_[batch.root].push_back({which, 0, 0, tensor.bytes});
      continue;
    }
    const bool gathers = batch.operation == Operation::kAllgather;
    size_t offset = 0;
    for (int member = 0; member < members; ++member) {
      size_t bytes = tensor.rows[member] * tensor.row_bytes;
      if (bytes > 0) streams_[member].push_back({which, gathers ? 0 : offset, gathers ? offset : 0, bytes});
      offset += bytes;
    }
  }

  // As much of every stream as the fullest ring's result slot, and for reductions everyone's contribution slot, can take.
  const int streams_of_a_ring =
      batch.operation == Operation::kBroadcast
          ? 1
          : (topology_.most_locals + rings_ - 1) / rings_ * topology_.host_count();
  step_bytes_ = geometry_.result_bytes / streams_of_a_ring;
  step_bytes_ = std::min(step_bytes_, batch.operation == Operation::kReducescatter ? geometry_.chunk_bytes / members
                                                                                 : geometry_.chunk_bytes);
  step_bytes_ = step_bytes_ / 8 * 8;
  for (const Stream& stream : streams_) {
    size_t bytes = 0;
    for (const Run& run : stream) bytes += run.bytes;
    chunks_ = std::max(chunks_, static_cast<int>((bytes + step_bytes_ - 1) / step_bytes_));
  }
}

void Partition::Fill(int chunk, Chunk* filled) const {
  filled->segments.clear();
  filled->cells.clear();
  filled->replicated = replicated_;
  if (streams_.empty())
    FillFromBlocks(chunk, filled);
  else
    FillFromStreams(chunk, filled);

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
      size_t begin = (block.begin + block.count * index / cells) * element_bytes_;
      size_t end = (block.begin + block.count * (index + 1) / cells) * element_bytes_;
      if (end > begin) filled->segments.push_back({block.tensor, -1, begin, begin, end - begin});
    }
    cell.end = static_cast<int>(filled->segments.size());
    filled->cells.push_back(cell);
  }
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
      filled->segments.push_back({run.tensor, member, run.input_offset + from - start, run.output_offset + from - start, to - from});
    start += run.bytes;
    if (start >= end) break;
  }
}

}  // namespace ringtrain
