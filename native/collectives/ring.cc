#include "collectives/ring.h"

#include <algorithm>
#include <utility>

namespace ringtrain {

RingPass::RingPass(Group* group, std::vector<int> leaders, const Batch& batch)
    : group_(group),
      leaders_(std::move(leaders)),
      batch_(batch),
      scaling_{1.0, narrows() ? 1.0 : batch.scaling.postscale, batch.scaling.divisor},
      hosts_(group->topology.host_count()),
      me_(group->topology.my_host()) {}

int RingPass::Host(int distance) const { return ((me_ + distance) % hosts_ + hosts_) % hosts_; }

void RingPass::Start(char* slot, uint64_t chunk, std::vector<Part> parts) {
  slot_ = data_ = slot;
  parts_ = std::move(parts);
  tag_ = group_->Tag(chunk);
  started_ = Now();
  if (narrows()) Narrow();
  const bool direct = batch_.wire == DType::kFloat16 || batch_.wire == DType::kBFloat16;
  Enter(!reduces() ? Phase::kGatherStep : direct ? Phase::kDirectReduce : Phase::kReduceStep);
}

void RingPass::Narrow() {
  const size_t wide = Bytes(batch_.dtype), narrow = Bytes(batch_.wire);
  const size_t count = (parts_.back().offset + parts_.back().bytes) / wide;
  image_.resize(std::max(image_.size(), count * narrow));
  Convert(batch_.dtype, batch_.wire, image_.data(), slot_, count);
  for (Part& part : parts_) part = {part.offset / wide * narrow, part.bytes / wide * narrow};
  data_ = image_.data();
}

// All parts, or of a reducescatter the one that this host has finished.
void RingPass::Widen() const {
  const size_t wide = Bytes(batch_.dtype), narrow = Bytes(batch_.wire);
  for (int host = 0; host < hosts_; ++host) {
    if (!gathers() && host != me_) continue;
    const size_t first = parts_[host].offset / narrow, count = parts_[host].bytes / narrow;
    Convert(batch_.wire, batch_.dtype, slot_ + first * wide, data_ + first * narrow, count, batch_.scaling.postscale);
  }
}

void RingPass::EndReduce() {
  if (gathers())
    Enter(Phase::kGatherStep);
  else
    Finish();
}

void RingPass::Finish() {
  if (narrows()) Widen();
  Enter(Phase::kDone);
}

void RingPass::Enter(Phase phase) {
  phase_ = phase;
  step_ = 0;
  step_started_ = false;
}

Status RingPass::Advance(bool* moved) {
  while (phase_ != Phase::kDone) {
    if (!step_started_) {
      RT_TRY(StartStep());
      step_started_ = true;
      *moved = true;
    }
    bool complete;
    RT_TRY(TestAll(&complete));
    if (!complete) return {};
    *moved = true;
    RT_TRY(FinishStep());
  }
  return {};
}

Status RingPass::StartStep() {
  if (phase_ == Phase::kDirectReduce) return StartDirect();
  if (phase_ == Phase::kGatherStep) {
    int receives = Host(-step_ - 1);
    return StartExchange(Host(-step_), receives, data_ + parts_[receives].offset);
  }
  int receives = Host(-step_ - 2);
  incoming_.resize(std::max(incoming_.size(), parts_[receives].bytes));
  return StartExchange(Host(-step_ - 1), receives, incoming_.data());
}

Status RingPass::StartExchange(int send_part, int receive_part, char* receive_into) {
  size_t receive_bytes = parts_[receive_part].bytes;
  if (receive_bytes > 0) {
    Transport::Ticket ticket;
    RT_TRY(group_->transport->StartReceive(group_->RankOf(leaders_[Host(-1)]), tag_, receive_into, receive_bytes, &ticket));
    tickets_.push_back(ticket);
  }
  return Send(Host(1), send_part);
}

Status RingPass::Send(int host, int part) {
  size_t bytes = parts_[part].bytes;
  if (bytes == 0) return {};
  Transport::Ticket ticket;
  RT_TRY(group_->transport->StartSend(group_->RankOf(leaders_[host]), tag_, data_ + parts_[part].offset, bytes, &ticket));
  tickets_.push_back(ticket);
  group_->counters->Add(Counter::kWireBytesSent, static_cast<int64_t>(bytes));
  return {};
}

Status RingPass::StartDirect() {
  const size_t bytes = parts_[me_].bytes;
  incoming_.resize(std::max(incoming_.size(), bytes * (hosts_ - 1)));
  for (int distance = 1; distance < hosts_ && bytes > 0; ++distance) {
    Transport::Ticket ticket;
    RT_TRY(group_->transport->StartReceive(group_->RankOf(leaders_[Host(-distance)]), tag_,
                                           incoming_.data() + bytes * (distance - 1), bytes, &ticket));
    tickets_.push_back(ticket);
  }
  for (int distance = 1; distance < hosts_; ++distance) RT_TRY(Send(Host(distance), Host(distance)));
  return {};
}

void RingPass::FinishDirect() {
  const size_t bytes = parts_[me_].bytes;
  std::vector<const void*> in_host_order(hosts_);
  for (int distance = 0; distance < hosts_; ++distance)
    in_host_order[Host(-distance)] =
        distance == 0 ? data_ + parts_[me_].offset : incoming_.data() + bytes * (distance - 1);
  Reduce(batch_.wire, batch_.reduction, data_ + parts_[me_].offset, in_host_order.data(), hosts_, bytes / Bytes(batch_.wire),
         scaling_);
}

Status RingPass::TestAll(bool* complete) {
  while (!tickets_.empty()) {
    RT_TRY(group_->transport->Test(tickets_.back(), complete));
    if (!*complete) return {};
    tickets_.pop_back();
  }
  *complete = true;
  return {};
}

Status RingPass::FinishStep() {
  step_started_ = false;
  if (phase_ == Phase::kDirectReduce) {
    FinishDirect();
    EndReduce();
    return {};
  }
  const bool last = ++step_ == hosts_ - 1;
  if (phase_ == Phase::kReduceStep) {
    const Part& part = parts_[Host(-step_ - 1)];
    const void* sources[] = {incoming_.data(), data_ + part.offset};
    Reduce(batch_.wire, batch_.reduction, data_ + part.offset, sources, 2, part.bytes / Bytes(batch_.wire),
           last ? scaling_ : Scaling{});
    if (last) EndReduce();
  } else if (last) {
    Finish();
  }
  return {};
}

}  // namespace ringtrain
