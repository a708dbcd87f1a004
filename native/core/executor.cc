#include "core/executor.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace ringtrain {
namespace {

// Batches of one process set that are advanced at the same time; the next one packs while the first one's tail is on its way.
constexpr size_t kOverlap = 2;

constexpr size_t kOutputAlignment = 64;

void* AllocateAligned(size_t bytes) {
  void* memory = nullptr;
  return posix_memalign(&memory, kOutputAlignment, std::max(bytes, kOutputAlignment)) == 0 ? memory : nullptr;
}

}  // namespace

Topology TopologyFor(const World& world, const Options& options, const std::vector<int>& members) {
  std::vector<int> host_of = world.host_of;
  if (options.algorithm == "ring") std::iota(host_of.begin(), host_of.end(), 0);  // every rank is a host of its own
  return MakeTopology(members, world.rank, host_of);
}

WindowGeometry GeometryFor(const Topology& topology, const Options& options) {
  return MakeGeometry(topology, static_cast<size_t>(options.chunk_bytes), static_cast<size_t>(options.shared_memory_bytes));
}

// One batch under way: the operations in it, and the tasks that move them (several if a group mixes dtypes).
class Executor::Execution : public StageObserver {
 public:
  Execution(Executor* executor, Group* group, const effect::Execute& execute)
      : executor_(executor), group_(group), responses_(execute.responses), joined_(execute.joined), agreed_(Now()) {}

  Status Prepare() {
    for (const Response& response : responses_) RT_TRY(AddOperation(response));
    Counters& counters = *executor_->counters_;
    counters.Add(Counter::kBatches, 1);
    if (responses_.size() > 1) counters.Add(Counter::kFusedOperations, static_cast<int64_t>(responses_.size()));
    const bool observed = executor_->timeline_->enabled();
    if (observed) observed_.resize(responses_.size());
    for (auto& batch : batches_) tasks_.push_back(MakeTask(std::move(batch.batch), group_, observed ? this : nullptr));
    return {};
  }

  Status Advance(bool* moved) {
    for (auto& task : tasks_)
      if (!task->done()) RT_TRY(task->Advance(moved));
    return {};
  }

  bool done() const {
    return std::all_of(tasks_.begin(), tasks_.end(), [](const std::unique_ptr<Task>& task) { return task->done(); });
  }

  void Finish() {
    for (size_t index = 0; index < responses_.size(); ++index) {
      const std::shared_ptr<Submission>& submission = submissions_[index];
      if (submission == nullptr) continue;
      executor_->counters_->Add(Counter::kOperations, 1);
      executor_->counters_->Add(Counter::kBytes, static_cast<int64_t>(submission->request.bytes()));
      if (!observed_.empty()) WriteSpans(*submission, observed_[index]);
      executor_->table_->Finish(submission, Status());
    }
  }

  void OnStage(Stage stage, int tensor, int64_t begin, int64_t end, size_t bytes) override {
    Span& span = observed_[operation_of_tensor_[tensor]].stages[static_cast<int>(stage)];
    if (span.begin == 0) span.begin = begin;
    span.end = std::max(span.end, end);
    span.bytes += static_cast<int64_t>(bytes);
  }

 private:
  struct DTypeBatch {
    DType dtype;
    Batch batch;
  };
  struct Span {
    int64_t begin = 0, end = 0, bytes = 0;
  };
  struct Observed {
    Span stages[kStageCount];
  };

  int members() const { return group_->topology.member_count(); }
  int me() const { return group_->topology.me; }

  Status AddOperation(const Response& response) {
    const Request& request = response.request;
    std::shared_ptr<Submission> submission = executor_->table_->Find(group_->process_set, request.name);
    if (joined_[me()]) submission = nullptr;
    submissions_.push_back(submission);
    const int operation = static_cast<int>(submissions_.size()) - 1;
    if (submission != nullptr) submission->handle->outputs.resize(request.tensors.size());
    for (size_t index = 0; index < request.tensors.size(); ++index) {
      BatchTensor tensor = Describe(response, index);
      if (submission != nullptr) {
        tensor.input = static_cast<const char*>(submission->inputs[index]);
        RT_TRY(ProvideOutput(response, index, tensor, submission.get()));
        tensor.output = static_cast<char*>(submission->handle->outputs[index].data);
      } else if (request.operation == Operation::kAlltoall) {
        scratch_.resize(Rows(response, tensor) * tensor.row_bytes);  // what comes to a rank that has joined is dropped
        tensor.output = scratch_.data();
      }
      BatchFor(response, request.tensors[index].dtype).tensors.push_back(std::move(tensor));
      operation_of_tensor_.push_back(operation);
    }
    if (submission != nullptr && request.operation == Operation::kAlltoall)
      for (int from = 0; from < members(); ++from) submission->handle->received_splits.push_back(response.rows[from * members() + me()]);
    return {};
  }

  // The batch that tensors of this dtype join: reductions need one for each dtype, the others move bytes.
  Batch& BatchFor(const Response& response, DType dtype) {
    const Request& request = response.request;
    if (!Find(request.operation)->reduces) dtype = DType::kUInt8;
    for (DTypeBatch& known : batches_)
      if (known.dtype == dtype) return known.batch;
    Batch batch;
    batch.operation = request.operation;
    batch.reduction = request.reduction;
    batch.dtype = dtype;
    batch.wire = WireDType(request.compression, dtype);
    batch.joined = joined_;
    batch.scaling.prescale = request.prescale;
    batch.scaling.postscale = request.postscale;
    if (request.reduction == Reduction::kAverage) batch.scaling.divisor = static_cast<double>(Divisor());
    if (!response.weights.empty()) Weigh(response.weights, &batch);
    if (Find(request.operation)->rooted) {
      const std::vector<int>& ranks = group_->topology.members;
      batch.root = static_cast<int>(std::find(ranks.begin(), ranks.end(), request.root) - ranks.begin());
    }
    batches_.push_back({dtype, std::move(batch)});
    return batches_.back().batch;
  }

  // By a power of two, which is exact, the weights become at most 1: a sum of 16-bit floats overflows no sooner than without.
  void Weigh(const std::vector<int64_t>& weights, Batch* batch) const {
    int exponent;
    std::frexp(static_cast<double>(*std::max_element(weights.begin(), weights.end())), &exponent);
    for (int64_t weight : weights) batch->weights.push_back(std::ldexp(static_cast<double>(weight), -exponent));
    batch->scaling.divisor = std::accumulate(batch->weights.begin(), batch->weights.end(), 0.0);
  }

  int64_t Divisor() const {
    if (executor_->options_.join_divisor == "initial") return members();
    return std::max<int64_t>(1, std::count(joined_.begin(), joined_.end(), false));
  }

  BatchTensor Describe(const Response& response, size_t index) const {
    const TensorSpec& spec = response.request.tensors[index];
    BatchTensor tensor;
    tensor.bytes = spec.bytes();
    const size_t tensors = response.request.tensors.size();
    switch (response.request.operation) {
      case Operation::kAllgather:
        tensor.row_bytes = spec.row_bytes();
        for (int member = 0; member < members(); ++member) tensor.rows.push_back(response.rows[member * tensors + index]);
        break;
      case Operation::kReducescatter:
        tensor.row_bytes = spec.row_bytes();
        for (int member = 0; member < members(); ++member)
          tensor.rows.push_back(spec.shape[0] / members() + (member < spec.shape[0] % members() ? 1 : 0));
        break;
      case Operation::kAlltoall:
        tensor.row_bytes = spec.row_bytes();
        tensor.rows = response.rows;
        break;
      default:
        break;
    }
    return tensor;
  }

  // Rows of this rank's output, where the output is not of the input's shape.
  int64_t Rows(const Response& response, const BatchTensor& tensor) const {
    int64_t rows = 0;
    switch (response.request.operation) {
      case Operation::kAllgather:
        return std::accumulate(tensor.rows.begin(), tensor.rows.end(), int64_t{0});
      case Operation::kReducescatter:
        return tensor.rows[me()];
      default:
        for (int from = 0; from < members(); ++from) rows += tensor.rows[from * members() + me()];
        return rows;
    }
  }

  Status ProvideOutput(const Response& response, size_t index, const BatchTensor& tensor, Submission* submission) {
    Handle::Output& output = submission->handle->outputs[index];
    output.shape = submission->request.tensors[index].shape;
    output.data = submission->outputs[index];
    if (Find(response.request.operation)->output == Output::kSame && output.data != nullptr) return {};
    if (Find(response.request.operation)->output == Output::kRows) output.shape[0] = Rows(response, tensor);
    if (submission->allocate != nullptr) {
      output.data = submission->allocate(submission->callback_context, static_cast<int32_t>(index),
                                         static_cast<int32_t>(output.shape.size()), output.shape.data());
    } else {
      TensorSpec spec{submission->request.tensors[index].dtype, output.shape};
      output.data = AllocateAligned(spec.bytes());
      output.owned = output.data != nullptr;
    }
    if (output.data != nullptr) return {};
    return Status::Internal(response.request.Subject() + ": no memory for the output on rank " +
                            std::to_string(group_->RankOf(me())) + ".");
  }

  void WriteSpans(const Submission& submission, const Observed& observed) {
    static const char* const names[kStageCount] = {"pack", "wire", "reduce", "unpack"};
    Timeline& timeline = *executor_->timeline_;
    const std::string& name = submission.request.name;
    Nanoseconds started = kNever;
    for (const Span& span : observed.stages)
      if (span.begin > 0) started = std::min(started, span.begin);
    timeline.Span(name, Text(submission.request.operation), submission.submitted, Now(), static_cast<int64_t>(submission.request.bytes()));
    timeline.Span(name, "negotiate", submission.submitted, agreed_, 0);
    if (started != kNever) timeline.Span(name, "queue", agreed_, std::max(agreed_, started), 0);
    for (int stage = 0; stage < kStageCount; ++stage)
      if (observed.stages[stage].begin > 0)
        timeline.Span(name, names[stage], observed.stages[stage].begin, observed.stages[stage].end, observed.stages[stage].bytes);
  }

  Executor* const executor_;
  Group* const group_;
  const std::vector<Response> responses_;
  const std::vector<bool> joined_;
  const Nanoseconds agreed_;
  std::vector<std::shared_ptr<Submission>> submissions_;  // by response; nullptr if this rank has joined
  std::vector<DTypeBatch> batches_;
  std::vector<std::unique_ptr<Task>> tasks_;
  std::vector<int> operation_of_tensor_;
  std::vector<Observed> observed_;  // by response; empty without a timeline
  std::vector<char> scratch_;
};

Executor::Executor(const World& world, const Options& options, Transport* transport, HostMemory* memory, SubmissionTable* table,
                   Counters* counters, Timeline* timeline)
    : world_(world),
      options_(options),
      transport_(transport),
      memory_(memory),
      table_(table),
      counters_(counters),
      timeline_(timeline) {}

Executor::~Executor() = default;

void Executor::AddGroup(int process_set, int lane_number, const std::vector<int>& members) {
  Lane& lane = lanes_[process_set];
  Group& group = lane.group;
  group.process_set = process_set;
  group.lane = lane_number;
  group.topology = TopologyFor(world_, options_, members);
  group.geometry = GeometryFor(group.topology, options_);
  group.transport = transport_;
  group.counters = counters_;
  for (int member : group.topology.locals())
    if (member != group.topology.me) group.peers.push_back(&memory_->doorbell(world_.local_rank_of[group.RankOf(member)]));
}

void Executor::RemoveGroup(int process_set) {
  auto lane = lanes_.find(process_set);
  if (lane == lanes_.end()) return;
  const Topology& topology = lane->second.group.topology;
  if (lane->second.group.window.mapped() && topology.local_count() > 1)
    memory_->UnmapWindow(process_set, topology.my_local() == 0);
  lanes_.erase(lane);
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
  RT_TRY(memory->MapWindow(group.process_set, participants, group.geometry.Bytes(participants), &window));
  group.window = Window(window, group.geometry, participants);
  return {};
}

Status Executor::Start(int process_set, const effect::Execute& execute) {
  Lane& lane = lanes_.at(process_set);
  if (!lane.group.window.mapped()) RT_TRY(MapWindow(&lane));
  auto execution = std::make_unique<Execution>(this, &lane.group, execute);
  RT_TRY(execution->Prepare());
  lane.executions.push_back(std::move(execution));
  ++under_way_;
  return {};
}

bool Executor::busy(int process_set) const {
  auto lane = lanes_.find(process_set);
  return lane != lanes_.end() && !lane->second.executions.empty();
}

Status Executor::Advance(bool* moved, std::vector<int>* finished) {
  for (auto& entry : lanes_) {
    auto& executions = entry.second.executions;
    for (size_t index = 0; index < std::min(executions.size(), kOverlap); ++index) RT_TRY(executions[index]->Advance(moved));
    while (!executions.empty() && executions.front()->done()) {
      executions.front()->Finish();
      executions.pop_front();
      --under_way_;
      finished->push_back(entry.first);
      *moved = true;
    }
  }
  return {};
}

}  // namespace ringtrain
