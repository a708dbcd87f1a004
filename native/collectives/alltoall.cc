#include "collectives/alltoall.h"

#include <algorithm>
#include <cstring>

namespace ringtrain {
namespace {

constexpr size_t kMaxMessages = 8;                 // under way at once
constexpr size_t kMessageBytes = size_t{1} << 30;  // longer ones are cut

}  // namespace

Alltoall::Alltoall(Batch batch, Group* group, StageObserver* observer)
    : batch_(std::move(batch)),
      tensor_(batch_.tensors[0]),
      group_(group),
      observer_(observer),
      members_(group->topology.member_count()),
      me_(group->topology.me),
      local_(group->topology.my_local()),
      locals_(group->topology.local_count()),
      step_bytes_(group->geometry.chunk_bytes / group->topology.most_locals),
      begin_(group->next_chunk),
      end_(begin_ + LocalChunks()),
      packed_(begin_),
      consumed_(begin_),
      exchange_(group->next_exchange++),
      own_bytes_(BytesTo(me_)),
      pairs_(members_ - 1) {
  group->next_chunk = end_;
  size_t sent = 0, received = 0;
  for (int member = 0; member < members_; ++member) {
    input_offsets_.push_back(sent);
    output_offsets_.push_back(received);
    sent += BytesTo(member);
    received += BytesFrom(member);
  }
}

// Enough for the largest exchange of any two members that share a host, this one or another: every member counts the
// same chunks, since all number them alike.
uint64_t Alltoall::LocalChunks() const {
  if (group_->topology.most_locals == 1) return 0;  // also where each rank is taken for a host
  return (tensor_.most_within_host * tensor_.row_bytes + step_bytes_ - 1) / step_bytes_;
}

Status Alltoall::Advance(bool* moved) {
  bool any = TryFetch();
  any |= TryPack();
  while (messages_.size() < kMaxMessages && pairs_done_ < pairs_) {
    RT_TRY(StartPair());
    any = true;
  }
  RT_TRY(TestMessages(&any));
  if (!any) any = TryCopyOwn();
  *moved |= any;
  return {};
}

// Nobody waits for it: one step of it whenever the others have to be waited for.
bool Alltoall::TryCopyOwn() {
  if (own_copied_ == own_bytes_) return false;
  const size_t step = std::min(step_bytes_, own_bytes_ - own_copied_);
  if (tensor_.output != nullptr)
    std::memcpy(tensor_.output + output_offsets_[me_] + own_copied_, tensor_.input + input_offsets_[me_] + own_copied_,
                step);
  own_copied_ += step;
  return true;
}

bool Alltoall::TryPack() {
  StageCounters& mine = group_->window.counters(local_);
  const uint64_t slots = group_->geometry.chunk_slots;
  if (packed_ == end_ || mine.packed.load(std::memory_order_relaxed) != packed_) return false;
  for (int local = 0; local < locals_; ++local)
    if (group_->window.counters(local).reduced.load(std::memory_order_acquire) + slots <= packed_) return false;
  int64_t begin = Now();
  char* slot = group_->window.contribution(local_, packed_);
  const size_t offset = (packed_ - begin_) * step_bytes_;
  size_t written = 0;
  for (int local = 0; local < locals_; ++local) {
    const int to = group_->topology.locals()[local];
    const size_t bytes = BytesTo(to);
    if (local == local_ || bytes <= offset) continue;
    const size_t step = std::min(step_bytes_, bytes - offset);
    group_->handover.Copy(slot + local * step_bytes_, tensor_.input + input_offsets_[to] + offset, step);
    written += step;
  }
  group_->counters->Add(Counter::kSharedBytes, static_cast<int64_t>(written));
  if (observer_ != nullptr) observer_->OnStage(Stage::kPack, tensor_.operation, begin, Now(), written);
  mine.packed.store(++packed_, std::memory_order_release);
  group_->RingPeers();
  return true;
}

// Takes a chunk straight from the contributions to the output; the later stages have nothing left to do.
bool Alltoall::TryFetch() {
  StageCounters& mine = group_->window.counters(local_);
  if (consumed_ == packed_ || mine.reduced.load(std::memory_order_relaxed) != consumed_ ||
      mine.published.load(std::memory_order_relaxed) != consumed_ ||
      mine.consumed.load(std::memory_order_relaxed) != consumed_)
    return false;
  for (int local = 0; local < locals_; ++local)
    if (group_->window.counters(local).packed.load(std::memory_order_acquire) <= consumed_) return false;
  int64_t begin = Now();
  const size_t offset = (consumed_ - begin_) * step_bytes_;
  size_t read = 0;
  for (int local = 0; local < locals_; ++local) {
    const int from = group_->topology.locals()[local];
    const size_t bytes = BytesFrom(from);
    if (local == local_ || bytes <= offset) continue;
    const size_t step = std::min(step_bytes_, bytes - offset);
    if (tensor_.output == nullptr) continue;  // no memory: what comes is dropped
    std::memcpy(tensor_.output + output_offsets_[from] + offset,
                group_->window.contribution(local, consumed_) + local_ * step_bytes_, step);
    read += step;
  }
  if (observer_ != nullptr) observer_->OnStage(Stage::kUnpack, tensor_.operation, begin, Now(), read);
  ++consumed_;
  for (auto counter : {&mine.reduced, &mine.published, &mine.consumed})
    counter->store(consumed_, std::memory_order_release);
  group_->RingPeers();
  return true;
}

// The next distance around the members: I send that far ahead and receive from that far behind, so that nobody is
// everyone's target at the same time.
Status Alltoall::StartPair() {
  const int distance = ++pairs_done_;
  const int to = (me_ + distance) % members_, from = (me_ - distance + members_) % members_;
  const Topology& topology = group_->topology;
  const int tag = group_->ExchangeTag(exchange_);
  if (wire_begin_ == 0) wire_begin_ = Now();
  if (topology.host_of[from] != topology.my_host()) {
    char* output = tensor_.output + output_offsets_[from];
    for (size_t left = BytesFrom(from), bytes; left > 0; left -= bytes, output += bytes) {
      bytes = std::min(left, kMessageBytes);
      messages_.emplace_back();
      RT_TRY(group_->wire->StartReceive(group_->RankOf(from), tag, output, bytes, &messages_.back()));
    }
  }
  if (topology.host_of[to] != topology.my_host()) {
    const char* input = tensor_.input + input_offsets_[to];
    for (size_t left = BytesTo(to), bytes; left > 0; left -= bytes, input += bytes) {
      bytes = std::min(left, kMessageBytes);
      messages_.emplace_back();
      RT_TRY(group_->wire->StartSend(group_->RankOf(to), tag, input, bytes, &messages_.back()));
      group_->counters->Add(Counter::kWireBytesSent, static_cast<int64_t>(bytes));
    }
  }
  return {};
}

Status Alltoall::TestMessages(bool* moved) {
  const size_t before = messages_.size();
  for (size_t index = 0; index < messages_.size();) {
    bool complete;
    RT_TRY(group_->wire->Test(messages_[index], &complete));
    if (complete) {
      messages_[index] = messages_.back();
      messages_.pop_back();
    } else {
      ++index;
    }
  }
  if (messages_.size() == before) return {};
  *moved = true;
  if (messages_.empty() && pairs_done_ == pairs_ && observer_ != nullptr)
    observer_->OnStage(Stage::kWire, tensor_.operation, wire_begin_, Now(), 0);
  return {};
}

}  // namespace ringtrain
