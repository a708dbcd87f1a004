#include "gpu/plane.h"

namespace ringtrain {
namespace {

// NCCL asks for few of a GPU's processors where ranks share it: each waits for the others' kernels.
constexpr int kSharedCtas = 4;

}  // namespace

Plane::Plane(const Options& options, Group* group, const std::vector<int64_t>& devices, std::shared_ptr<Device> device,
             const World& world, LaunchOrder* order, Log* log)
    : options_(options), group_(group), device_(std::move(device)), world_(world), log_(log) {
  lane_.order = order;
  lane_.device = device_;
  switch (OpeningOf(options.gpu_plane, group->process_set, devices)) {
    case Opening::kStaged: break;
    case Opening::kAlone: way_ = Way::kNccl; break;
    case Opening::kMeet: Meet(); break;
  }
}

Plane::~Plane() {
  if (device_ == nullptr) return;
  InContext current(*device_);
  if (lane_.communicator != nullptr) lane_.communicator->Abort();
  // What a stream still holds uses memory that goes now.
  for (const std::unique_ptr<Stream>* stream : {&copies_.to_host, &copies_.to_device, &lane_.packing, &lane_.collective, &lane_.finishing})
    if (*stream != nullptr) device_->driver().StreamSynchronize((*stream)->get());
  copies_ = {};
  Device::Free(device_->index(), allocated_);
  lane_ = {};
}

// ---- meeting ----

GpuFacts Plane::Facts() {
  GpuFacts facts;
  facts.bus = device_->bus();
  const Nccl* nccl = nullptr;
  Status status = Nccl::Open(options_.nccl_lib, &nccl);
  if (status.ok()) {
    facts.nccl_version = nccl->version;
    if (group_->topology.me == 0) status = MakeUniqueId(*nccl, &facts.unique_id);
  }
  if (!status.ok()) facts.nccl_version = 0;
  facts.problem = status.message();
  return facts;
}

void Plane::Meet() {
  told_ = Facts().Encode();
  const int members = group_->topology.member_count();
  heard_.resize(told_.size() * members);
  Batch batch;
  batch.operation = Operation::kAllgather;
  batch.joined.assign(members, false);
  BatchTensor tensor;
  tensor.input = told_.data();
  tensor.output = heard_.data();
  tensor.bytes = tensor.row_bytes = told_.size();
  tensor.rows.assign(members, 1);
  batch.tensors.push_back(std::move(tensor));
  meeting_ = ringtrain::MakeTask(std::move(batch), group_, nullptr);
  state_ = State::kMeeting;
}

Status Plane::Choose() {
  std::vector<GpuFacts> facts(group_->topology.member_count());
  for (size_t member = 0; member < facts.size(); ++member)
    if (!GpuFacts::Decode(heard_.substr(member * GpuFacts::kBytes, GpuFacts::kBytes), &facts[member]))
      return Status::Internal("the facts about the GPU of rank " + std::to_string(group_->RankOf(static_cast<int>(member))) +
                              " cannot be read.");
  std::string reason;
  state_ = State::kReady;
  refusal_ = ChooseWay(options_, group_->topology, facts, &way_, &reason);
  if (!reason.empty() && refusal_.ok() && group_->topology.me == 0)
    log_->Info("tensors on GPUs are exchanged through the host: " + reason);
  return way_ == Way::kNccl && refusal_.ok() ? OpenNccl(facts) : Status();
}

// ---- opening ----

Status Plane::OpenNccl(const std::vector<GpuFacts>& facts) {
  const Nccl* nccl;
  RT_TRY(Nccl::Open(options_.nccl_lib, &nccl));
  if (group_->topology.me == 0) log_->Info("tensors on GPUs are exchanged by NCCL " + nccl->VersionText() + " from " + nccl->path);
  InContext current(*device_);
  state_ = State::kOpening;
  if (options_.gpu_timeout_seconds > 0) open_by_ = DeadlineAfter(options_.gpu_timeout_seconds);
  return Communicator::Begin(*nccl, group_->topology.member_count(), facts[0].unique_id, group_->topology.me,
                             ShareGpu(group_->topology, facts) ? kSharedCtas : 0, &lane_.communicator);
}

Status Plane::AdvanceOpening(bool* moved) {
  bool open;
  RT_TRY(lane_.communicator->Poll(&open));
  if (open) {
    state_ = State::kReady;
    *moved = true;
  } else if (Now() > open_by_) {
    return Status::Timeout("NCCL: expected the communicator to open within gpu_timeout_seconds but it did not. See whether the ranks' "
                           "hosts reach each other.");
  }
  return {};
}

Status Plane::Advance(bool* moved) {
  if (device_ == nullptr) return {};
  if (state_ == State::kMeeting) {
    RT_TRY(meeting_->Advance(moved));
    if (!meeting_->done()) return {};
    meeting_ = nullptr;
    RT_TRY(Explain(Choose()));
  }
  if (lane_.communicator == nullptr) return {};
  InContext current(*device_);
  if (state_ == State::kOpening) return Explain(AdvanceOpening(moved));
  bool idle;
  return Explain(lane_.communicator->Poll(&idle));
}

void Plane::Abandon() {
  if (lane_.communicator == nullptr) return;
  InContext current(*device_);
  lane_.communicator->Abort();
}

Status Plane::Explain(const Status& status) const {
  if (status.ok()) return status;
  return {status.code(), status.message() + " This is rank " + std::to_string(world_.rank) + " on " + world_.host_names[world_.rank] + ", " +
                             device_->Text() + "; NCCL_DEBUG=WARN tells more."};
}

// ---- tasks ----

Status Plane::MakeTask(DeviceBatch batch, std::unique_ptr<DeviceTask>* task) {
  if (way_ == Way::kNccl && NcclCan(batch.batch)) {
    RT_TRY(OpenLane());
    *task = std::make_unique<NcclTask>(std::move(batch), group_->topology, &lane_);
    return {};
  }
  RT_TRY(OpenCopies());
  return Staged::Make(std::move(batch), group_, copies_, static_cast<size_t>(options_.device_chunk_bytes), task);
}

Status Plane::OpenLane() {
  if (lane_.kernels != nullptr) return {};
  for (std::unique_ptr<Stream>* stream : {&lane_.packing, &lane_.collective, &lane_.finishing}) RT_TRY(Stream::Make(device_, stream));
  RT_TRY(OpenBuffers());
  return PackKernels::Load(device_->driver(), device_->handle(), &lane_.kernels);
}

Status Plane::OpenBuffers() {
  const size_t bytes = static_cast<size_t>(options_.fusion_threshold_bytes) / 1024 * 1152;  // with what lies between the tensors
  lane_.buffer_bytes = bytes;
  if (bytes == 0) return {};
  void* memory = nullptr;
  if (lane_.communicator != nullptr && lane_.communicator->CanRegister()) {
    RT_TRY(lane_.communicator->AllocateRegistered(NcclLane::kBuffers * bytes, &memory));
  } else {
    RT_TRY(device_->Allocate(NcclLane::kBuffers * bytes, &allocated_));
    memory = allocated_;
  }
  for (NcclLane::Buffer& buffer : lane_.buffers) {
    buffer.memory = memory;
    memory = static_cast<char*>(memory) + bytes;
  }
  return {};
}

Status Plane::OpenCopies() {
  if (device_ == nullptr || copies_.to_host != nullptr) return {};
  RT_TRY(Stream::Make(device_, &copies_.to_host));
  return Stream::Make(device_, &copies_.to_device);
}

}  // namespace ringtrain
