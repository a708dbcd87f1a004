#include "gpu/plane.h"

namespace ringtrain {
namespace {

// NCCL asks for few of a GPU's processors where ranks share it: each waits for the others' kernels.
constexpr int kSharedCtas = 4;

constexpr int kOldestCapability = 75;  // that of the oldest PTX

std::vector<int> Ranks(const std::vector<int>& members, const std::vector<int>& rank_of) {
  std::vector<int> ranks;
  for (int member : members) ranks.push_back(rank_of[member]);
  return ranks;
}

constexpr int64_t kPieceBytes = int64_t{4} << 20, kLeastPieceBytes = 4096;

// Of tensors that cross by pinned host memory, in which four pieces are under way.
size_t PieceBytes(const Options& options) {
  return static_cast<size_t>(options.chunk_bytes > 0 ? std::max(options.chunk_bytes, kLeastPieceBytes) : kPieceBytes);
}

// With what lies between the tensors.
size_t FusionBufferBytes(const Options& options) {
  return static_cast<size_t>(options.fusion_threshold_bytes) / 1024 * 1152;
}

}  // namespace

Plane::Plane(const Options& options, Group* group, MemberGpus gpus, const World& world, LaunchOrder* order, Log* log)
    : options_(options),
      group_(group),
      device_(std::move(gpus.mine)),
      world_(world),
      log_(log),
      within_hosts_(WithinHosts(options.nccl_algorithm, group->topology)) {
  lane_.device = device_;
  lane_.algorithm = options.nccl_algorithm;
  lane_.order = order;
  switch (OpeningOf(options.gpu_plane, group->process_set, gpus.of_all)) {
    case Opening::kStaged:
      break;
    case Opening::kAlone:
      way_ = HasKernels().ok() ? Way::kNccl : Way::kStaged;
      break;
    case Opening::kMeet:
      Meet(Facts().Encode());
      state_ = State::kMeeting;
      break;
  }
}

// What a stream still holds uses memory that goes now.
Plane::~Plane() {
  if (device_ == nullptr) return;
  if (!Abandon()) LeaveToDevice();
  InContext current(*device_);
  opening_ = nullptr;
  copies_ = {};
  lane_ = {};
}

// The GPU hangs, and to give anything of it back would wait for it.
void Plane::LeaveToDevice() {
  device_->Hangs();
  [[maybe_unused]] const auto* const copies = new CopyStreams(std::move(copies_));
  [[maybe_unused]] const auto* const lane = new NcclLane(std::move(lane_));
}

// ---- meeting ----

GpuFacts Plane::Facts() {
  GpuFacts facts;
  facts.buffer_bytes = FusionBufferBytes(options_);
  facts.bus = device_->bus();
  const Nccl* nccl = nullptr;
  Status status = HasKernels();
  if (status.ok()) status = Nccl::Open(options_.nccl_lib, &nccl);
  if (status.ok()) {
    facts.nccl_version = nccl->version;
    if (FirstOfRanks() == group_->topology.me) status = MakeUniqueId(*nccl, &facts.unique_id);
  }
  if (!status.ok()) facts.nccl_version = 0;
  facts.problem = status.message();
  return facts;
}

// Whether those that are packed into the library run on this GPU.
Status Plane::HasKernels() const {
  const int capability = device_->compute_capability();
  if (capability >= kOldestCapability) return {};
  const auto text = [](int number) { return std::to_string(number / 10) + "." + std::to_string(number % 10); };
  return Status::Unsupported("beside NCCL a GPU must have compute capability " + text(kOldestCapability) +
                             " or newer, but " + device_->Text() + " has " + text(capability) + ".");
}

void Plane::Meet(std::string told) {
  told_ = std::move(told);
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
}

Status Plane::Choose() {
  std::vector<GpuFacts> facts(group_->topology.member_count());
  for (size_t member = 0; member < facts.size(); ++member)
    if (!GpuFacts::Decode(heard_.substr(member * GpuFacts::kBytes, GpuFacts::kBytes), &facts[member]))
      return Status::Internal("the facts about the GPU of rank " +
                              std::to_string(group_->RankOf(static_cast<int>(member))) + " cannot be read.");
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
  beside_ = options_.nccl_opening == "beside";
  if (group_->topology.me == 0)
    log_->Info("tensors on GPUs are exchanged by NCCL " + nccl->VersionText() + " from " + nccl->path +
               (beside_ ? ", and through the host until that is open" : ""));
  InContext current(*device_);
  state_ = beside_ ? State::kReady : State::kOpening;
  if (beside_) way_ = Way::kStaged;
  if (options_.gpu_timeout_seconds > 0) open_by_ = DeadlineAfter(options_.gpu_timeout_seconds);
  lane_.buffer_bytes = facts[0].buffer_bytes;
  lane_.ranks = group_->topology;
  if (within_hosts_) RT_TRY(OpenAcross());
  opening_ = std::make_unique<NcclOpening>(&lane_, static_cast<int>(options_.nccl_communicators));
  const Status begun =
      opening_->Begin(*nccl, facts[FirstOfRanks()].unique_id, ShareGpu(group_->topology, facts) ? kSharedCtas : 0);
  if (!beside_ || begun.ok()) return begun;
  FailBeside(begun);
  return {};
}

// The member whose unique id opens this member's communicator.
int Plane::FirstOfRanks() const { return within_hosts_ ? group_->topology.locals()[0] : 0; }

Status Plane::OpenAcross() {
  const Topology& set = group_->topology;
  lane_.ranks = MakeTopology(Ranks(set.locals(), set.members), set.members[set.me], std::vector<int>(world_.size, 0));
  RT_TRY(OpenCopies());
  lane_.copies = &copies_;
  lane_.chunk_bytes = PieceBytes(options_);
  return CrossGroup::Open(*group_, options_, &lane_.across);
}

// With one member there is nobody to wait for.
Status Plane::OpenAlone() {
  lane_.buffer_bytes = FusionBufferBytes(options_);
  lane_.ranks = group_->topology;
  NcclOpening opening(&lane_, 1);
  RT_TRY(opening.OpenKernels());
  for (bool open = false; !open;) RT_TRY(opening.Advance(&open));
  return {};
}

Status Plane::AdvanceOpening(bool* moved) {
  bool open;
  RT_TRY(opening_->Advance(&open));
  if (open) {
    opening_ = nullptr;
    if (state_ == State::kOpening) state_ = State::kReady;
    *moved = true;
  } else if (Now() > open_by_) {
    return Status::Timeout(
        "NCCL: expected the communicator to open within gpu_timeout_seconds but it did not. See whether the ranks' "
        "hosts reach each other." +
        lane_.channels[0].communicator->nccl().NetworkText());
  }
  return {};
}

Status Plane::Advance(bool* moved) {
  if (device_ == nullptr) return {};
  if (meeting_ != nullptr) {
    RT_TRY(meeting_->Advance(moved));
    if (meeting_->done()) {
      meeting_ = nullptr;
      if (state_ == State::kAsking)
        ChangeOver();
      else
        RT_TRY(Explain(Choose()));
    } else if (state_ == State::kMeeting) {
      return {};
    }
  }
  if (lane_.channels.empty()) return {};
  InContext current(*device_);
  if (opening_ != nullptr && beside_) AdvanceBeside(moved);
  if (state_ == State::kOpening) return Explain(AdvanceOpening(moved));
  if (way_ == Way::kStaged) return {};
  bool idle;
  return Explain(lane_.Poll(&idle));
}

// ---- opening beside tasks ----

bool Plane::Admits() {
  if (state_ != State::kReady) return false;
  if (!beside_) return true;
  if (admitted_++ < kBatchesToAsk) return true;
  Meet(std::string(1, OpeningIs()));
  state_ = State::kAsking;
  return false;
}

Plane::Answer Plane::OpeningIs() const {
  if (!failure_.empty()) return kFailed;
  return opening_ == nullptr ? kOpen : kNotYet;
}

void Plane::ChangeOver() {
  state_ = State::kReady;
  admitted_ = 0;
  if (heard_.find(kFailed) != std::string::npos) return GiveUpNccl();
  if (heard_.find(kNotYet) != std::string::npos) return;
  beside_ = false;
  way_ = Way::kNccl;
  if (group_->topology.me == 0) log_->Info("tensors on GPUs are exchanged by NCCL from now on");
}

// A failure here must not end what goes on through the host: the others hear of it when they ask next.
void Plane::AdvanceBeside(bool* moved) {
  const Status status = AdvanceOpening(moved);
  if (!status.ok()) FailBeside(status);
}

void Plane::FailBeside(const Status& status) {
  failure_ = Explain(status).message();
  opening_ = nullptr;
}

void Plane::GiveUpNccl() {
  beside_ = false;
  if (!failure_.empty())
    log_->Warning("tensors on GPUs go on through the host, since NCCL could not be opened: " + failure_);
  if (options_.gpu_plane == "nccl")
    refusal_ =
        Status::Unsupported("NCCL could not be opened on all ranks, as gpu_plane=nccl asks. Their logs say why.");
  opening_ = nullptr;
  InContext current(*device_);
  lane_.Abort();
}

void Plane::AbortCommunicators(const std::vector<Plane*>& planes) {
  const Device* device = nullptr;
  std::vector<Communicator*> all;
  for (const Plane* plane : planes) {
    if (plane->device_ == nullptr) continue;
    device = plane->device_.get();
    plane->lane_.AddCommunicators(&all);
  }
  if (all.empty()) return;
  InContext current(*device);  // NCCL knows where each is
  Communicator::Abort(all);
}

bool Plane::Abandon() {
  if (device_ == nullptr) return true;
  InContext current(*device_);
  const bool ended = lane_.Abort();
  return AwaitEnds(device_, {copies_.to_host.get(), copies_.to_device.get()}) && ended;
}

Status Plane::Explain(const Status& status) const {
  if (status.ok()) return status;
  return {status.code(), status.message() + " This is rank " + std::to_string(world_.rank) + " on " +
                             world_.host_names[world_.rank] + ", " + device_->Text() + "."};
}

// ---- tasks ----

Status Plane::MakeTask(DeviceBatch batch, std::unique_ptr<DeviceTask>* task) {
  if (way_ == Way::kNccl && NcclCan(batch.batch, options_.nccl_algorithm, group_->topology)) {
    if (lane_.channels.empty()) RT_TRY(OpenAlone());
    *task = std::make_unique<NcclTask>(std::move(batch), group_->topology, &lane_);
    return {};
  }
  RT_TRY(OpenCopies());
  return Staged::Make(std::move(batch), group_, copies_, PieceBytes(options_), task);
}

Status Plane::OpenCopies() {
  if (device_ == nullptr || copies_.to_host != nullptr) return {};
  RT_TRY(Stream::Make(device_, &copies_.to_host));
  return Stream::Make(device_, &copies_.to_device);
}

}  // namespace ringtrain
