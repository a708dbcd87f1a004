#include "collectives/ring.h"

#include <algorithm>
#include <utility>

#include "collectives/rows.h"

namespace ringtrain {
namespace {

// What a host may send of a chunk that goes to all hosts as it is.
constexpr size_t kMostOfWhole = 16 << 10;

// Where a codec decodes the result, the postscale comes with that.
Scaling ScalingOfLast(const Batch& batch) {
  Scaling scaling = batch.scaling.of_result();
  if (!batch.codec->identity()) scaling.postscale = 1.0;
  return scaling;
}

}  // namespace

RingPass::RingPass(Group* group, std::vector<int> leaders, const Batch& batch)
    : group_(group),
      leaders_(std::move(leaders)),
      reduces_(Find(batch.operation)->reduces),
      gathers_(ReceivesAll(Find(batch.operation)->layout)),
      direct_(!batch.codec->PartialSums(batch.dtype)),
      sent_ahead_(batch.ahead.sent),
      scaling_(ScalingOfLast(batch)),
      hosts_(group->topology.host_count()),
      me_(group->topology.my_host()),
      image_(batch, group->counters) {}

int RingPass::Host(int distance) const { return ((me_ + distance) % hosts_ + hosts_) % hosts_; }

void RingPass::Start(char* slot, const Chunk& chunk, int ring, uint64_t number, const char* ahead) {
  ahead_ = ahead;
  tag_ = group_->Tag(number);
  started_ = Now();
  image_.Take(slot, chunk, ring, hosts_);
  const bool whole = reduces_ && gathers_ && image_.plain() &&
                     (image_.total() * (hosts_ - 1) <= kMostOfWhole || (group_->far && hosts_ == 2));
  Enter(whole ? Phase::kWhole : !reduces_ ? Phase::kGatherStep : direct_ ? Phase::kDirectReduce : Phase::kReduceStep);
}

void RingPass::EndReduce() {
  if (gathers_)
    Enter(Phase::kGatherStep);
  else
    Finish();
}

void RingPass::Finish() {
  for (int host = 0; host < hosts_; ++host)
    if (gathers_ || host == me_) image_.Decode(host);
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
  if (phase_ == Phase::kWhole) return StartWhole();
  if (phase_ == Phase::kDirectReduce) return StartDirect();
  if (phase_ == Phase::kGatherStep) {
    int receives = Host(-step_ - 1);
    return StartExchange(Host(-step_), receives, image_.at(receives));
  }
  int receives = Host(-step_ - 2);
  incoming_.resize(std::max(incoming_.size(), image_.bytes(receives)));
  return StartExchange(Host(-step_ - 1), receives, incoming_.data());
}

Status RingPass::StartExchange(int send_part, int receive_part, char* receive_into) {
  size_t receive_bytes = image_.bytes(receive_part);
  if (receive_bytes > 0) {
    Wire::Ticket ticket;
    RT_TRY(group_->wire->StartReceive(group_->RankOf(leaders_[Host(-1)]), tag_, receive_into, receive_bytes, &ticket));
    tickets_.push_back(ticket);
  }
  return Send(Host(1), send_part);
}

Status RingPass::Send(int host, const char* data, size_t bytes) {
  if (bytes == 0) return {};
  Wire::Ticket ticket;
  RT_TRY(group_->wire->StartSend(group_->RankOf(leaders_[host]), tag_, data, bytes, &ticket));
  tickets_.push_back(ticket);
  group_->counters->Add(Counter::kWireBytesSent, static_cast<int64_t>(bytes));
  return {};
}

Status RingPass::StartDirect() {
  RT_TRY(ReceiveFromAll(image_.bytes(me_)));
  for (int distance = 1; distance < hosts_; ++distance) RT_TRY(Send(Host(distance), Host(distance)));
  return {};
}

void RingPass::FinishDirect() {
  const size_t bytes = image_.bytes(me_);
  std::vector<const void*> in_host_order(hosts_);
  for (int distance = 0; distance < hosts_; ++distance)
    in_host_order[Host(-distance)] = distance == 0 ? image_.at(me_) : incoming_.data() + bytes * (distance - 1);
  image_.Reduce(me_, in_host_order.data(), hosts_, scaling_);
}

Status RingPass::ReceiveFromAll(size_t bytes) {
  incoming_.resize(std::max(incoming_.size(), bytes * (hosts_ - 1)));
  for (int distance = 1; distance < hosts_ && bytes > 0; ++distance) {
    Wire::Ticket ticket;
    RT_TRY(group_->wire->StartReceive(group_->RankOf(leaders_[Host(-distance)]), tag_,
                                      incoming_.data() + bytes * (distance - 1), bytes, &ticket));
    tickets_.push_back(ticket);
  }
  return {};
}

Status RingPass::StartWhole() {
  if (ahead_ == nullptr)
    RT_TRY(ReceiveFromAll(image_.total()));
  else
    incoming_.assign(ahead_, ahead_ + image_.total());
  if (sent_ahead_) return {};
  for (int distance = 1; distance < hosts_; ++distance) RT_TRY(Send(Host(distance), image_.at(0), image_.total()));
  return {};
}

// In the order in which the part would come around the ring: from the host behind its own, to its own.
void RingPass::FinishWhole() {
  std::vector<const void*> in_order(hosts_);
  for (int part = 0; part < hosts_; ++part) {
    for (int host = 0; host < hosts_; ++host) {
      const int distance = (me_ - host + hosts_) % hosts_;
      const char* const from = distance == 0 ? image_.at(0) : incoming_.data() + image_.total() * (distance - 1);
      in_order[direct_ ? host : (host - part - 1 + hosts_) % hosts_] = from + (image_.at(part) - image_.at(0));
    }
    image_.Reduce(part, in_order.data(), hosts_, scaling_);
  }
}

Status RingPass::TestAll(bool* complete) {
  while (!tickets_.empty()) {
    RT_TRY(group_->wire->Test(tickets_.back(), complete));
    if (!*complete) return {};
    tickets_.pop_back();
  }
  *complete = true;
  return {};
}

Status RingPass::FinishStep() {
  step_started_ = false;
  if (phase_ == Phase::kWhole) {
    FinishWhole();
    Finish();
    return {};
  }
  if (phase_ == Phase::kDirectReduce) {
    FinishDirect();
    EndReduce();
    return {};
  }
  const bool last = ++step_ == hosts_ - 1;
  if (phase_ == Phase::kReduceStep) {
    const int part = Host(-step_ - 1);
    const void* sources[] = {incoming_.data(), image_.at(part)};
    image_.Reduce(part, sources, 2, last ? scaling_ : Scaling{});
    if (last) EndReduce();
  } else if (last) {
    Finish();
  }
  return {};
}

}  // namespace ringtrain
