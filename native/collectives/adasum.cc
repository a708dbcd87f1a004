#include "collectives/adasum.h"

#include <algorithm>
#include <limits>

#include "collectives/move.h"
#include "kernels/convert.h"

namespace ringtrain {
namespace {

constexpr int kMaxTurns = 8;      // of one call of Advance, before negotiation gets its turn
constexpr int kMaxBlocks = 4;     // of one turn
constexpr size_t kBlock = 16384;  // elements: of both vectors they stay in a core's own cache
constexpr size_t kAlignment = 64;

// Vectors so short that their square is no normal number count as zeros: they are added.
double Coefficient(double share, double product, double square) {
  return square < std::numeric_limits<double>::min() ? 1.0 : 1.0 - share * (product / square);
}

}  // namespace

Adasum::Adasum(Batch batch, Group* group, StageObserver* observer)
    : batch_(std::move(batch)),
      group_(group),
      observer_(observer),
      plan_(group->topology.member_count()),
      me_(group->topology.me),
      local_(group->topology.my_local()),
      locals_(group->topology.local_count()),
      work_(batch_.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32),
      begin_(group->next_chunk),
      end_([&] {
        uint64_t chunks = 1;  // the last one carries nothing: what comes behind begins when this is done
        for (const AdasumRound& each : plan_.rounds()) chunks += LocalChunks(each);
        return begin_ + chunks;
      }()),
      messages_(group),
      packed_(begin_),
      consumed_(begin_),
      round_end_(begin_),
      dots_(batch_.tensors.size()),
      incoming_(batch_.tensors.size()) {
  group->next_chunk = end_;
}

// ---- what lies where ----

// Cut by the tensor's own length, so that nothing depends on what is fused.
size_t Adasum::Cut(size_t tensor, int slice) const {
  const size_t count = batch_.tensors[tensor].bytes / Bytes(batch_.dtype);
  return count * static_cast<size_t>(slice) / static_cast<size_t>(plan_.places());
}

// Of that many slices side by side, of all tensors.
size_t Adasum::MostElements(int width) const {
  size_t elements = 0;
  const auto places = static_cast<size_t>(plan_.places());
  for (const BatchTensor& tensor : batch_.tensors)
    elements += (tensor.bytes / Bytes(batch_.dtype) * static_cast<size_t>(width) + places - 1) / places;
  return elements;
}

DType Adasum::Travels(const AdasumRound& round, bool between_hosts) const {
  using Kind = AdasumRound::Kind;
  if (round.kind == Kind::kDots || round.kind == Kind::kFoldDots) return DType::kFloat64;
  if (between_hosts && narrows()) return batch_.wire();
  const bool first = round.kind == Kind::kHalves && round.level == (plan_.folds() ? -1 : 0);
  return first || round.kind == Kind::kGather || round.kind == Kind::kUnfold ? batch_.dtype : work_;
}

// Enough for any two members that share a host, this one or another: every member counts the same chunks.
uint64_t Adasum::LocalChunks(const AdasumRound& round) const {
  const Topology& topology = group_->topology;
  bool within_host = false;
  for (int member = 0; member < topology.member_count() && !within_host; ++member) {
    const int peer = plan_.PartOf(round, member).peer;
    within_host = peer >= 0 && topology.host_of[peer] == topology.host_of[member];
  }
  if (!within_host) return 0;
  const int width = plan_.Width(round);
  const size_t elements = width > 0 ? MostElements(width) : 3 * batch_.tensors.size();
  const size_t bytes = elements * Bytes(Travels(round, false));
  return (bytes + group_->geometry.chunk_bytes - 1) / group_->geometry.chunk_bytes;
}

// The group keeps the room from one Adasum to the next, since touching fresh memory takes longer than the arithmetic.
void Adasum::TakeRoom() {
  size_t bytes = 0;
  const auto take = [&](int width) {
    const size_t at = bytes;
    bytes += (MostElements(width) * Bytes(work_) + kAlignment - 1) / kAlignment * kAlignment;
    return at;
  };
  even_at_ = take(plan_.places() / 2);
  if (plan_.levels() > 1) odd_at_ = take(plan_.places() / 4);
  if (work_ != batch_.dtype) widened_at_ = take(plan_.places() / 2);
  if (!plan_.Holds(-1, me_).empty()) whole_at_ = take(plan_.places());
  if (group_->room.size() < bytes) group_->room = std::vector<char>(bytes);

  size_t elements = 0;
  for (const BatchTensor& tensor : batch_.tensors) elements += tensor.bytes;
  if (batch_.joined[me_]) of_joined_.resize(2 * elements);
  mine_ = result_ = {batch_.dtype, {0, plan_.places()}, {}};
  size_t offset = 0;
  for (const BatchTensor& tensor : batch_.tensors) {
    const bool joined = batch_.joined[me_];
    mine_.starts.push_back(joined ? of_joined_.data() + offset : const_cast<char*>(tensor.input));
    result_.starts.push_back(joined ? of_joined_.data() + elements + offset : tensor.output);
    offset += tensor.bytes;
  }
}

Adasum::View Adasum::InRoom(size_t offset, Slices slices) const {
  View view{work_, slices, {}};
  for (size_t tensor = 0; tensor < batch_.tensors.size(); ++tensor) {
    view.starts.push_back(group_->room.data() + offset);
    offset += (Cut(tensor, slices.end) - Cut(tensor, slices.first)) * Bytes(work_);
  }
  return view;
}

char* Adasum::At(const View& view, size_t tensor, int slice) const {
  return view.starts[tensor] + (Cut(tensor, slice) - Cut(tensor, view.slices.first)) * Bytes(view.dtype);
}

Runs Adasum::RunsOf(const View& view, Slices slices) const {
  std::vector<Run> runs;
  if (!slices.empty())
    for (size_t tensor = 0; tensor < batch_.tensors.size(); ++tensor)
      runs.push_back({At(view, tensor, slices.first), Cut(tensor, slices.end) - Cut(tensor, slices.first)});
  return {view.dtype, std::move(runs)};
}

// ---- rounds ----

// All that came before in the window's sequence is done: messages of a host's tasks never overtake each other.
bool Adasum::MyTurn() const {
  return group_->window.counters(local_).consumed.load(std::memory_order_relaxed) == begin_;
}

Status Adasum::Advance(bool* moved) {
  if (!started_) {
    if (!MyTurn()) return {};
    TakeRoom();
    BeginRound();
    started_ = *moved = true;
  }
  for (int turn = 0; turn < kMaxTurns && !done_; ++turn) {
    bool any = false;
    RT_TRY(Turn(&any));
    if (!any) return {};
    *moved = true;
  }
  return {};
}

Status Adasum::Turn(bool* moved) {
  if (combining_) {
    *moved = true;
    if (!TryCombine()) EndRound();
    return {};
  }
  *moved |= TryFetch();
  *moved |= TryPack();
  if (between_hosts()) {
    RT_TRY(messages_.Start(part_.peer, travels_, &sends_, &receives_, moved));
    RT_TRY(messages_.End(travels_, receives_.dtype(), &arrived_, moved));
  }
  *moved |= TryMultiply();
  const bool exchanged = consumed_ == round_end_ && sends_.left() == 0 && receives_.left() == 0 && messages_.empty();
  const bool multiplied = part_.peer < 0 || round().kind != AdasumRound::Kind::kHalves || blocked_ == arrived_;
  if (!exchanged || !multiplied) return {};
  *moved = true;
  EndExchange();
  return {};
}

void Adasum::BeginRound() {
  using Kind = AdasumRound::Kind;
  part_ = plan_.PartOf(round(), me_);
  travels_ = Travels(round(), between_hosts());
  round_end_ += LocalChunks(round());
  arrived_ = 0;
  round_began_ = Now();
  sends_ = receives_ = Runs();
  if (part_.peer < 0) return;
  switch (round().kind) {
    case Kind::kHalves:
      BeginHalves();
      return;
    case Kind::kDots:
    case Kind::kFoldDots:
      sends_ = Runs(DType::kFloat64, {{reinterpret_cast<char*>(dots_.data()), 3 * dots_.size()}});
      receives_ = Runs(DType::kFloat64, {{reinterpret_cast<char*>(incoming_.data()), 3 * incoming_.size()}});
      return;
    case Kind::kFold:
      sends_ = RunsOf(mine_, part_.sends);
      receives_ = RunsOf(mine_, part_.receives);
      return;
    case Kind::kGather:
    case Kind::kUnfold:
      sends_ = RunsOf(result_, part_.sends);
      receives_ = RunsOf(result_, part_.receives);
      return;
  }
}

void Adasum::BeginHalves() {
  const int level = round().level;
  keeps_ = part_.receives;
  theirs_ = level < 0 ? InRoom(whole_at_, {0, plan_.places()}) : InRoom(level % 2 == 0 ? even_at_ : odd_at_, keeps_);
  widened_ = mine_.dtype == work_ ? mine_ : InRoom(widened_at_, keeps_);
  sends_ = RunsOf(mine_, part_.sends);
  receives_ = RunsOf(theirs_, keeps_);
  std::fill(dots_.begin(), dots_.end(), Dots());
  block_tensor_ = block_offset_ = blocked_ = 0;
}

void Adasum::EndExchange() {
  using Kind = AdasumRound::Kind;
  if (between_hosts()) Observe(Stage::kWire, round_began_);
  const bool sums = part_.peer >= 0 && (round().kind == Kind::kDots || round().kind == Kind::kFoldDots);
  if (!sums) return EndRound();
  for (size_t tensor = 0; tensor < dots_.size(); ++tensor) {
    dots_[tensor].aa += incoming_[tensor].aa;
    dots_[tensor].ab += incoming_[tensor].ab;
    dots_[tensor].bb += incoming_[tensor].bb;
  }
  if (round().kind == Kind::kDots && round().step < round().level) return EndRound();
  combining_ = true;
  block_tensor_ = block_offset_ = blocked_ = 0;
}

void Adasum::EndRound() {
  if (combining_) mine_ = theirs_;
  combining_ = false;
  if (++round_ < plan_.rounds().size()) return BeginRound();
  Finish();
}

void Adasum::Finish() {
  StageCounters& mine = group_->window.counters(local_);
  for (auto counter : {&mine.packed, &mine.reduced, &mine.published, &mine.consumed})
    counter->store(end_, std::memory_order_release);
  group_->RingPeers();
  done_ = true;
}

// ---- within the host ----

bool Adasum::TryPack() {
  if (packed_ == round_end_) return false;
  const uint64_t slots = static_cast<uint64_t>(group_->geometry.chunk_slots);
  for (int local = 0; local < locals_; ++local)
    if (group_->window.counters(local).reduced.load(std::memory_order_acquire) + slots <= packed_) return false;
  if (part_.peer >= 0 && !between_hosts() && sends_.left() > 0) {
    const int64_t begin = observer_ == nullptr ? 0 : Now();
    char* to = group_->window.contribution(local_, packed_);
    size_t room = group_->geometry.chunk_bytes / Bytes(travels_);
    while (room > 0 && sends_.left() > 0) {
      const Run run = sends_.Take(room);
      Move(to, travels_, run.at, sends_.dtype(), run.count);
      to += run.count * Bytes(travels_);
      room -= run.count;
    }
    group_->counters->Add(Counter::kSharedBytes, to - group_->window.contribution(local_, packed_));
    Observe(Stage::kPack, begin);
  }
  group_->window.counters(local_).packed.store(++packed_, std::memory_order_release);
  group_->RingPeers();
  return true;
}

// Takes a chunk straight from the peer's contribution; the later stages have nothing left to do.
bool Adasum::TryFetch() {
  if (consumed_ == packed_) return false;
  if (part_.peer >= 0 && !between_hosts() && receives_.left() > 0) {
    const int peer = group_->topology.local_of[part_.peer];
    if (group_->window.counters(peer).packed.load(std::memory_order_acquire) <= consumed_) return false;
    const int64_t begin = observer_ == nullptr ? 0 : Now();
    const char* from = group_->window.contribution(peer, consumed_);
    size_t room = group_->geometry.chunk_bytes / Bytes(travels_);
    while (room > 0 && receives_.left() > 0) {
      const Run run = receives_.Take(room);
      Move(run.at, receives_.dtype(), from, travels_, run.count);
      from += run.count * Bytes(travels_);
      room -= run.count;
    }
    arrived_ = receives_.taken();
    Observe(Stage::kUnpack, begin);
  }
  ++consumed_;
  StageCounters& mine = group_->window.counters(local_);
  for (auto counter : {&mine.reduced, &mine.published, &mine.consumed})
    counter->store(consumed_, std::memory_order_release);
  group_->RingPeers();
  return true;
}

// ---- between hosts ----

bool Adasum::between_hosts() const {
  return part_.peer >= 0 && group_->topology.host_of[part_.peer] != group_->topology.my_host();
}

// ---- arithmetic ----

// The next block of the slices that I keep, unless it ends beyond the first `arrived` elements of them.
bool Adasum::NextBlock(size_t arrived, Block* block) {
  for (; block_tensor_ < batch_.tensors.size(); ++block_tensor_, block_offset_ = 0) {
    const size_t kept = Cut(block_tensor_, keeps_.end) - Cut(block_tensor_, keeps_.first);
    if (block_offset_ == kept) continue;
    *block = {block_tensor_, block_offset_, std::min(kBlock, kept - block_offset_)};
    if (blocked_ + block->count > arrived) return false;
    block_offset_ += block->count;
    blocked_ += block->count;
    return true;
  }
  return false;
}

bool Adasum::TryMultiply() {
  if (part_.peer < 0 || round().kind != AdasumRound::Kind::kHalves) return false;
  Block block;
  int blocks = 0;
  for (; blocks < kMaxBlocks && NextBlock(arrived_, &block); ++blocks) {
    const size_t offset = block.offset * Bytes(work_);
    char* mine = At(widened_, block.tensor, keeps_.first) + offset;
    const char* theirs = At(theirs_, block.tensor, keeps_.first) + offset;
    if (mine_.dtype != work_)
      Convert(mine_.dtype, work_, mine, At(mine_, block.tensor, keeps_.first) + block.offset * Bytes(mine_.dtype),
              block.count);
    const bool first = plan_.First(round().level, me_);
    const Dots dots = AdasumDots(work_, first ? mine : theirs, first ? theirs : mine, block.count);
    dots_[block.tensor].aa += dots.aa;
    dots_[block.tensor].ab += dots.ab;
    dots_[block.tensor].bb += dots.bb;
  }
  return blocks > 0;
}

// False if nothing is left.
bool Adasum::TryCombine() {
  const int64_t begin = observer_ == nullptr ? 0 : Now();
  Block block;
  for (int blocks = 0; blocks < kMaxBlocks; ++blocks) {
    if (!NextBlock(SIZE_MAX, &block)) return blocks > 0;
    CombineBlock(block);
  }
  Observe(Stage::kReduce, begin);
  return true;
}

// In place of the other one's vector; at the last level straight into the result, unless that is rounded.
void Adasum::CombineBlock(const Block& block) {
  const Dots& dots = dots_[block.tensor];
  const size_t offset = block.offset * Bytes(work_);
  const char* mine = At(widened_, block.tensor, keeps_.first) + offset;
  char* theirs = At(theirs_, block.tensor, keeps_.first) + offset;
  const bool straight = last_level() && work_ == batch_.dtype && !narrows();
  char* to = straight ? At(result_, block.tensor, keeps_.first) + offset : theirs;
  const double factor = last_level() ? batch_.scaling.prescale * batch_.scaling.postscale : 1.0;
  const bool first = plan_.First(round().level, me_);
  const double share = plan_.ShareOfFirst(round().level, me_);
  const double factor_a = factor * Coefficient(share, dots.ab, dots.aa),
               factor_b = factor * Coefficient(1.0 - share, dots.ab, dots.bb);
  AdasumCombine(work_, to, first ? mine : theirs, first ? theirs : mine, block.count, factor_a, factor_b);
  if (last_level() && !straight) Deliver(theirs, block);
}

void Adasum::Deliver(const char* sum, const Block& block) const {
  char* to = At(result_, block.tensor, keeps_.first) + block.offset * Bytes(batch_.dtype);
  if (!narrows() || group_->topology.host_count() == 1) return Move(to, batch_.dtype, sum, work_, block.count);
  std::vector<char> narrow(block.count * Bytes(batch_.wire()));  // all ranks get what those on other hosts get
  Convert(work_, batch_.wire(), narrow.data(), sum, block.count);
  Convert(batch_.wire(), batch_.dtype, to, narrow.data(), block.count);
}

void Adasum::Observe(Stage stage, int64_t begin) const {
  if (observer_ == nullptr) return;
  for (const BatchTensor& tensor : batch_.tensors)
    observer_->OnStage(stage, tensor.operation, begin, Now(), tensor.bytes);
}

}  // namespace ringtrain
