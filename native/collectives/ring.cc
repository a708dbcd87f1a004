#include "collectives/ring.h"

#include <algorithm>
#include <utility>

#include "collectives/rows.h"

namespace ringtrain {
namespace {

// What a host may send of a chunk that goes to all hosts as it is.
constexpr size_t kMostOfWhole = 16 << 10;
// Hosts that send to each other at once: above it there are too many messages, and connections, for one step.
constexpr int kFewHosts = 16;
// Of a batch that takes fewer steps than the ring's. Between few hosts it has as many bytes, but one host may get all
// of them at one moment, from all others, and a switch must hold them. Between many it has more bytes, and the ring
// more messages: from so many for each host on the ring is faster, at 1 to 10 Gbit/s.
constexpr size_t kMostInFewSteps = 256 << 10;
constexpr size_t kMostOfAHost = 8 << 10;
// From this round trip on a step between two costs more than all additions on both.
constexpr Nanoseconds kFarForTwo = 5 * INT64_C(1000000);

// Where a codec decodes the result, the postscale comes with that.
Scaling ScalingOfLast(const Batch& batch) {
  Scaling scaling = batch.scaling.of_result();
  if (!batch.codec->identity()) scaling.postscale = 1.0;
  return scaling;
}

}  // namespace

RingPass::RingPass(Group* group, std::vector<int> leaders, const Batch& batch, int chunks)
    : group_(group),
      reduces_(Find(batch.operation)->reduces),
      gathers_(ReceivesAll(Find(batch.operation)->layout)),
      direct_(!batch.codec->PartialSums(batch.dtype)),
      sent_ahead_(batch.ahead.sent),
      scaling_(ScalingOfLast(batch)),
      topology_(group->topology),
      hosts_(topology_.host_count()),
      me_(topology_.my_host()),
      chunks_(static_cast<size_t>(chunks)),
      site_(topology_.my_site()),
      places_(topology_.hosts_of_site(site_)),
      image_(batch, group->counters),
      messages_(group, std::move(leaders)),
      doubling_(&messages_, hosts_, me_) {}

void RingPass::Start(char* slot, const Chunk& chunk, int ring, uint64_t number, const char* ahead) {
  ahead_ = ahead;
  messages_.BeginChunk(number);
  started_ = Now();
  image_.Take(slot, chunk, ring, hosts_);
  way_ = Choose();
  Enter(First());
}

// The same on all hosts, which have the same chunk.
RingPass::Way RingPass::Choose() const {
  const size_t bytes = image_.total();
  const bool goes_whole =
      bytes * static_cast<size_t>(hosts_ - 1) <= kMostOfWhole || (group_->round_trip >= kFarForTwo && hosts_ == 2);
  if (reduces_ && gathers_ && !image_.keeps() && goes_whole) return Way::kWhole;
  if (sites() > 1) return Way::kRing;
  // Those that have near hosts may share the line with these, which would carry more bytes than for a ring.
  if (hosts_ <= kFewHosts && group_->least_round_trip >= kFarHosts) return Way::kAtOnce;
  const size_t most = std::max(kMostInFewSteps, kMostOfAHost * static_cast<size_t>(hosts_));
  if (bytes * chunks_ > most) return Way::kRing;
  return hosts_ <= kFewHosts ? Way::kAtOnce : Way::kDoubling;
}

RingPass::Phase RingPass::First() const {
  if (way_ == Way::kWhole) return hosts_ <= kFewHosts ? Phase::kWhole : Phase::kWholeDoubling;
  if (!reduces_) return Following(Phase::kDirectReduce);
  if (way_ == Way::kDoubling) return Phase::kDoublingReduce;
  if (way_ == Way::kAtOnce || direct_) return Phase::kDirectReduce;
  return places_ > 1 ? Phase::kReduceStep : Following(Phase::kReduceStep);
}

RingPass::Phase RingPass::Following(Phase phase) const {
  switch (phase) {
    case Phase::kReduceStep:
      if (sites() > 1) return sites() == 2 && gathers_ ? Phase::kStrand : Phase::kCrossReduce;
      return gathers_ ? Phase::kGatherStep : Phase::kDone;
    case Phase::kDirectReduce:
    case Phase::kDoublingReduce:
    case Phase::kCrossReduce:
      if (!gathers_) return Phase::kDone;
      if (way_ == Way::kAtOnce) return Phase::kDirectGather;
      if (way_ == Way::kDoubling) return Phase::kDoublingGather;
      return sites() > 1 ? Phase::kCrossGather : Phase::kGatherStep;
    case Phase::kStrand:
    case Phase::kCrossGather:
      return places_ > 1 ? Phase::kGatherStep : Phase::kDone;
    case Phase::kWhole:
    case Phase::kWholeDoubling:
    case Phase::kDirectGather:
    case Phase::kDoublingGather:
    case Phase::kGatherStep:
    case Phase::kDone:
      break;
  }
  return Phase::kDone;
}

int RingPass::Steps(Phase phase) const {
  switch (phase) {
    case Phase::kReduceStep:
    case Phase::kGatherStep:
      return places_ - 1;
    case Phase::kWholeDoubling:
    case Phase::kDoublingReduce:
    case Phase::kDoublingGather:
      return doubling_.steps();
    default:
      return 1;
  }
}

void RingPass::Enter(Phase phase) {
  phase_ = phase;
  step_ = 0;
  step_started_ = false;
  if (phase == Phase::kDoublingReduce) doubling_.BeginScatter(image_);
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
    RT_TRY(messages_.TestAll(&complete));
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
    case Phase::kWholeDoubling:
      return StartWholeDoubling();
    case Phase::kReduceStep:
      return StartRingStep(Strand(-step_ - 1), Strand(-step_ - 2), true);
    case Phase::kStrand:
      return StartStrand();
    case Phase::kDirectReduce:
      return StartDirectReduce();
    case Phase::kCrossReduce:
      return StartCrossReduce();
    case Phase::kDoublingReduce:
      return doubling_.StartScatter(step_);
    case Phase::kDirectGather:
      return StartDirectGather();
    case Phase::kCrossGather:
      return StartCrossGather();
    case Phase::kDoublingGather:
      return doubling_.StartGather(step_, image_);
    case Phase::kGatherStep:
      return StartRingStep(Strand(-step_), Strand(-step_ - 1), false);
    case Phase::kDone:
      break;
  }
  return {};
}

void RingPass::FinishStep() {
  step_started_ = false;
  if (phase_ == Phase::kDoublingReduce) doubling_.FinishScatter(step_);
  const bool last = ++step_ == Steps(phase_);
  if (phase_ == Phase::kReduceStep) AddStrand(Strand(-step_ - 1), true, last && sites() == 1 ? scaling_ : Scaling{});
  if (!last) return;
  FinishPhase();
  Enter(Following(phase_));
}

void RingPass::FinishPhase() {
  switch (phase_) {
    case Phase::kWhole:
    case Phase::kWholeDoubling:
      FinishWhole();
      break;
    case Phase::kStrand:
      AddStrand(Strand(0), site_ == 1, scaling_);
      break;
    case Phase::kDirectReduce:
      FinishDirectReduce();
      break;
    case Phase::kCrossReduce:
      FinishCrossReduce();
      break;
    case Phase::kDoublingReduce:
      FinishDoublingReduce();
      break;
    default:
      break;
  }
}

char* RingPass::Room(size_t bytes) {
  incoming_.resize(std::max(incoming_.size(), bytes));
  return incoming_.data();
}

// ---- strands: the ring of a site ----

int RingPass::HostWith(int site, int part) const {
  const int first = topology_.sites[static_cast<size_t>(site)], hosts = topology_.hosts_of_site(site);
  return first + ((part - first) % hosts + hosts) % hosts;
}

template <typename Action>
Status RingPass::ForStrand(int strand, Action action) const {
  for (int part = strand; part < hosts_; part += places_) RT_TRY(action(part));
  return {};
}

Status RingPass::StartRingStep(int send_strand, int receive_strand, bool adds) {
  const int before = HostWith(site_, Strand(-1)), behind = HostWith(site_, Strand(1));
  char* into = adds ? Room(StrandBytes(receive_strand)) : nullptr;
  RT_TRY(ForStrand(receive_strand, [&](int part) {
    char* const to = adds ? std::exchange(into, into + image_.bytes(part)) : image_.at(part);
    return messages_.Receive(before, to, image_.bytes(part));
  }));
  return ForStrand(send_strand, [&](int part) { return Send(behind, part); });
}

void RingPass::AddStrand(int strand, bool came_first, const Scaling& scaling) {
  const char* came = incoming_.data();
  for (int part = strand; part < hosts_; part += places_) {
    const void* sources[] = {came, image_.at(part)};
    if (!came_first) std::swap(sources[0], sources[1]);
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
  char* into = Room(StrandBytes(Strand(0)));
  RT_TRY(ForStrand(Strand(0), [&](int part) {
    return messages_.Receive(HostWith(1 - site_, part), std::exchange(into, into + image_.bytes(part)),
                             image_.bytes(part));
  }));
  return ForStrand(Strand(0), [&](int part) { return Send(HostWith(1 - site_, part), part); });
}

// Of its own site a strand has this host's part alone.
Status RingPass::StartCrossReduce() {
  const size_t bytes = image_.bytes(me_);
  char* into = Room(bytes * static_cast<size_t>(sites() - 1));
  for (int site = 0; site < sites(); ++site)
    if (site != site_) RT_TRY(messages_.Receive(HostWith(site, me_), std::exchange(into, into + bytes), bytes));
  return ForStrand(Strand(0), [&](int part) { return part == me_ ? Status() : Send(part, part); });
}

void RingPass::FinishCrossReduce() {
  const char* came = incoming_.data();
  std::vector<const void*> by_site;
  for (int site = 0; site < sites(); ++site)
    by_site.push_back(site == site_ ? image_.at(me_) : std::exchange(came, came + image_.bytes(me_)));
  image_.Reduce(me_, image_.at(me_), by_site.data(), sites(), scaling_);
}

Status RingPass::StartCrossGather() {
  RT_TRY(ForStrand(Strand(0), [&](int part) { return part == me_ ? Status() : Receive(part, part); }));
  for (int site = 0; site < sites(); ++site)
    if (site != site_) RT_TRY(Send(HostWith(site, me_), me_));
  return {};
}

// ---- parts, from each host to each other ----

Status RingPass::StartDirectReduce() {
  const size_t bytes = image_.bytes(me_);
  char* const into = Room(bytes * static_cast<size_t>(hosts_ - 1));
  for (int distance = 1; distance < hosts_; ++distance)
    RT_TRY(messages_.Receive(Host(-distance), into + bytes * static_cast<size_t>(distance - 1), bytes));
  for (int distance = 1; distance < hosts_; ++distance) RT_TRY(Send(Host(distance), Host(distance)));
  return {};
}

void RingPass::FinishDirectReduce() {
  const size_t bytes = image_.bytes(me_);
  std::vector<char*> by_host(static_cast<size_t>(hosts_));
  for (int distance = 0; distance < hosts_; ++distance)
    by_host[static_cast<size_t>(Host(-distance))] =
        distance == 0 ? image_.at(me_) : incoming_.data() + bytes * static_cast<size_t>(distance - 1);
  AddAsOnTheWay(me_, by_host);
}

void RingPass::FinishDoublingReduce() {
  std::vector<char*> by_host(static_cast<size_t>(hosts_));
  for (int distance = 0; distance < hosts_; ++distance)
    by_host[static_cast<size_t>(Host(-distance))] = doubling_.Came(distance);
  AddAsOnTheWay(me_, by_host);
}

Status RingPass::StartDirectGather() {
  for (int distance = 1; distance < hosts_; ++distance) RT_TRY(Receive(Host(-distance), Host(-distance)));
  for (int distance = 1; distance < hosts_; ++distance) RT_TRY(Send(Host(distance), me_));
  return {};
}

// ---- the chunk as it is, from each host to each other ----

Status RingPass::StartWhole() {
  const size_t bytes = image_.total();
  if (ahead_ != nullptr)
    incoming_.assign(ahead_, ahead_ + bytes);
  else
    for (int distance = 1; distance < hosts_; ++distance)
      RT_TRY(messages_.Receive(
          Host(-distance), Room(bytes * static_cast<size_t>(hosts_ - 1)) + bytes * static_cast<size_t>(distance - 1),
          bytes));
  for (int distance = 1; distance < hosts_ && !sent_ahead_; ++distance)
    RT_TRY(messages_.Send(Host(distance), image_.at(0), bytes));
  return {};
}

Status RingPass::StartWholeDoubling() {
  const size_t bytes = image_.total();
  return doubling_.StartGatherOfEqual(step_, image_.at(0), Room(bytes * static_cast<size_t>(hosts_ - 1)), bytes);
}

void RingPass::FinishWhole() {
  const size_t bytes = image_.total();
  std::vector<char*> by_host(static_cast<size_t>(hosts_));
  for (int part = 0; part < hosts_; ++part) {
    const ptrdiff_t offset = image_.at(part) - image_.at(0);
    for (int distance = 0; distance < hosts_; ++distance)
      by_host[static_cast<size_t>(Host(-distance))] =
          offset + (distance == 0 ? image_.at(0) : incoming_.data() + bytes * static_cast<size_t>(distance - 1));
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
  std::vector<const void*> in_order, by_site;
  for (int site = 0; site < sites(); ++site) {
    const int places = topology_.hosts_of_site(site);
    in_order.clear();
    for (int place = 1; place <= places; ++place) in_order.push_back(by_host[HostWith(site, part + place)]);
    char* const to = sites() == 1 ? image_.at(part) : by_host[HostWith(site, 0)];
    if (places > 1) image_.Reduce(part, to, in_order.data(), places, sites() == 1 ? scaling_ : Scaling{});
    by_site.push_back(to);
  }
  if (sites() > 1) image_.Reduce(part, image_.at(part), by_site.data(), sites(), scaling_);
}

}  // namespace ringtrain
