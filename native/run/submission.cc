#include "run/submission.h"

#include <algorithm>
#include <new>
#include <utility>

namespace ringtrain {

bool Handle::finished() const {
  if (!done()) return false;
  if (completion == nullptr || !status().ok() || on_gpu_.load() == OnGpu::kPassed) return true;
  InContext current(*completion->device());
  bool passed = false;
  if (!completion->Passed(&passed).ok()) return false;  // of a GPU that has failed the driver hears, and ends the world
  return passed && on_gpu_.load() != OnGpu::kInDoubt;   // read last: it may be an abort that has let it pass
}

Status HoldBack(const Handle& handle, CUstream stream) {
  if (!handle.done())
    return Status::InvalidArgument(
        "a stream may wait for a result that is on its way, but the operation is pending. Wait for it first.");
  if (!handle.status().ok() || handle.completion == nullptr) return handle.status();
  const Device& device = *handle.completion->device();
  InContext current(device);
  bool capturing;
  RT_TRY(device.IsCapturing(stream, &capturing));
  if (capturing)
    return Status::Unsupported(
        "a stream that a CUDA graph is captured from cannot wait for an operation. Wait before the capture begins.");
  return handle.completion->HoldBack(stream);
}

FlownOperation Flown(const Submission& submission) {
  const Request& request = submission.request;
  FlownOperation flown;
  flown.number = submission.number;
  flown.agreed = submission.agreed.load(std::memory_order_relaxed);
  flown.submitted = submission.submitted;
  flown.announced = submission.announced.load(std::memory_order_relaxed);
  flown.started = submission.started.load(std::memory_order_relaxed);
  flown.process_set = submission.process_set;
  flown.root = request.root;
  flown.operation = request.operation;
  flown.reduction = request.reduction;
  flown.tensors = static_cast<int32_t>(request.tensors.size());
  flown.SetName(request.name);
  if (request.tensors.empty()) return flown;
  flown.bytes = static_cast<int64_t>(request.bytes());
  const TensorSpec& first = request.tensors[0];
  flown.dtype = first.dtype;
  flown.dimensions = static_cast<int32_t>(first.shape.size());
  std::copy_n(first.shape.begin(), std::min(flown.dimensions, FlownOperation::kExtents), flown.extents);
  return flown;
}

Status SubmissionTable::Add(std::shared_ptr<Submission> submission) {
  MutexLock lock(mutex_);
  if (!closed_.ok()) return closed_;
  const Request& request = submission->request;
  const bool removes = request.operation == Operation::kRemoveProcessSet;
  const int set = removes ? static_cast<int>(request.splits[0]) : submission->process_set;
  if (removes ? PendingIn(set) : leaving_.count(set) > 0)
    return Status::InvalidArgument(request.Subject() + ": process set " + std::to_string(set) +
                                   " must not be used while it is removed. Wait for what is pending in it.");
  Names& names = pending_[submission->process_set];
  news_.submissions.push_back(submission);
  bool added = false;
  try {
    added = names.emplace(request.name, std::move(submission)).second;
    if (added && removes) leaving_.insert(set);
  } catch (const std::bad_alloc&) {  // a name without news would be in flight for ever
    if (added) names.erase(request.name);
    news_.submissions.pop_back();
    throw;
  }
  if (!added) {
    const std::shared_ptr<Submission> refused = std::move(news_.submissions.back());
    news_.submissions.pop_back();
    return Status::InvalidArgument(refused->request.Subject() +
                                   ": the name must not be in flight, but it has been submitted already and is not "
                                   "done on this rank. Wait for it, or use another name.");
  }
  news_.submissions.back()->number = ++submissions_;
  has_news_.store(true, std::memory_order_seq_cst);
  return {};
}

void SubmissionTable::AddRefusal(int process_set, Refusal refusal) {
  MutexLock lock(mutex_);
  if (!closed_.ok()) return;
  auto names = pending_.find(process_set);
  if (names != pending_.end() && names->second.count(refusal.name) > 0) return;
  news_.refusals.emplace_back(process_set, std::move(refusal));
  has_news_.store(true, std::memory_order_seq_cst);
}

bool SubmissionTable::TakeNews(News* news) {
  if (!has_news()) return false;
  MutexLock lock(mutex_);
  *news = std::exchange(news_, News());
  has_news_.store(false, std::memory_order_relaxed);
  return true;
}

std::shared_ptr<Submission> SubmissionTable::Find(int process_set, const std::string& name) const {
  MutexLock lock(mutex_);
  auto names = pending_.find(process_set);
  if (names == pending_.end()) return nullptr;
  auto found = names->second.find(name);
  return found == names->second.end() ? nullptr : found->second;
}

bool SubmissionTable::Pending(int process_set) const {
  MutexLock lock(mutex_);
  return PendingIn(process_set);
}

bool SubmissionTable::PendingIn(int process_set) const {
  auto names = pending_.find(process_set);
  return names != pending_.end() && !names->second.empty();
}

void SubmissionTable::Finish(const std::shared_ptr<Submission>& submission, const Status& status) {
  {
    MutexLock lock(mutex_);
    auto names = pending_.find(submission->process_set);
    if (names == pending_.end() || names->second.erase(submission->request.name) == 0) return;
    Remember(*submission, status.code());
    if (submission->request.operation == Operation::kRemoveProcessSet) {
      const int gone = static_cast<int>(submission->request.splits[0]);
      leaving_.erase(leaving_.find(gone));
      if (!PendingIn(gone)) pending_.erase(gone);  // ids are not used again
    }
  }
  submission->Finish(status);
}

void SubmissionTable::Close(const Status& cause) {
  std::map<int, Names> pending;
  {
    MutexLock lock(mutex_);
    if (closed_.ok()) closed_ = cause;
    for (const auto& names : pending_)
      for (const auto& entry : names.second) Remember(*entry.second, closed_.code());
    pending.swap(pending_);
    news_ = {};
    has_news_.store(false, std::memory_order_relaxed);
  }
  for (auto& names : pending)
    for (auto& entry : names.second) entry.second->Finish(closed());
}

void SubmissionTable::Remember(const Submission& submission, StatusCode status) {
  if (!flown_.remembers()) return;
  FlownOperation flown = ringtrain::Flown(submission);
  flown.status = status;
  flown.finished = Now();
  flown_.Add(flown);
}

std::vector<FlownOperation> SubmissionTable::Flown() const {
  std::vector<FlownOperation> flown;
  {
    MutexLock lock(mutex_);
    flown = flown_.ended();
    for (const auto& names : pending_)
      for (const auto& entry : names.second) flown.push_back(ringtrain::Flown(*entry.second));
  }
  std::sort(flown.begin(), flown.end(), [](const auto& one, const auto& other) { return one.number < other.number; });
  return flown;
}

std::shared_ptr<Submission> SubmissionTable::Oldest() const {
  MutexLock lock(mutex_);
  std::shared_ptr<Submission> oldest;
  for (const auto& names : pending_)
    for (const auto& entry : names.second)
      if (oldest == nullptr || entry.second->number < oldest->number) oldest = entry.second;
  return oldest;
}

Status SubmissionTable::closed() const {
  MutexLock lock(mutex_);
  return closed_;
}

}  // namespace ringtrain
