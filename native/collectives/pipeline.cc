#include "collectives/pipeline.h"

#include <algorithm>
#include <cstring>

#include "collectives/rows.h"
#include "kernels/neutral.h"

namespace ringtrain {
namespace {

// Chunks that one call of Advance takes through a stage before negotiation gets its turn.
constexpr int kMaxRounds = 8;

// How far a counter must have come for the slot of `chunk` to be free of its last user.
uint64_t SlotFreedBy(uint64_t chunk, uint64_t slots) { return chunk + 1 - std::min(chunk + 1, slots); }

}  // namespace

Pipeline::Pipeline(Batch batch, Group* group, StageObserver* observer)
    : batch_(std::move(batch)),
      operation_(*Find(batch_.operation)),
      all_receive_all_(ReceivesAll(operation_.layout)),
      group_(group),
      observer_(observer),
      partition_(batch_, group->topology, group->geometry),
      hosts_(group->topology.host_count()),
      me_(group->topology.me),
      local_(group->topology.my_local()),
      locals_(group->topology.local_count()),
      straight_(reduces() && hosts_ == 1),
      begin_(group->next_chunk),
      end_(begin_ + partition_.chunks()),
      packed_(begin_),
      reduced_(begin_),
      published_(begin_),
      consumed_(begin_),
      in_flight_(static_cast<size_t>(
          std::min(group->geometry.chunk_slots + group->geometry.result_slots + 1, partition_.chunks()))) {
  group->next_chunk = end_;
  for (int ring = 0; ring < partition_.rings(); ++ring)
    if (partition_.Leader(group->topology.my_host(), ring) == local_) ring_ = ring;
  for (int member : group->topology.locals()) {
    const bool weighted = !batch_.weights.empty();
    contributes_.push_back(!batch_.joined[member] && (!weighted || batch_.weights[member] > 0));
    if (weighted && contributes_.back()) weights_.push_back(batch_.weights[member]);
  }
  local_scaling_ = several_hosts() ? batch_.scaling.of_sources() : batch_.scaling;
  if (!weights_.empty()) local_scaling_.weights = weights_.data();
  if (!several_hosts()) return;

  if (ring_ < 0) return;
  std::vector<int> leaders;
  for (int host = 0; host < hosts_; ++host)
    leaders.push_back(group->topology.hosts[host][partition_.Leader(host, ring_)]);
  for (int slot = 0; slot < std::min(group->geometry.result_slots, partition_.chunks()); ++slot)
    passes_.push_back(std::make_unique<RingPass>(group, leaders, batch_, partition_.chunks()));
}

Status Pipeline::Advance(bool* moved) {
  for (int round = 0; round < kMaxRounds && !done(); ++round) {
    bool any = TryReduce();
    if (several_hosts()) RT_TRY(TryRing(&any));
    any |= TryPublish();
    any |= TryUnpack();
    any |= TryPack();
    if (!any) return {};
    *moved = true;
  }
  return {};
}

// ---- stages ----

bool Pipeline::TryPack() {
  if (packed_ == end_ || Mine(&StageCounters::packed) != packed_) return false;
  const uint64_t slots = group_->geometry.chunk_slots;
  if (packed_ >= reduced_ + slots ||
      !PeersReached(&StageCounters::reduced, SlotFreedBy(packed_, slots), &peers_reduced_))
    return false;
  Chunk& chunk = InFlight(packed_);
  partition_.Fill(static_cast<int>(packed_ - begin_), &chunk);
  int64_t begin = Clock();
  if (locals_ > 1) Pack(chunk, group_->window.contribution(local_, packed_));
  Observe(Stage::kPack, chunk, begin);
  Post(&StageCounters::packed, ++packed_);
  return true;
}

bool Pipeline::TryReduce() {
  if (reduced_ == packed_ || Mine(&StageCounters::reduced) != reduced_) return false;
  Chunk& chunk = InFlight(reduced_);
  if (ring_ >= 0 || chunk.replicated) {
    const uint64_t slots = group_->geometry.result_slots;
    const uint64_t consumed = SlotFreedBy(reduced_, slots);
    if (Mine(&StageCounters::consumed) < consumed ||
        !PeersReached(&StageCounters::consumed, consumed, &peers_consumed_) ||
        !PeersReached(&StageCounters::packed, reduced_ + 1, &peers_packed_))
      return false;
    char* result = ResultOf(chunk, local_, reduced_);
    int64_t begin = Clock();
    if (chunk.replicated)
      ReduceReplicated(chunk);
    else if (reduces())
      ReduceCells(chunk, result);
    else
      FetchCells(chunk, result);
    Observe(Stage::kReduce, chunk, begin);
    if (several_hosts()) StartRing(chunk, result);
  }
  Post(&StageCounters::reduced, ++reduced_);
  return true;
}

void Pipeline::StartRing(const Chunk& chunk, char* result) {
  RingPass& pass = *passes_[reduced_ % passes_.size()];
  const char* ahead = batch_.ahead.came ? batch_.ahead.contribution.data() + ahead_taken_ : nullptr;
  pass.Start(result, chunk, ring_, reduced_, ahead);
  ahead_taken_ += pass.bytes();
}

Status Pipeline::TryRing(bool* moved) {
  if (ring_ < 0) return {};
  for (uint64_t chunk = published_; chunk < reduced_; ++chunk) {
    RingPass& pass = *passes_[chunk % passes_.size()];
    if (pass.done()) continue;
    RT_TRY(pass.Advance(moved));
    if (!pass.done()) continue;
    group_->counters->Add(Counter::kWireNanoseconds, Now() - pass.started());
    Observe(Stage::kWire, InFlight(chunk), pass.started());
  }
  return {};
}

bool Pipeline::TryPublish() {
  if (published_ == reduced_ || Mine(&StageCounters::published) != published_) return false;
  if (!passes_.empty() && !passes_[published_ % passes_.size()]->done()) return false;
  Post(&StageCounters::published, ++published_);
  return true;
}

bool Pipeline::TryUnpack() {
  if (consumed_ == published_ || Mine(&StageCounters::consumed) != consumed_) return false;
  Chunk& chunk = InFlight(consumed_);
  if (!chunk.replicated) {
    if (!PeersReached(&StageCounters::published, consumed_ + 1, &peers_published_)) return false;
    int64_t begin = Clock();
    Unpack(chunk);
    Observe(Stage::kUnpack, chunk, begin);
  }
  Post(&StageCounters::consumed, ++consumed_);
  return true;
}

// ---- what the stages do ----

void Pipeline::Pack(const Chunk& chunk, char* slot) {
  size_t written = 0;
  if (!contributes_[local_]) return;
  for (int ring = 0; ring < partition_.rings(); ++ring) {
    if (ring == ring_ && !chunk.replicated) continue;
    for (int host = 0; host < hosts_; ++host) {
      const Cell& cell = CellOf(chunk, ring, host);
      if (!reduces() && host != group_->topology.my_host()) continue;
      char* to = slot + (reduces() ? cell.slot_offset : 0);
      for (int s = cell.first; s < cell.end; ++s) {
        const Segment& segment = chunk.segments[s];
        if (!reduces() && segment.member != me_) continue;
        group_->handover.Copy(to, batch_.tensors[segment.tensor].input + segment.input_offset, segment.bytes);
        to += segment.bytes;
        written += segment.bytes;
      }
    }
  }
  if (written > 0) group_->counters->Add(Counter::kSharedBytes, static_cast<int64_t>(written));
}

// Where the leader puts a chunk's result. A member that is alone on its host needs no slot for what it receives if its
// cells lie one behind the other in its output, as those of one tensor do: they travel from there and arrive there.
char* Pipeline::ResultOf(const Chunk& chunk, int leader, uint64_t number) const {
  char* const slot = group_->window.result(leader, number);
  if (locals_ > 1 || !reduces() || !all_receive_all_ || chunk.segments.empty()) return slot;
  const Segment* last = nullptr;
  for (const Segment& segment : chunk.segments) {
    if (last != nullptr &&
        (segment.tensor != last->tensor || segment.output_offset != last->output_offset + last->bytes))
      return slot;
    last = &segment;
  }
  char* const output = batch_.tensors[last->tensor].output;
  return output == nullptr ? slot : output + chunk.segments.front().output_offset;
}

void Pipeline::ReduceCells(const Chunk& chunk, char* result) {
  for (int host = 0; host < hosts_; ++host) {
    const Cell& cell = CellOf(chunk, ring_, host);
    size_t offset = 0;
    for (int s = cell.first; s < cell.end; ++s) {
      ReduceSegment(chunk.segments[s], cell.slot_offset + offset, result + cell.result_offset + offset);
      offset += chunk.segments[s].bytes;
    }
  }
}

// Adds the contributions of this host's members in their order, whoever leads: the bits do not depend on the leader.
void Pipeline::ReduceSegment(const Segment& segment, size_t slot_offset, char* result) {
  const BatchTensor& tensor = batch_.tensors[segment.tensor];
  const bool own = straight_ && tensor.output != nullptr;
  char* to = own ? tensor.output + segment.output_offset : result;
  const size_t count = segment.bytes / Bytes(batch_.dtype);
  GatherSources(segment, slot_offset);
  if (sources_.empty())
    FillNeutral(batch_.dtype, batch_.reduction, to, count);
  else
    Reduce(batch_.dtype, batch_.reduction, to, sources_.data(), static_cast<int>(sources_.size()), count,
           local_scaling_);
  if (own && locals_ > 1 && all_receive_all_) group_->handover.Copy(result, to, segment.bytes);
}

void Pipeline::GatherSources(const Segment& segment, size_t slot_offset) {
  sources_.clear();
  for (int local = 0; local < locals_; ++local)
    if (contributes_[local])
      sources_.push_back(local == local_ ? batch_.tensors[segment.tensor].input + segment.input_offset
                                         : group_->window.contribution(local, reduced_) + slot_offset);
}

void Pipeline::ReduceReplicated(const Chunk& chunk) {
  for (const Cell& cell : chunk.cells) {
    size_t offset = cell.slot_offset;
    for (int s = cell.first; s < cell.end; offset += chunk.segments[s++].bytes) {
      const Segment& segment = chunk.segments[s];
      char* output = batch_.tensors[segment.tensor].output;
      if (output == nullptr) continue;
      GatherSources(segment, offset);
      Reduce(batch_.dtype, batch_.reduction, output + segment.output_offset, sources_.data(),
             static_cast<int>(sources_.size()), segment.bytes / Bytes(batch_.dtype), local_scaling_);
    }
  }
}

// Of an operation that moves: what this host's members of my ring contribute, my own straight from my input.
void Pipeline::FetchCells(const Chunk& chunk, char* result) {
  const Cell& cell = CellOf(chunk, ring_, group_->topology.my_host());
  char* to = result + cell.result_offset;
  int member = -1;
  size_t offset = 0;  // in the member's contribution slot
  for (int s = cell.first; s < cell.end; ++s) {
    const Segment& segment = chunk.segments[s];
    if (segment.member != member) offset = 0;
    member = segment.member;
    const char* from = member == me_
                           ? batch_.tensors[segment.tensor].input + segment.input_offset
                           : group_->window.contribution(group_->topology.local_of[member], reduced_) + offset;
    group_->handover.Copy(to, from, segment.bytes);
    to += segment.bytes;
    offset += segment.bytes;
  }
}

void Pipeline::Unpack(const Chunk& chunk) {
  for (int ring = 0; ring < partition_.rings(); ++ring) {
    const int leader = partition_.Leader(group_->topology.my_host(), ring);
    if (straight_ && leader == local_) continue;
    const char* result = ResultOf(chunk, leader, consumed_);
    for (int host = 0; host < hosts_; ++host) UnpackCell(chunk, CellOf(chunk, ring, host), result);
  }
}

void Pipeline::UnpackCell(const Chunk& chunk, const Cell& cell, const char* result) {
  const char* from = result + cell.result_offset;
  for (int s = cell.first; s < cell.end; from += chunk.segments[s++].bytes) {
    const Segment& segment = chunk.segments[s];
    const BatchTensor& tensor = batch_.tensors[segment.tensor];
    if (tensor.output == nullptr || !Wants(segment)) continue;
    char* to = tensor.output + segment.output_offset;
    const bool mine = !reduces() && segment.member == me_;
    const char* source = mine ? tensor.input + segment.input_offset : from;
    if (source != to) std::memcpy(to, source, segment.bytes);
  }
}

bool Pipeline::Wants(const Segment& segment) const { return all_receive_all_ || segment.member == me_; }

// ---- counters ----

bool Pipeline::PeersReached(std::atomic<uint64_t> StageCounters::* counter, uint64_t needed, uint64_t* known) const {
  if (*known >= needed) return true;
  uint64_t least = UINT64_MAX;
  for (int local = 0; local < locals_; ++local)
    if (local != local_)
      least = std::min(least, (group_->window.counters(local).*counter).load(std::memory_order_acquire));
  *known = least;
  return least >= needed;
}

uint64_t Pipeline::Mine(std::atomic<uint64_t> StageCounters::* counter) const {
  return (group_->window.counters(local_).*counter).load(std::memory_order_relaxed);
}

void Pipeline::Post(std::atomic<uint64_t> StageCounters::* counter, uint64_t value) {
  (group_->window.counters(local_).*counter).store(value, std::memory_order_release);
  group_->RingPeers();
}

void Pipeline::Observe(Stage stage, const Chunk& chunk, int64_t begin) {
  if (observer_ == nullptr) return;
  int64_t end = Now();
  int tensor = -1;
  for (const Segment& segment : chunk.segments)
    if (segment.tensor != tensor) {
      tensor = segment.tensor;
      observer_->OnStage(stage, batch_.tensors[tensor].operation, begin, end, segment.bytes);
    }
}

}  // namespace ringtrain
