#include "gpu/nccl_opening.h"

#include <algorithm>

namespace ringtrain {
namespace {

constexpr size_t kPage = 4096;          // of which memory that becomes a window is a multiple
constexpr size_t kLeastRoom = 4 << 20;  // where fusion is off, or small
constexpr size_t kLargestElement = 8;

size_t WholePages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

}  // namespace

NcclOpening::NcclOpening(NcclLane* lane, int communicators)
    : lane_(lane), members_(lane->ranks.member_count()), me_(lane->ranks.me) {
  const size_t channels = members_ > 1 ? static_cast<size_t>(communicators) : 1;
  lane_->channels.resize(channels);
  lane_->buffers.resize(channels + 1);
  for (size_t channel = 1; channel < channels; ++channel) steps_.push_back([this, channel] { return Split(channel); });
  steps_.push_back([this] { return OpenMemory(); });
  for (size_t channel = 0; channel < channels; ++channel) {
    steps_.push_back([this, channel] { return MakeWindow(channel); });
    steps_.push_back([this, channel] { return Register(channel); });
  }
}

Status NcclOpening::Begin(const Nccl& nccl, const std::string& unique_id, int most_ctas) {
  RT_TRY(OpenKernels());
  return Communicator::Begin(nccl, members_, unique_id, me_, most_ctas, &lane_->channels[0].communicator);
}

Status NcclOpening::Advance(bool* open) {
  bool idle;
  RT_TRY(lane_->Poll(&idle));
  *open = idle && taken_ == steps_.size();
  return idle && !*open ? steps_[taken_++]() : Status();
}

Status NcclOpening::Split(size_t channel) {
  return Communicator::BeginSplit(*lane_->channels[0].communicator, me_, &lane_->channels[channel].communicator);
}

Status NcclOpening::OpenKernels() {
  for (std::unique_ptr<Stream>* stream : {&lane_->packing, &lane_->finishing})
    RT_TRY(Stream::Make(lane_->device, stream));
  for (NcclLane::Channel& channel : lane_->channels) RT_TRY(Stream::Make(lane_->device, &channel.collective));
  const CUstream stream = lane_->packing->get();
  RT_TRY(lane_->device->FindPacks(stream, &lane_->packs));
  return lane_->sums_by_itself() ? lane_->device->FindSums(stream, &lane_->sums) : Status();
}

// The buffers are one piece of memory, of NCCL's where it can know it.
Status NcclOpening::OpenMemory() {
  for (NcclLane::Channel& channel : lane_->channels) {
    if (!lane_->sums_by_itself()) continue;
    channel.room.bytes = std::max(lane_->buffer_bytes, kLeastRoom);
    RT_TRY(DeviceMemory::Take(lane_->device, channel.room.bytes, &channel.room_memory));
    channel.room.memory = channel.room_memory->get();
  }
  if (lane_->buffer_bytes == 0) return {};
  const size_t each = WholePages(lane_->buffer_bytes + static_cast<size_t>(members_) * InBuffer(1) * kLargestElement);
  const size_t bytes = each * lane_->buffers.size();
  const Communicator* first = lane_->channels[0].communicator.get();
  // Where kernels of ours add, tensors and the room are sent and received, too. NCCL takes registered memory only where
  // all that an operation reaches on its ranks is.
  if (first != nullptr && first->CanRegister() && !lane_->sums_by_itself())
    RT_TRY(NcclMemory::Allocate(first->nccl(), bytes, &lane_->registered));
  else
    RT_TRY(DeviceMemory::Take(lane_->device, bytes, &lane_->unregistered));
  char* memory = lane_->registered != nullptr ? lane_->registered->get() : lane_->unregistered->get();
  for (NcclLane::Buffer& buffer : lane_->buffers) {
    buffer.memory = memory;
    memory += each;
  }
  return {};
}

Status NcclOpening::MakeWindow(size_t channel) {
  if (lane_->registered == nullptr) return {};
  return lane_->channels[channel].communicator->BeginWindow(*lane_->registered);
}

// Where NCCL has not made a window of it, which it need not.
Status NcclOpening::Register(size_t channel) {
  if (lane_->registered == nullptr || lane_->channels[channel].communicator->has_window()) return {};
  return lane_->channels[channel].communicator->Register(*lane_->registered);
}

}  // namespace ringtrain
