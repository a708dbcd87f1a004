#include "run/execution.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>
#include <optional>
#include <utility>

#include "base/decimal.h"
#include "collectives/contribution.h"
#include "collectives/rows.h"
#include "run/output_memory.h"

namespace ringtrain {
namespace {

bool Exchanges(const Request& request) { return Find(request.operation)->layout == Layout::kExchange; }

// By a power of two, which is exact, the weights become at most 1: a sum of 16-bit floats overflows no sooner than
// without. Sums of items are added as they are, but for those that travel as float16, whose range means fit into.
void Weigh(const std::vector<int64_t>& weights, Batch* batch) {
  int exponent;
  if (Find(batch->reduction)->finish == Finish::kDivideByWeights) {
    const int64_t items = std::accumulate(weights.begin(), weights.end(), int64_t{0});
    batch->scaling.divisor = static_cast<double>(std::max<int64_t>(items, 1));
    if (batch->codec->Wire(batch->dtype) != DType::kFloat16) return;
    batch->scaling.divisor = std::frexp(batch->scaling.divisor, &exponent);
    batch->scaling.prescale = std::ldexp(batch->scaling.prescale, -exponent);
    return;
  }
  std::frexp(static_cast<double>(*std::max_element(weights.begin(), weights.end())), &exponent);
  for (int64_t weight : weights) batch->weights.push_back(std::ldexp(static_cast<double>(weight), -exponent));
  batch->scaling.divisor = std::accumulate(batch->weights.begin(), batch->weights.end(), 0.0);
}

// What each of n members must send at least, as a share of what the operation is about: bus bandwidth, as NCCL's tests
// have it.
double LinkShare(Operation operation, int members) {
  const OperationRow& row = *Find(operation);
  if (row.rooted) return members > 1 ? 1 : 0;
  const double others = static_cast<double>(members - 1) / members;
  return row.layout == Layout::kWhole ? 2 * others : others;
}

}  // namespace

Execution::Execution(const World& world, const Books& books, Residuals* residuals, Group* group,
                     effect::Execute execute, Ahead ahead)
    : world_(world),
      books_(books),
      group_(group),
      responses_(std::move(execute.responses)),
      joined_(std::move(execute.joined)),
      agreed_(Now()),
      ahead_(std::move(ahead)),
      feedback_(*group, residuals, books.log) {
  lacks_.resize(responses_.size());
  for (const Response& response : responses_) {
    submissions_.push_back(joined_[me()] ? nullptr : books_.table->Find(group_->process_set, response.request.name));
    if (submissions_.back() != nullptr) device_ = submissions_.back()->handle->device;
  }
}

Status Execution::Prepare(Plane* plane) {
  if (plane != nullptr) refusal_ = plane->refusal();
  if (!refusal_.ok()) return {};
  for (size_t index = 0; index < responses_.size(); ++index) RT_TRY(AddOperation(index));
  Counters& counters = *books_.counters;
  counters.Add(Counter::kBatches, 1);
  books_.timeline->Cycle();
  if (responses_.size() > 1) counters.Add(Counter::kFusedOperations, static_cast<int64_t>(responses_.size()));
  return MakeTasks(plane);
}

Status Execution::TakeAhead() {
  if (!ahead_.sent && !ahead_.came) return {};
  size_t bytes = 0;
  const Batch& batch = batches_[0];
  for (const BatchTensor& tensor : batch.tensors)
    bytes += batch.codec->WireBytes(batch.dtype, tensor.bytes / Bytes(batch.dtype));
  if (ahead_.came && ahead_.contribution.size() != bytes)
    return Status::Internal(Subject() + ": what came with a promise must have " + std::to_string(bytes) +
                            " bytes, but has " + std::to_string(ahead_.contribution.size()) +
                            ". Run the same ringtrain on all ranks.");
  batches_[0].ahead = std::move(ahead_);
  return {};
}

bool Execution::Contribute(std::string* contribution) {
  for (size_t index = 0; index < responses_.size(); ++index) {
    if (submissions_[index] == nullptr) return false;
    for (size_t place = 0; place < responses_[index].request.tensors.size(); ++place) {
      BatchTensor tensor = Describe(responses_[index], place);
      tensor.input = static_cast<const char*>(submissions_[index]->inputs[place]);
      BatchFor(responses_[index], place).tensors.push_back(std::move(tensor));
    }
  }
  *contribution = ContributionOf(batches_[0], *group_);
  return true;
}

Status Execution::MakeTasks(Plane* plane) {
  const bool observed = books_.timeline->enabled();
  if (observed) spans_.Begin(responses_.size());
  RT_TRY(TakeAhead());
  if (plane == nullptr) {
    for (Batch& batch : batches_) tasks_.push_back(MakeTask(std::move(batch), group_, observed ? &spans_ : nullptr));
    return {};
  }
  std::optional<InContext> current;
  if (device_ != nullptr) current.emplace(*device_);
  std::vector<std::shared_ptr<DeviceEvent>> ready;
  for (const auto& submission : submissions_)
    if (submission != nullptr) ready.insert(ready.end(), submission->ready.begin(), submission->ready.end());
  for (Batch& batch : batches_) {
    std::unique_ptr<DeviceTask> task;
    RT_TRY(plane->MakeTask({std::move(batch), device_, ready}, &task));
    device_tasks_.push_back(task.get());
    tasks_.push_back(std::move(task));
  }
  return {};
}

Status Execution::Advance(bool* moved) {
  if (device_ == nullptr) return AdvanceTasks(moved);
  InContext current(*device_);
  const Status status = AdvanceTasks(moved);
  return status.ok() ? CheckTime(agreed_) : Status(status.code(), OnDevice(status.message()));
}

// An operation's error, with where it came about.
std::string Execution::OnDevice(const std::string& text) const {
  return Subject() + ": " + text + " This is rank " + std::to_string(world_.rank) + " on " +
         world_.host_names[world_.rank] + ", " + device_->Text() + ".";
}

Status Execution::AdvanceTasks(bool* moved) {
  for (auto& task : tasks_)
    if (!task->done()) RT_TRY(task->Advance(moved));
  return {};
}

bool Execution::done() const {
  return std::all_of(tasks_.begin(), tasks_.end(), [](const std::unique_ptr<Task>& task) { return task->done(); });
}

void Execution::Number(uint64_t* agreed) {
  for (const auto& submission : submissions_) {
    ++*agreed;
    if (submission == nullptr) continue;
    submission->agreed.store(*agreed, std::memory_order_relaxed);
    submission->started.store(agreed_, std::memory_order_relaxed);
  }
}

void Execution::Finish(Nanoseconds* counted_until) {
  enqueued_ = Now();
  feedback_.Turn();
  for (const DeviceTask* task : device_tasks_)
    if (task->completion() != nullptr)
      completion_ = task->completion();  // all are on one stream: the last comes after the others
  if (completion_ == nullptr) CountTraffic(enqueued_, counted_until);
  for (size_t index = 0; index < responses_.size(); ++index) {
    const std::shared_ptr<Submission>& submission = submissions_[index];
    if (submission == nullptr) continue;
    if (!refusal_.ok()) {
      books_.table->Finish(submission, {refusal_.code(), submission->request.Subject() + ": " + refusal_.message()});
      continue;
    }
    if (!lacks_[index].ok()) {
      books_.table->Finish(submission, lacks_[index]);
      continue;
    }
    books_.counters->Add(Counter::kOperations, 1);
    books_.counters->Add(Counter::kBytes, static_cast<int64_t>(submission->request.bytes()));
    if (!spans_.empty()) spans_.Write(index, *submission, agreed_, books_.timeline);
    submission->handle->completion = completion_;
    books_.table->Finish(submission, Status());
  }
}

Status Execution::LookAtDevice(Nanoseconds* counted_until, bool* passed) {
  InContext current(*completion_->device());
  RT_TRY(completion_->Passed(passed));
  if (!*passed) return CheckTime(enqueued_);
  CountTraffic(Now(), counted_until);
  CallBack({});
  return {};
}

Status Execution::CheckTime(Nanoseconds begin) const {
  const double limit = books_.options.gpu_timeout_seconds;
  if (limit == 0 || static_cast<double>(Now() - begin) / 1e9 < limit) return {};
  return Status::Timeout(
      OnDevice("expected the GPU to be done within " + Decimal("%.9g", limit) +
               " s but it is not. What its stream holds before the operation may hang, or a rank's GPU; "
               "gpu_timeout_seconds sets the limit."));
}

bool Execution::EndedBefore(Nanoseconds* counted_until) {
  for (const auto& submission : submissions_)
    if (submission != nullptr) submission->handle->Doubt();
  InContext current(*completion_->device());
  bool passed = false;
  if (!completion_->Passed(&passed).ok() || !passed) return false;
  CountTraffic(Now(), counted_until);
  for (const auto& submission : submissions_)
    if (submission != nullptr) submission->handle->Keep();
  CallBack({});
  return true;
}

void Execution::Lose(const Status& cause) {
  for (const auto& submission : submissions_)
    if (submission != nullptr) submission->handle->Lose(cause);
  CallBack(cause);
}

void Execution::CallBack(const Status& status) {
  for (const auto& submission : submissions_)
    if (submission != nullptr) submission->CallBack(status);
}

Status Execution::AddOperation(size_t index) {
  const Response& response = responses_[index];
  const Request& request = response.request;
  const std::shared_ptr<Submission>& submission = submissions_[index];
  if (submission != nullptr) submission->handle->outputs.resize(request.tensors.size());
  for (size_t place = 0; place < request.tensors.size(); ++place) {
    BatchTensor tensor = Describe(response, place);
    tensor.operation = static_cast<int>(index);
    if (submission != nullptr) {
      tensor.input = static_cast<const char*>(submission->inputs[place]);
      const Status provided = ProvideOutput(response, place, tensor, submission.get());
      if (!provided.ok() && !CanDrop(request)) return provided;
      if (lacks_[index].ok()) lacks_[index] = provided;
      tensor.output = static_cast<char*>(submission->handle->outputs[place].data);
    } else if (Exchanges(request)) {
      scratch_.resize(Rows(response, tensor) * tensor.row_bytes);  // what comes to a rank that has joined is dropped
      tensor.output = scratch_.data();
    }
    Batch& batch = BatchFor(response, place);
    if (batch.codec->form().feedback) feedback_.Add(request, place, batch, Counts(batch), &tensor);
    batch.tensors.push_back(std::move(tensor));
  }
  if (submission != nullptr && Exchanges(request))
    for (int from = 0; from < members(); ++from) submission->handle->received_splits.push_back(response.rows[from]);
  return {};
}

// By what this rank's input is multiplied in a sum of floats; 0 on a GPU, where nothing is added to it before.
double Execution::Counts(const Batch& batch) const {
  if (device_ != nullptr) return 0.0;
  return batch.scaling.prescale * (batch.weights.empty() ? 1.0 : batch.weights[me()]);
}

// Whether the data plane can do without this rank's output, so that the others get theirs. Messages of an alltoall
// between hosts need a place to arrive at, and a GPU's part is planned with all outputs.
bool Execution::CanDrop(const Request& request) const {
  if (device_ != nullptr || request.reduction == Reduction::kAdasum)
    return false;  // which keeps parts of its sums there
  return !Exchanges(request) || group_->topology.hosts.size() == 1;
}

// The batch that a tensor joins: reductions need one for each dtype and codec, the others move bytes.
Batch& Execution::BatchFor(const Response& response, size_t index) {
  const Request& request = response.request;
  const TensorSpec& tensor = request.tensors[index];
  const bool reduces = Find(request.operation)->reduces;
  const DType dtype = reduces ? tensor.dtype : DType::kUInt8;
  const Codec& codec =
      reduces ? CodecFor(request.compression, dtype, static_cast<size_t>(tensor.elements()), request.cacheable)
              : IdentityCodec();
  for (Batch& known : batches_)
    if (known.dtype == dtype && known.codec == &codec) return known;
  Batch batch;
  batch.operation = request.operation;
  batch.reduction = request.reduction;
  batch.dtype = dtype;
  batch.codec = &codec;
  batch.joined = joined_;
  batch.scaling.prescale = request.prescale;
  batch.scaling.postscale = request.postscale;
  const ReductionRow& reduction = *Find(request.reduction);
  batch.scaling.map = reduction.map;
  batch.scaling.finish = reduction.finish;
  if (reduction.finish == Finish::kDivide) batch.scaling.divisor = static_cast<double>(Divisor());
  if (!response.weights.empty()) Weigh(response.weights, &batch);
  if (Find(request.operation)->rooted) {
    const std::vector<int>& ranks = group_->topology.members;
    batch.root = static_cast<int>(std::find(ranks.begin(), ranks.end(), request.root) - ranks.begin());
  }
  batch.tensors.reserve(request.tensors.size());
  batches_.push_back(std::move(batch));
  return batches_.back();
}

int64_t Execution::Divisor() const {
  if (books_.options.join_divisor == "initial") return members();
  return std::max<int64_t>(1, std::count(joined_.begin(), joined_.end(), false));
}

BatchTensor Execution::Describe(const Response& response, size_t index) const {
  const std::vector<TensorSpec>& tensors = response.request.tensors;
  const OperationRow& operation = *Find(response.request.operation);
  BatchTensor tensor;
  tensor.bytes = tensors[index].bytes();
  if (operation.output != Output::kRows) return tensor;
  tensor.row_bytes = tensors[index].row_bytes();
  if (operation.layout == Layout::kExchange) {
    tensor.rows = response.request.splits;
    tensor.rows.insert(tensor.rows.end(), response.rows.begin(), std::prev(response.rows.end()));
    tensor.most_within_host = response.rows.back();
  } else {
    tensor.rows =
        RowsOfTensor(operation.layout, response.rows, index, tensors.size(), tensors[index].shape[0], members());
  }
  return tensor;
}

// Rows of this rank's output, where the output is not of the input's shape.
int64_t Execution::Rows(const Response& response, const BatchTensor& tensor) const {
  return ReceivedRows(Find(response.request.operation)->layout, tensor.rows, members(), me());
}

Status Execution::ProvideOutput(const Response& response, size_t index, const BatchTensor& tensor,
                                Submission* submission) {
  Handle::Output& output = submission->handle->outputs[index];
  output.shape = submission->request.tensors[index].shape;
  output.data = submission->outputs[index];
  if (Find(response.request.operation)->output == Output::kSame && output.data != nullptr) return {};
  if (Find(response.request.operation)->output == Output::kRows) output.shape[0] = Rows(response, tensor);
  const TensorSpec spec{submission->request.tensors[index].dtype, output.shape};
  if (output.data != nullptr && device_ == nullptr && submission->room[index] == spec.bytes()) return {};
  if (device_ != nullptr) {
    RT_TRY(device_->Allocate(spec.bytes(), &output.data));
    output.owned = true;
  } else if (submission->allocate != nullptr) {
    output.data = submission->allocate(submission->callback_context, static_cast<int32_t>(index),
                                       static_cast<int32_t>(output.shape.size()), output.shape.data());
  } else {
    output.data = Outputs().Allocate(spec.bytes());
    output.owned = output.data != nullptr;
  }
  if (output.data != nullptr) return {};
  return Status::Internal(response.request.Subject() + ": no memory for the output " + spec.Text() + " on rank " +
                          std::to_string(group_->RankOf(me())) +
                          ". Its result is lost there alone; send less at a time.");
}

// Of a gather what all receive, else what this rank gives.
int64_t Execution::MovedBytes(const Submission& submission) const {
  const Request& request = submission.request;
  if (Find(request.operation)->layout != Layout::kGather) return static_cast<int64_t>(request.bytes());
  int64_t bytes = 0;
  for (size_t place = 0; place < request.tensors.size(); ++place)
    bytes +=
        static_cast<int64_t>(TensorSpec{request.tensors[place].dtype, submission.handle->outputs[place].shape}.bytes());
  return bytes;
}

void Execution::CountTraffic(Nanoseconds now, Nanoseconds* counted_until) {
  const Nanoseconds begin = std::max(agreed_, *counted_until);
  *counted_until = now;
  if (!refusal_.ok()) return;
  int64_t all = 0;
  for (const auto& submission : submissions_)
    if (submission != nullptr) all += MovedBytes(*submission);
  for (const auto& submission : submissions_) {
    if (submission == nullptr) continue;
    const int64_t bytes = MovedBytes(*submission);
    const double share = all > 0 ? static_cast<double>(bytes) / static_cast<double>(all) : 0;
    const double link = LinkShare(submission->request.operation, members());
    books_.traffic->Add({submission->request.operation, TrafficTable::SizeClass(bytes), 1, bytes,
                         static_cast<int64_t>(static_cast<double>(bytes) * link),
                         static_cast<Nanoseconds>(static_cast<double>(now - begin) * share),
                         agreed_ - submission->submitted});
  }
}

}  // namespace ringtrain
