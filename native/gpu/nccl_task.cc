#include "gpu/nccl_task.h"

#include <utility>

#include "gpu/choice.h"
#include "gpu/staging_plan.h"

namespace ringtrain {
namespace {

constexpr ncclDataType_t kBytesOnly = 1;  // ncclUint8

CUdeviceptr AddressOf(const void* memory) { return reinterpret_cast<CUdeviceptr>(memory); }

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
      ticket_(lane->order->tickets++),
      packs_(Packs(work_.batch, lane->buffer_bytes)) {
  const Batch& agreed = work_.batch;
  if (!Find(agreed.operation)->reduces) return;
  double before = agreed.scaling.prescale * (agreed.weights.empty() ? 1.0 : agreed.weights[topology.me]);
  double after = agreed.scaling.postscale / agreed.scaling.divisor;
  if (agreed.operation == Operation::kReducescatter) after *= std::exchange(before, 1.0);  // its output cannot hold its input
  input_factor_ = static_cast<float>(before);
  output_factor_ = static_cast<float>(after);
}

Status NcclTask::Advance(bool* moved) {
  if (phase_ == Phase::kPack) RT_TRY(Pack(moved));
  if (phase_ == Phase::kLaunch) RT_TRY(Launch(moved));
  if (phase_ != Phase::kLaunching) return {};
  bool idle = true;
  if (lane_->communicator != nullptr) RT_TRY(lane_->communicator->Poll(&idle));
  if (!idle) return {};
  *moved = true;
  return Finish();
}

Status NcclTask::Pack(bool* moved) {
  if (packs_) {
    NcclLane::Buffer& next = lane_->buffers[lane_->next_buffer];
    if (next.taken) return {};
    lane_->next_buffer = (lane_->next_buffer + 1) % NcclLane::kBuffers;
    buffer_ = &next;
    buffer_->taken = true;
  }
  *moved = true;
  phase_ = Phase::kLaunch;
  const Stream& first = packs_ ? *lane_->packing : *lane_->collective;
  for (const auto& event : work_.ready) RT_TRY(event->HoldBack(first.get()));
  if (!packs_) return ScaleIntoOutputs();
  if (buffer_->free != nullptr) RT_TRY(buffer_->free->HoldBack(first.get()));
  const Batch& batch = work_.batch;
  const std::vector<PackedTensor> tensors = Packed(false);
  RT_TRY(lane_->kernels->Pack({batch.dtype, batch.wire, AddressOf(buffer_->memory), &tensors, input_factor_}, first.get()));
  return Follow(work_.device, first, *lane_->collective);
}

// The output is the buffer: inputs are scaled into it, and it is scaled in place.
Status NcclTask::ScaleIntoOutputs() {
  if (input_factor_ == 1.0f) return {};
  for (const BatchTensor& tensor : work_.batch.tensors) {
    const std::vector<PackedTensor> whole = {{AddressOf(tensor.input), 0, ElementsOf(tensor)}};
    RT_TRY(lane_->kernels->Pack({work_.batch.dtype, work_.batch.dtype, AddressOf(tensor.output), &whole, input_factor_},
                                lane_->collective->get()));
  }
  return {};
}

Status NcclTask::ScaleOutputs() {
  if (output_factor_ == 1.0f) return {};
  for (const BatchTensor& tensor : work_.batch.tensors) {
    const size_t elements = OutputBytes(work_.batch, tensor, topology_) / Bytes(work_.batch.dtype);
    const std::vector<PackedTensor> whole = {{AddressOf(tensor.output), 0, elements}};
    RT_TRY(lane_->kernels->Unpack({work_.batch.dtype, work_.batch.dtype, AddressOf(tensor.output), &whole, output_factor_},
                                  lane_->finishing->get()));
  }
  return {};
}

Status NcclTask::Launch(bool* moved) {
  if (lane_->order->launched != ticket_) return {};
  if (lane_->communicator != nullptr) {
    bool idle;
    RT_TRY(lane_->communicator->Poll(&idle));
    if (!idle) return {};
  }
  *moved = true;
  phase_ = Phase::kLaunching;
  return lane_->communicator == nullptr ? CopyAlone() : Exchange();
}

// One group call whatever the batch, so that NCCL launches it as one.
Status NcclTask::Exchange() {
  const Nccl& nccl = lane_->communicator->nccl();
  RT_TRY(Check(nccl.GroupStart(), "ncclGroupStart"));
  Status status;
  switch (work_.batch.operation) {
    case Operation::kAllreduce: status = ReduceTensors(); break;
    case Operation::kBroadcast: status = BroadcastTensors(); break;
    case Operation::kAllgather: status = GatherTensors(); break;
    case Operation::kReducescatter: status = ScatterTensors(); break;
    default: status = ExchangeRows(); break;
  }
  const Status ended = Check(nccl.GroupEnd(), "ncclGroupEnd");
  return status.ok() ? ended : status;
}

Status NcclTask::ReduceTensors() {
  if (packs_) {
    size_t elements = 0;
    for (const BatchTensor& tensor : work_.batch.tensors) elements += InBuffer(ElementsOf(tensor));
    return Reduce(buffer_->memory, buffer_->memory, elements, work_.batch.wire);
  }
  for (const BatchTensor& tensor : work_.batch.tensors)
    RT_TRY(Reduce(input_factor_ == 1.0f ? tensor.input : tensor.output, tensor.output, ElementsOf(tensor), work_.batch.dtype));
  return {};
}

Status NcclTask::Reduce(const void* from, void* to, size_t elements, DType dtype) {
  if (elements == 0) return {};
  const Batch& batch = work_.batch;
  const Communicator& communicator = *lane_->communicator;
  return Check(communicator.nccl().AllReduce(from, to, elements, NcclDType(dtype), NcclReduction(batch.dtype, batch.reduction),
                                             communicator.get(), lane_->collective->get()),
               "ncclAllReduce");
}

Status NcclTask::BroadcastTensors() {
  const Communicator& communicator = *lane_->communicator;
  for (const BatchTensor& tensor : work_.batch.tensors) {
    if (tensor.bytes == 0) continue;
    RT_TRY(Check(communicator.nccl().Broadcast(tensor.input, tensor.output, tensor.bytes, kBytesOnly, work_.batch.root,
                                               communicator.get(), lane_->collective->get()),
                 "ncclBroadcast"));
  }
  return {};
}

// Where rows differ between members, a broadcast from each, which NCCL launches together.
Status NcclTask::GatherTensors() {
  const Communicator& communicator = *lane_->communicator;
  for (const BatchTensor& tensor : work_.batch.tensors) {
    char* to = tensor.output;
    if (EvenRows(tensor)) {
      const size_t bytes = tensor.rows[0] * tensor.row_bytes;
      if (bytes == 0) continue;
      RT_TRY(Check(communicator.nccl().AllGather(tensor.input, to, bytes, kBytesOnly, communicator.get(), lane_->collective->get()),
                   "ncclAllGather"));
      continue;
    }
    for (int member = 0; member < topology_.member_count(); ++member) {
      const size_t bytes = tensor.rows[member] * tensor.row_bytes;
      if (bytes == 0) continue;
      const char* from = member == topology_.me ? tensor.input : to;
      RT_TRY(Check(communicator.nccl().Broadcast(from, to, bytes, kBytesOnly, member, communicator.get(), lane_->collective->get()),
                   "ncclBroadcast"));
      to += bytes;
    }
  }
  return {};
}

Status NcclTask::ScatterTensors() {
  const Batch& batch = work_.batch;
  const Communicator& communicator = *lane_->communicator;
  for (const BatchTensor& tensor : batch.tensors) {
    const size_t elements = OutputBytes(batch, tensor, topology_) / Bytes(batch.dtype);
    if (elements == 0) continue;
    RT_TRY(Check(communicator.nccl().ReduceScatter(tensor.input, tensor.output, elements, NcclDType(batch.dtype),
                                                   NcclReduction(batch.dtype, batch.reduction), communicator.get(),
                                                   lane_->collective->get()),
                 "ncclReduceScatter"));
  }
  return {};
}

Status NcclTask::ExchangeRows() {
  const Communicator& communicator = *lane_->communicator;
  const Nccl& nccl = communicator.nccl();
  const CUstream stream = lane_->collective->get();
  const int members = topology_.member_count(), me = topology_.me;
  for (const BatchTensor& tensor : work_.batch.tensors) {
    const char* from = tensor.input;
    char* to = tensor.output;
    for (int peer = 0; peer < members; ++peer) {
      const size_t sent = tensor.rows[me * members + peer] * tensor.row_bytes;
      const size_t received = tensor.rows[peer * members + me] * tensor.row_bytes;
      if (sent > 0) RT_TRY(Check(nccl.Send(from, sent, kBytesOnly, peer, communicator.get(), stream), "ncclSend"));
      if (received > 0) RT_TRY(Check(nccl.Recv(to, received, kBytesOnly, peer, communicator.get(), stream), "ncclRecv"));
      from += sent;
      to += received;
    }
  }
  return {};
}

// With one member every operation gives back what went in.
Status NcclTask::CopyAlone() {
  if (packs_) return {};
  const CUstream stream = lane_->collective->get();
  for (const BatchTensor& tensor : work_.batch.tensors) {
    const size_t bytes = OutputBytes(work_.batch, tensor, topology_);
    if (bytes == 0 || tensor.input == tensor.output || input_factor_ != 1.0f) continue;
    RT_TRY(work_.device->Check(work_.device->driver().MemcpyDtoDAsync(AddressOf(tensor.output), AddressOf(tensor.input), bytes, stream),
                               "cuMemcpyDtoDAsync"));
  }
  return {};
}

Status NcclTask::Finish() {
  ++lane_->order->launched;
  phase_ = Phase::kDone;
  RT_TRY(Follow(work_.device, *lane_->collective, *lane_->finishing));
  if (packs_) {
    const Batch& batch = work_.batch;
    const std::vector<PackedTensor> tensors = Packed(true);
    RT_TRY(lane_->kernels->Unpack({batch.dtype, batch.wire, AddressOf(buffer_->memory), &tensors, output_factor_},
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

Status NcclTask::Check(ncclResult_t result, const char* what) const {
  return lane_->communicator->nccl().Check(result, what, lane_->communicator->get());
}

}  // namespace ringtrain
