#include "gpu/nccl_task.h"

#include <utility>

#include "collectives/rows.h"

namespace ringtrain {
namespace {

// Makes what comes on `later` wait for what is on `earlier` now.
Status Follow(const std::shared_ptr<Device>& device, const Stream& earlier, const Stream& later) {
  std::shared_ptr<DeviceEvent> event;
  RT_TRY(DeviceEvent::Record(device, earlier.get(), &event));
  return event->HoldBack(later.get());
}

}  // namespace

NcclTask::NcclTask(DeviceBatch batch, const Topology& topology, NcclLane* lane)
    : work_(std::move(batch)),
      topology_(topology),
      lane_(lane),
      channel_(lane->NextChannel()),
      ticket_(lane->order->tickets++),
      schedule_(ScheduleOf(work_.batch, lane->algorithm, topology)),
      packs_(Packs(work_.batch, schedule_, lane->buffer_bytes)) {
  const Batch& agreed = work_.batch;
  if (!Find(agreed.operation)->reduces || schedule_ == Schedule::kOrdered) return;
  double before = agreed.scaling.prescale * (agreed.weights.empty() ? 1.0 : agreed.weights[topology.me]);
  double after = agreed.scaling.postscale / agreed.scaling.divisor;
  if (Find(agreed.operation)->output != Output::kSame)
    after *= std::exchange(before, 1.0);  // its output cannot hold its input
  input_factor_ = static_cast<float>(before);
  output_factor_ = static_cast<float>(after);
}

Status NcclTask::Advance(bool* moved) {
  if (phase_ == Phase::kPack) RT_TRY(Pack(moved));
  if (phase_ == Phase::kLaunch) RT_TRY(Launch(moved));
  if (phase_ != Phase::kLaunching) return {};
  for (;;) {
    if (crossing_ != nullptr) {
      RT_TRY(crossing_->Advance(moved));
      if (!crossing_->done()) return {};
      crossing_ = nullptr;
    }
    bool idle;
    RT_TRY(Idle(&idle));
    if (!idle) return {};
    *moved = true;
    if (performed_ == plan_.size()) return Finish();
    RT_TRY(Perform(plan_[performed_++]));
  }
}

Status NcclTask::Pack(bool* moved) {
  if (packs_) {
    NcclLane::Buffer& next = lane_->buffers[lane_->next_buffer];
    if (next.taken) return {};
    lane_->next_buffer = (lane_->next_buffer + 1) % lane_->buffers.size();
    buffer_ = &next;
    buffer_->taken = true;
  }
  *moved = true;
  phase_ = Phase::kLaunch;
  const Stream& first = packs_ ? *lane_->packing : *channel_.collective;
  for (const auto& event : work_.ready) RT_TRY(event->HoldBack(first.get()));
  if (!packs_) return ScaleIntoOutputs();
  if (buffer_->free != nullptr) RT_TRY(buffer_->free->HoldBack(first.get()));
  const Batch& batch = work_.batch;
  const std::vector<PackedTensor> tensors = Packed(false);
  RT_TRY(lane_->packs->Pack({batch.dtype, batch.wire(), AddressOf(buffer_->memory), &tensors, input_factor_},
                            first.get()));
  return Follow(work_.device, first, *channel_.collective);
}

// The output is the buffer: inputs are scaled into it, and it is scaled in place.
Status NcclTask::ScaleIntoOutputs() {
  if (input_factor_ == 1.0f) return {};
  for (const BatchTensor& tensor : work_.batch.tensors) {
    const std::vector<PackedTensor> whole = {{AddressOf(tensor.input), 0, ElementsOf(tensor)}};
    RT_TRY(lane_->packs->Pack({work_.batch.dtype, work_.batch.dtype, AddressOf(tensor.output), &whole, input_factor_},
                              channel_.collective->get()));
  }
  return {};
}

Status NcclTask::ScaleOutputs() {
  if (output_factor_ == 1.0f) return {};
  for (const BatchTensor& tensor : work_.batch.tensors) {
    const size_t elements = OutputBytes(work_.batch, tensor, topology_) / Bytes(work_.batch.dtype);
    const std::vector<PackedTensor> whole = {{AddressOf(tensor.output), 0, elements}};
    RT_TRY(
        lane_->packs->Unpack({work_.batch.dtype, work_.batch.dtype, AddressOf(tensor.output), &whole, output_factor_},
                             lane_->finishing->get()));
  }
  return {};
}

Status NcclTask::Launch(bool* moved) {
  if (lane_->order->launched != ticket_) return {};
  bool idle;
  RT_TRY(Idle(&idle));
  if (!idle) return {};
  *moved = true;
  phase_ = Phase::kLaunching;
  if (channel_.communicator == nullptr) return CopyAlone();
  plan_ = Plan();
  return {};
}

NcclPlan NcclTask::Plan() const {
  const Batch& batch = work_.batch;
  if (batch.operation != Operation::kAllreduce) return PlanOther(batch, topology_);
  std::vector<NcclRun> runs;
  if (packs_) {
    char* const memory = static_cast<char*>(buffer_->memory);
    runs.push_back({memory, memory, BufferedElements(), batch.wire()});
  }
  for (const BatchTensor& tensor : batch.tensors)
    if (!packs_)
      runs.push_back(
          {input_factor_ == 1.0f ? tensor.input : tensor.output, tensor.output, ElementsOf(tensor), batch.dtype});
  return PlanAllreduce(runs, schedule_, batch, lane_->ranks, channel_.room);
}

// One group whatever the calls, so that NCCL launches them as one; it is closed also after a call that has failed.
Status NcclTask::Perform(const NcclStep& step) {
  for (const SumJob& sum : step.sums) RT_TRY(lane_->sums->Sum(sum, channel_.collective->get()));
  for (const Crossing& crossing : step.crossings) RT_TRY(Cross(crossing));
  if (step.calls.empty()) return {};
  const Nccl& nccl = channel_.communicator->nccl();
  RT_TRY(Check(nccl.GroupStart(), "ncclGroupStart"));
  Status status;
  for (const NcclCall& call : step.calls)
    if (status.ok()) status = Call(call);
  const Status ended = Check(nccl.GroupEnd(), "ncclGroupEnd");
  return status.ok() ? ended : status;
}

// As a staged batch of its own. Every member makes them in the order of launches.
Status NcclTask::Cross(const Crossing& crossing) {
  DeviceBatch shard;
  shard.device = work_.device;
  shard.ready.resize(1);
  RT_TRY(DeviceEvent::Record(work_.device, channel_.collective->get(), &shard.ready[0]));
  Group* const group = lane_->across->group();
  shard.batch.reduction = work_.batch.reduction;
  shard.batch.dtype = crossing.dtype;
  shard.batch.joined.assign(group->topology.member_count(), false);
  BatchTensor tensor;
  tensor.input = tensor.output = crossing.memory;
  tensor.bytes = crossing.elements * Bytes(crossing.dtype);
  shard.batch.tensors.push_back(std::move(tensor));
  return Staged::Make(std::move(shard), group, *lane_->copies, lane_->chunk_bytes, &crossing_);
}

Status NcclTask::Call(const NcclCall& call) const {
  const Nccl& nccl = channel_.communicator->nccl();
  const ncclComm_t comm = channel_.communicator->get();
  const CUstream stream = channel_.collective->get();
  const ncclDataType_t dtype = NcclDType(call.dtype);
  const ncclRedOp_t op = NcclReduction(work_.batch.dtype, work_.batch.reduction);
  switch (call.kind) {
    case NcclCall::Kind::kAllReduce:
      return Check(nccl.AllReduce(call.from, call.to, call.elements, dtype, op, comm, stream), "ncclAllReduce");
    case NcclCall::Kind::kReduceScatter:
      return Check(nccl.ReduceScatter(call.from, call.to, call.elements, dtype, op, comm, stream), "ncclReduceScatter");
    case NcclCall::Kind::kAllGather:
      return Check(nccl.AllGather(call.from, call.to, call.elements, dtype, comm, stream), "ncclAllGather");
    case NcclCall::Kind::kBroadcast:
      return Check(nccl.Broadcast(call.from, call.to, call.elements, dtype, call.peer, comm, stream), "ncclBroadcast");
    case NcclCall::Kind::kSend:
      return Check(nccl.Send(call.from, call.elements, dtype, call.peer, comm, stream), "ncclSend");
    case NcclCall::Kind::kReceive:
      return Check(nccl.Recv(call.to, call.elements, dtype, call.peer, comm, stream), "ncclRecv");
  }
  return {};
}

// With one member every operation gives back what went in.
Status NcclTask::CopyAlone() {
  if (packs_) return {};
  const CUstream stream = channel_.collective->get();
  for (const BatchTensor& tensor : work_.batch.tensors) {
    const size_t bytes = OutputBytes(work_.batch, tensor, topology_);
    if (bytes == 0 || tensor.input == tensor.output || input_factor_ != 1.0f) continue;
    RT_TRY(work_.device->CopyWithin(AddressOf(tensor.output), AddressOf(tensor.input), bytes, stream));
  }
  return {};
}

Status NcclTask::Finish() {
  ++lane_->order->launched;
  phase_ = Phase::kDone;
  RT_TRY(Follow(work_.device, *channel_.collective, *lane_->finishing));
  if (packs_) {
    const Batch& batch = work_.batch;
    const std::vector<PackedTensor> tensors = Packed(true);
    RT_TRY(lane_->packs->Unpack({batch.dtype, batch.wire(), AddressOf(buffer_->memory), &tensors, output_factor_},
                                lane_->finishing->get()));
  } else {
    RT_TRY(ScaleOutputs());
  }
  RT_TRY(DeviceEvent::Record(work_.device, lane_->finishing->get(), &completion_));
  if (!packs_) return {};
  buffer_->free = completion_;
  buffer_->taken = false;
  return {};
}

std::vector<PackedTensor> NcclTask::Packed(bool outputs) const {
  std::vector<PackedTensor> packed;
  size_t offset = 0;
  for (const BatchTensor& tensor : work_.batch.tensors) {
    packed.push_back({AddressOf(outputs ? tensor.output : tensor.input), offset, ElementsOf(tensor)});
    offset += InBuffer(ElementsOf(tensor));
  }
  return packed;
}

// The tensors and what lies between them; more where the buffer is cut into shards, so that these are equal and begin
// alike.
size_t NcclTask::BufferedElements() const {
  size_t elements = 0;
  for (const BatchTensor& tensor : work_.batch.tensors) elements += InBuffer(ElementsOf(tensor));
  if (schedule_ == Schedule::kNccl) return elements;
  const size_t block = InBuffer(1) * static_cast<size_t>(lane_->ranks.member_count());
  return (elements + block - 1) / block * block;
}

Status NcclTask::Idle(bool* idle) const {
  *idle = true;
  return channel_.communicator == nullptr ? Status() : channel_.communicator->Poll(idle);
}

Status NcclTask::Check(ncclResult_t result, const char* what) const {
  return channel_.communicator->nccl().Check(result, what, channel_.communicator->get());
}

}  // namespace ringtrain
