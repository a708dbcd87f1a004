#include "gpu/staged.h"

#include <algorithm>

#include "collectives/partition.h"

namespace ringtrain {
namespace {

constexpr size_t kSlots = 4;    // pieces in pinned memory at a time
constexpr size_t kOverlap = 2;  // pieces that are exchanged at a time, as batches of host memory are

}  // namespace

Status Staged::Make(DeviceBatch batch, Group* group, const CopyStreams& streams, size_t chunk_bytes,
                    std::unique_ptr<DeviceTask>* task) {
  std::unique_ptr<Staged> staged(new Staged(std::move(batch), group, streams));
  const Batch& whole = staged->work_.batch;
  const size_t element = Bytes(whole.dtype);
  size_t block = group->topology.host_count() == 1 ? element : BlockElements(whole, group->geometry) * element;
  if (whole.reduction == Reduction::kAdasum)  // its coefficients are those of whole tensors
    for (const BatchTensor& tensor : whole.tensors) block = std::max(block, tensor.bytes);
  staged->pieces_ = CutIntoPieces(whole, group->topology, chunk_bytes, block);
  staged->here_.resize(staged->pieces_.size());
  staged->back_.resize(staged->pieces_.size());
  if (staged->on_device()) RT_TRY(staged->TakeMemory());
  // All of them now: every member takes its shares of the sequence in the same order, whatever copy ends first.
  for (size_t piece = 0; piece < staged->pieces_.size(); ++piece)
    staged->tasks_.push_back(
        MakeTask(staged->HostBatch(staged->pieces_[piece], staged->SlotOf(piece)), group, nullptr));
  *task = std::move(staged);
  return {};
}

Status Staged::TakeMemory() {
  size_t most = 0;
  for (const StagedPiece& piece : pieces_) most = std::max(most, piece.bytes);
  for (size_t slot = 0; slot < std::min(kSlots, pieces_.size()); ++slot) {
    std::unique_ptr<Pinned> pinned;
    RT_TRY(Pinned::Take(work_.device, most, &pinned));
    slots_.push_back(std::move(pinned));
  }
  for (const auto& event : work_.ready) {
    RT_TRY(event->HoldBack(streams_.to_host->get()));
    RT_TRY(event->HoldBack(streams_.to_device->get()));
  }
  return {};
}

// What the host's task shall do with a piece; a rank that has joined needs no detour, since it has no device.
Batch Staged::HostBatch(const StagedPiece& piece, char* slot) const {
  Batch batch = work_.batch;
  batch.tensors.clear();
  for (const StagedRun& run : piece.runs) {
    BatchTensor tensor = work_.batch.tensors[run.tensor];
    if (Find(batch.operation)->output == Output::kSame) tensor.bytes = run.input_bytes;
    tensor.residual_offset = run.offset / Bytes(batch.dtype);
    if (on_device()) {
      tensor.input = slot + run.input_at;
      tensor.output = slot + run.output_at;
    }
    batch.tensors.push_back(std::move(tensor));
  }
  return batch;
}

// Whether anybody reads this member's input.
bool Staged::sends() const { return !Find(work_.batch.operation)->rooted || work_.batch.root == group_->topology.me; }

Status Staged::Advance(bool* moved) {
  RT_TRY(FetchNext(moved));
  RT_TRY(Exchange(moved));
  return Release(moved);
}

Status Staged::FetchNext(bool* moved) {
  for (; fetched_ < pieces_.size() && fetched_ < returned_ + kSlots; ++fetched_) {
    *moved = true;
    if (!on_device() || !sends()) continue;
    char* slot = SlotOf(fetched_);
    const CUstream stream = streams_.to_host->get();
    for (const StagedRun& run : pieces_[fetched_].runs) {
      if (run.input_bytes == 0) continue;
      const CUdeviceptr from = AddressOf(work_.batch.tensors[run.tensor].input) + run.offset;
      RT_TRY(work_.device->CopyToHost(slot + run.input_at, from, run.input_bytes, stream));
    }
    RT_TRY(DeviceEvent::Record(work_.device, stream, &here_[fetched_]));
  }
  return {};
}

Status Staged::Exchange(bool* moved) {
  const size_t end = std::min(fetched_, exchanged_ + kOverlap);
  for (size_t piece = exchanged_; piece < end; ++piece) {
    if (here_[piece] != nullptr) {
      bool passed;
      RT_TRY(here_[piece]->Passed(&passed));
      if (!passed) break;
      here_[piece] = nullptr;
    }
    RT_TRY(tasks_[piece]->Advance(moved));
  }
  while (exchanged_ < end && here_[exchanged_] == nullptr && tasks_[exchanged_]->done()) {
    RT_TRY(SendBack(exchanged_));
    tasks_[exchanged_++] = nullptr;
    *moved = true;
  }
  return {};
}

Status Staged::SendBack(size_t piece) {
  if (!on_device()) return {};
  const char* slot = SlotOf(piece);
  const CUstream stream = streams_.to_device->get();
  for (const StagedRun& run : pieces_[piece].runs) {
    if (run.output_bytes == 0) continue;
    const CUdeviceptr to = AddressOf(work_.batch.tensors[run.tensor].output) + run.offset;
    RT_TRY(work_.device->CopyFromHost(to, slot + run.output_at, run.output_bytes, stream));
  }
  return DeviceEvent::Record(work_.device, stream, &back_[piece]);
}

Status Staged::Release(bool* moved) {
  for (; returned_ < exchanged_; ++returned_) {
    if (back_[returned_] != nullptr) {
      bool passed;
      RT_TRY(back_[returned_]->Passed(&passed));
      if (!passed) return {};
      back_[returned_] = nullptr;
    }
    *moved = true;
  }
  return {};
}

}  // namespace ringtrain
