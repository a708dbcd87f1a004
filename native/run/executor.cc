#include "run/executor.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "world/placement.h"

namespace ringtrain {
namespace {

// Batches of one process set that are advanced at the same time; the next one packs while the first one's tail is on
// its way.
constexpr size_t kOverlap = 2;

}  // namespace

Executor::Executor(const World& world, const Books& books, Wire& wire, HostMemory* memory, Residuals* residuals)
    : world_(world), books_(books), wire_(wire), memory_(memory), residuals_(residuals) {}

Executor::~Executor() { Plane::AbortCommunicators(Planes()); }

void Executor::AddGroup(int process_set, int lane_number, const std::vector<int>& members) {
  Lane& lane = lanes_[process_set];
  Group& group = lane.group;
  group.process_set = process_set;
  group.lane = lane_number;
  group.topology = TopologyFor(world_, books_.options, members);
  group.geometry = GeometryFor(group.topology, books_.options, world_.round_trip);
  group.round_trip = world_.round_trip;
  group.least_round_trip = world_.least_round_trip;
  group.wire = &wire_;
  group.counters = books_.counters;
  for (int member : group.topology.locals())
    if (member != group.topology.me)
      group.peers.push_back(&memory_->doorbell(world_.local_rank_of[group.RankOf(member)]));
}

void Executor::RemoveGroup(int process_set) {
  auto lane = lanes_.find(process_set);
  if (lane == lanes_.end()) return;
  const Topology& topology = lane->second.group.topology;
  if (lane->second.group.window.mapped() && topology.local_count() > 1) memory_->UnmapWindow(process_set);
  lanes_.erase(lane);
  residuals_->Forget(process_set);
}

Status Executor::MapWindow(Lane* lane) {
  Group& group = lane->group;
  const int participants = group.topology.local_count();
  HostMemory* memory = memory_;
  if (participants == 1) {
    lane->alone = OpenProcessMemory(MakeProcessHost(1), 0);
    memory = lane->alone.get();
  }
  char* window;
  const Status mapped = memory->MapWindow(group.process_set, participants, group.geometry.Bytes(participants), &window);
  if (!mapped.ok())  // which all ranks are told
    return {mapped.code(), "rank " + std::to_string(world_.rank) + ": " + mapped.message()};
  group.window = Window(window, group.geometry, participants);
  return {};
}

void Executor::SendAhead(const std::vector<PromisedBatch>& batches, Frame* promise) {
  const auto lane = lanes_.find(promise->process_set);
  if (lane == lanes_.end()) return;
  Group& group = lane->second.group;
  for (const PromisedBatch& batch : batches) {
    effect::Execute execute;
    execute.responses = batch.responses;
    execute.joined.resize(group.topology.members.size(), false);
    std::string contribution;
    if (!Execution(world_, books_, residuals_, &group, std::move(execute)).Contribute(&contribution)) continue;
    lane->second.ahead.Send(promise->schedule, batch.number, contribution, &promise->text);
    books_.counters->Add(Counter::kWireBytesSent, static_cast<int64_t>(contribution.size()));
  }
}

bool Executor::ReceiveAhead(const Frame& promise) {
  const auto lane = lanes_.find(promise.process_set);
  return lane == lanes_.end() || lane->second.ahead.Receive(promise.schedule, promise.text);
}

Status Executor::Start(int process_set, effect::Execute execute) {
  Lane& lane = lanes_.at(process_set);
  if (!lane.group.window.mapped()) RT_TRY(MapWindow(&lane));
  Ahead ahead;
  if (execute.scheduled) ahead = lane.ahead.Take(execute.schedule, execute.batch);
  lane.executions.push_back(
      std::make_unique<Execution>(world_, books_, residuals_, &lane.group, std::move(execute), std::move(ahead)));
  lane.executions.back()->Number(&lane.agreed);
  ++under_way_;
  if (!lane.executions.back()->devices().empty()) ++on_devices_;
  return PrepareInOrder(&lane);
}

// One waits for its plane to be ready, and those after it for it: each member takes its shares of the window in one
// order.
Status Executor::PrepareInOrder(Lane* lane) {
  for (; lane->prepared < lane->executions.size(); ++lane->prepared) {
    Execution& next = *lane->executions[lane->prepared];
    Plane* plane = next.devices().empty() ? nullptr : PlaneOf(next, lane);
    if (plane != nullptr && !plane->Admits()) return {};
    RT_TRY(next.Prepare(plane));
  }
  return {};
}

Plane* Executor::PlaneOf(const Execution& execution, Lane* lane) {
  std::unique_ptr<Plane>& plane = lane->planes[execution.devices()];
  if (plane == nullptr)
    plane = std::make_unique<Plane>(books_.options, &lane->group, MemberGpus{execution.devices(), execution.device()},
                                    world_, &lane->launches, books_.log);
  return plane.get();
}

bool Executor::busy(int process_set) const {
  auto lane = lanes_.find(process_set);
  return lane != lanes_.end() && !(lane->second.executions.empty() && lane->second.enqueued.empty());
}

Status Executor::Advance(bool* moved, std::vector<int>* finished) {
  for (auto& entry : lanes_) {
    auto& executions = entry.second.executions;
    if (on_devices_ > 0) RT_TRY(AdvanceDevices(&entry.second, moved));
    const size_t end = std::min(entry.second.prepared, kOverlap);
    for (size_t index = 0; index < end; ++index) RT_TRY(executions[index]->Advance(moved));
    while (entry.second.prepared > 0 && executions.front()->done()) {
      Retire(&entry.second);
      finished->push_back(entry.first);
      *moved = true;
    }
  }
  return {};
}

// The first execution's operations are done; where a GPU is still at work for them, it is looked after until that is
// done, too.
void Executor::Retire(Lane* lane) {
  std::unique_ptr<Execution> execution = std::move(lane->executions.front());
  lane->executions.pop_front();
  --lane->prepared;
  execution->Finish(&lane->counted_until);
  if (execution->completion() != nullptr) return lane->enqueued.push_back(std::move(execution));
  Forget(*execution);
}

void Executor::Forget(const Execution& execution) {
  --under_way_;
  if (!execution.devices().empty()) --on_devices_;
}

Status Executor::AdvanceDevices(Lane* lane, bool* moved) {
  for (auto& plane : lane->planes) RT_TRY(plane.second->Advance(moved));
  if (lane->prepared < lane->executions.size()) RT_TRY(PrepareInOrder(lane));
  while (!lane->enqueued.empty()) {
    Execution& oldest = *lane->enqueued.front();
    bool passed = false;
    RT_TRY(oldest.LookAtDevice(&lane->counted_until, &passed));
    if (!passed) return {};
    Forget(oldest);
    lane->enqueued.pop_front();
    *moved = true;
  }
  return {};
}

void Executor::TakeEnded(Lane* lane) {
  auto& enqueued = lane->enqueued;
  enqueued.erase(std::remove_if(enqueued.begin(), enqueued.end(),
                                [lane](const auto& execution) { return execution->EndedBefore(&lane->counted_until); }),
                 enqueued.end());
}

std::vector<Plane*> Executor::Planes() const {
  std::vector<Plane*> planes;
  for (const auto& lane : lanes_)
    for (const auto& plane : lane.second.planes) planes.push_back(plane.second.get());
  return planes;
}

// What is done must be told from what an abort will end, so that is looked at before. Nothing may be written any more
// when owners hear that they have their memory back.
void Executor::Abandon(const Status& cause) {
  const std::vector<Plane*> planes = Planes();
  for (auto& lane : lanes_) TakeEnded(&lane.second);
  Plane::AbortCommunicators(planes);
  for (Plane* plane : planes) plane->Abandon();
  for (auto& lane : lanes_)
    for (const auto& execution : lane.second.enqueued) execution->Lose(cause);
}

}  // namespace ringtrain
