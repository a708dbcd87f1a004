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
      sites_(group->topology.sites),
      places_(group->topology.hosts_of_a_site()),
      site_(me_ / places_),
      image_(batch, group->counters) {}

int RingPass::Host(int distance) const { return ((me_ + distance) % hosts_ + hosts_) % hosts_; }

void RingPass::Start(char* slot, const Chunk& chunk, int ring, uint64_t number, const char* ahead) {
  ahead_ = ahead;
  tag_ = group_->Tag(number);
  started_ = Now();
  image_.Take(slot, chunk, ring, hosts_);
  Enter(First());
}

RingPass::Phase RingPass::First() const {
  if (!reduces_) return sites_ > 1 ? Phase::kCrossGather : Phase::kGatherStep;
  const bool goes_whole = image_.total() * (hosts_ - 1) <= kMostOfWhole || (group_->far && hosts_ == 2);
  if (gathers_ && image_.plain() && goes_whole) return Phase::kWhole;
  if (direct_) return Phase::kDirectReduce;
  return places_ > 1 ? Phase::kReduceStep : Following(Phase::kReduceStep);
}

RingPass::Phase RingPass::Following(Phase phase) const {
  switch (phase) {
    case Phase::kReduceStep:
      if (sites_ > 1) return sites_ == 2 && gathers_ ? Phase::kStrand : Phase::kCrossReduce;
      return gathers_ ? Phase::kGatherStep : Phase::kDone;
    case Phase::kDirectReduce:
    case Phase::kCrossReduce:
      if (!gathers_) return Phase::kDone;
      return sites_ > 1 ? Phase::kCrossGather : Phase::kGatherStep;
    case Phase::kStrand:
    case Phase::kCrossGather:
      return places_ > 1 ? Phase::kGatherStep : Phase::kDone;
    case Phase::kWhole:
    case Phase::kGatherStep:
    case Phase::kDone:
      break;
  }
  return Phase::kDone;
}

void RingPass::Enter(Phase phase) {
  phase_ = phase;
  step_ = 0;
  step_started_ = false;
  if (phase == Phase::kDone) Finish();
}

void RingPass::Finish() {
  for (int host = 0; host < hosts_; ++host)
    if (gathers_ || host == me_) image_.Decode(host);
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
    FinishStep();
  }
  return {};
}

Status RingPass::StartStep() {
  switch (phase_) {
    case Phase::kWhole:
      return StartWhole();
    case Phase::kReduceStep:
      return StartExchange(Place(-step_ - 1), Place(-step_ - 2), true);
    case Phase::kDirectReduce:
      return StartDirect();
    case Phase::kStrand:
      return StartStrand();
    case Phase::kCrossReduce:
      return StartCrossReduce();
    case Phase::kCrossGather:
      return StartCrossGather();
    case Phase::kGatherStep:
      return StartExchange(Place(-step_), Place(-step_ - 1), false);
    case Phase::kDone:
      break;
  }
  return {};
}

void RingPass::FinishStep() {
  step_started_ = false;
  bool last = true;
  switch (phase_) {
    case Phase::kWhole:
      FinishWhole();
      break;
    case Phase::kReduceStep:
      last = ++step_ == places_ - 1;
      AddStrand(Place(-step_ - 1), last && sites_ == 1 ? scaling_ : Scaling{});
      break;
    case Phase::kDirectReduce:
      FinishDirect();
      break;
    case Phase::kStrand:
      FinishStrand();
      break;
    case Phase::kCrossReduce:
      FinishCrossReduce();
      break;
    case Phase::kGatherStep:
      last = ++step_ == places_ - 1;
      break;
    case Phase::kCrossGather:
    case Phase::kDone:
      break;
  }
  if (last) Enter(Following(phase_));
}

// ---- the ring of a site ----

// A step: a strand to the next place, and another one from the place before.
Status RingPass::StartExchange(int send_strand, int receive_strand, bool adds) {
  if (adds) incoming_.resize(std::max(incoming_.size(), StrandBytes(receive_strand)));
  char* into = incoming_.data();
  for (int part = receive_strand; part < hosts_; part += places_) {
    RT_TRY(Receive(AtPlace(Place(-1)), adds ? into : image_.at(part), image_.bytes(part)));
    into += image_.bytes(part);
  }
  for (int part = send_strand; part < hosts_; part += places_) RT_TRY(Send(AtPlace(Place(1)), part));
  return {};
}

void RingPass::AddStrand(int strand, const Scaling& scaling) {
  const char* came = incoming_.data();
  for (int part = strand; part < hosts_; part += places_) {
    const void* sources[] = {came, image_.at(part)};
    image_.Reduce(part, image_.at(part), sources, 2, scaling);
    came += image_.bytes(part);
  }
}

size_t RingPass::StrandBytes(int strand) const {
  size_t bytes = 0;
  for (int part = strand; part < hosts_; part += places_) bytes += image_.bytes(part);
  return bytes;
}

// ---- between sites ----

Status RingPass::StartStrand() {
  const int twin = Twin(1 - site_), strand = Place(0);
  incoming_.resize(std::max(incoming_.size(), StrandBytes(strand)));
  char* into = incoming_.data();
  for (int part = strand; part < hosts_; part += places_) {
    RT_TRY(Receive(twin, into, image_.bytes(part)));
    into += image_.bytes(part);
  }
  for (int part = strand; part < hosts_; part += places_) RT_TRY(Send(twin, part));
  return {};
}

void RingPass::FinishStrand() {
  const char* came = incoming_.data();
  for (int part = Place(0); part < hosts_; part += places_) {
    const void* by_site[2];
    by_site[site_] = image_.at(part);
    by_site[1 - site_] = came;
    image_.Reduce(part, image_.at(part), by_site, 2, scaling_);
    came += image_.bytes(part);
  }
}

Status RingPass::StartCrossReduce() {
  const size_t bytes = image_.bytes(me_);
  incoming_.resize(std::max(incoming_.size(), bytes * sites_));
  for (int site = 0; site < sites_; ++site)
    if (site != site_) RT_TRY(Receive(Twin(site), incoming_.data() + bytes * site, bytes));
  for (int site = 0; site < sites_; ++site)
    if (site != site_) RT_TRY(Send(Twin(site), Twin(site)));
  return {};
}

void RingPass::FinishCrossReduce() {
  std::vector<const void*> by_site;
  for (int site = 0; site < sites_; ++site)
    by_site.push_back(site == site_ ? image_.at(me_) : incoming_.data() + image_.bytes(me_) * site);
  image_.Reduce(me_, image_.at(me_), by_site.data(), sites_, scaling_);
}

Status RingPass::StartCrossGather() {
  for (int site = 0; site < sites_; ++site)
    if (site != site_) RT_TRY(Receive(Twin(site), image_.at(Twin(site)), image_.bytes(Twin(site))));
  for (int site = 0; site < sites_; ++site)
    if (site != site_) RT_TRY(Send(Twin(site), me_));
  return {};
}

// ---- from each host to each other ----

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
  image_.Reduce(me_, image_.at(me_), in_host_order.data(), hosts_, scaling_);
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

void RingPass::FinishWhole() {
  std::vector<char*> by_host(hosts_);
  for (int part = 0; part < hosts_; ++part) {
    for (int distance = 0; distance < hosts_; ++distance) {
      char* const from = distance == 0 ? image_.at(0) : incoming_.data() + image_.total() * (distance - 1);
      by_host[Host(-distance)] = from + (image_.at(part) - image_.at(0));
    }
    AddAsOnTheWay(part, by_host);
  }
}

// In the order in which the part would come around: from the place behind its own, to its own, and then site by site.
// Contributions are overwritten.
void RingPass::AddAsOnTheWay(int part, const std::vector<char*>& by_host) {
  if (direct_) {
    const std::vector<const void*> in_order(by_host.begin(), by_host.end());
    image_.Reduce(part, image_.at(part), in_order.data(), hosts_, scaling_);
    return;
  }
  std::vector<const void*> in_order(places_), by_site;
  for (int site = 0; site < sites_; ++site) {
    for (int place = 0; place < places_; ++place)
      in_order[(place - part % places_ - 1 + places_) % places_] = by_host[site * places_ + place];
    char* const to = sites_ == 1 ? image_.at(part) : by_host[site * places_];
    if (places_ > 1) image_.Reduce(part, to, in_order.data(), places_, sites_ == 1 ? scaling_ : Scaling{});
    by_site.push_back(to);
  }
  if (sites_ > 1) image_.Reduce(part, image_.at(part), by_site.data(), sites_, scaling_);
}

Status RingPass::ReceiveFromAll(size_t bytes) {
  incoming_.resize(std::max(incoming_.size(), bytes * (hosts_ - 1)));
  for (int distance = 1; distance < hosts_; ++distance)
    RT_TRY(Receive(Host(-distance), incoming_.data() + bytes * (distance - 1), bytes));
  return {};
}

// ---- messages ----

Status RingPass::Receive(int host, char* into, size_t bytes) {
  if (bytes == 0) return {};
  Wire::Ticket ticket;
  RT_TRY(group_->wire->StartReceive(group_->RankOf(leaders_[host]), tag_, into, bytes, &ticket));
  tickets_.push_back(ticket);
  return {};
}

Status RingPass::Send(int host, const char* data, size_t bytes) {
  if (bytes == 0) return {};
  Wire::Ticket ticket;
  RT_TRY(group_->wire->StartSend(group_->RankOf(leaders_[host]), tag_, data, bytes, &ticket));
  tickets_.push_back(ticket);
  group_->counters->Add(Counter::kWireBytesSent, static_cast<int64_t>(bytes));
  return {};
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

}  // namespace ringtrain
