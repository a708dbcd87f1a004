#include "run/admission.h"

#include <algorithm>

#include "agree/check.h"
#include "base/ranks.h"
#include "collectives/group.h"

namespace ringtrain {
namespace {

// alltoall without splits sends equal parts; filled in here so that it matches a rank that spells them out.
Status FillSplits(int64_t members, Request* request) {
  const std::vector<TensorSpec>& tensors = request->tensors;
  if (request->operation != Operation::kAlltoall || !request->splits.empty() || tensors.size() != 1 ||
      tensors[0].shape.empty())
    return {};
  const int64_t rows = tensors[0].shape[0];
  if (rows % members != 0)
    return Status::InvalidArgument(
        request->Subject() + ": without splits the first dimension must be divisible by the " +
        std::to_string(members) + " members, but is " + std::to_string(rows) + ". Pass splits.");
  request->splits.assign(static_cast<size_t>(members), rows / members);
  return {};
}

// An adapter may hand in a tensor whose storage was freed, or never was.
Status CheckMemory(const Submission& submission) {
  for (size_t index = 0; index < submission.inputs.size(); ++index)
    if (submission.inputs[index] == nullptr && submission.request.tensors[index].bytes() > 0)
      return Status::InvalidArgument(submission.request.Subject() + ": the tensor must have memory, but " +
                                     submission.request.tensors[index].Text() + " has none. Was its storage freed?");
  return {};
}

}  // namespace

Status CheckMembership(const Submission& submission, const std::vector<int>& members, int rank) {
  const Request& request = submission.request;
  if (request.name.empty())
    return Status::InvalidArgument(std::string(Text(request.operation)) + ": the name must not be empty.");
  if (members.empty())
    return Status::InvalidArgument(request.Subject() + ": process set " + std::to_string(submission.process_set) +
                                   " does not exist.");
  const bool of_world =
      request.operation == Operation::kAddProcessSet || request.operation == Operation::kRemoveProcessSet;
  if (of_world && submission.process_set != 0)
    return Status::InvalidArgument(request.Subject() +
                                   ": all ranks of the world take part, but it was submitted to process set " +
                                   std::to_string(submission.process_set) + ". Submit it to process set 0.");
  if (!std::binary_search(members.begin(), members.end(), rank))
    return Status::InvalidArgument(request.Subject() + ": rank " + std::to_string(rank) + " is not in process set " +
                                   std::to_string(submission.process_set) + ", which has " + RanksText(members) +
                                   ". Only its members may take part.");
  return {};
}

Status Admission::Admit(const std::vector<int>& members, Submission* submission) const {
  Request& request = submission->request;
  RT_TRY(FillSplits(static_cast<int64_t>(members.size()), &request));
  RT_TRY(Check(request, members));
  if (Find(request.operation)->layout == Layout::kPair) RT_TRY(CheckPair(request));
  RT_TRY(CheckMemory(*submission));
  if (request.operation == Operation::kAddProcessSet) RT_TRY(CheckAddition(request));
  if (request.operation == Operation::kRemoveProcessSet) RT_TRY(CheckRemoval(request));
  return request.device >= 0 ? MarkReady(submission) : Status();
}

Status Admission::CheckPair(const Request& request) const {
  if (request.root == rank_)
    return Status::InvalidArgument(request.Subject() + ": the other rank must be another one, but is " +
                                   std::to_string(rank_) + ", this one. Copy the tensor.");
  if (request.device < 0) return {};
  return Status::Unsupported(request.Subject() +
                             ": the tensor must be in host memory, but is on a GPU. Copy it to the host first.");
}

Status Admission::CheckAddition(const Request& request) const {
  if (process_sets_->count() >= Group::kMaxGroups)
    return Status::InvalidArgument(request.Subject() + ": there may be " + std::to_string(Group::kMaxGroups) +
                                   " process sets at a time, but there are as many. Remove one first.");
  if (options_.equal_process_sets == "allow") return {};
  std::vector<int> ranks(request.splits.begin(), request.splits.end());
  std::sort(ranks.begin(), ranks.end());
  const int equal = process_sets_->Find(ranks);
  if (equal < 0) return {};
  return Status::InvalidArgument(
      request.Subject() + ": ranks must differ from those of other process sets, but process set " +
      std::to_string(equal) + " has " + RanksText(ranks) + " too. Use that one, or set equal_process_sets=allow.");
}

Status Admission::CheckRemoval(const Request& request) const {
  const int process_set = request.splits.empty() ? 0 : static_cast<int>(request.splits[0]);
  if (process_set == 0)
    return Status::InvalidArgument(request.Subject() + ": process set 0 is the world and cannot be removed.");
  if (process_sets_->Members(process_set).empty())
    return Status::InvalidArgument(request.Subject() + ": process set " + std::to_string(process_set) +
                                   " does not exist.");
  if (table_->Pending(process_set))
    return Status::InvalidArgument(request.Subject() + ": rank " + std::to_string(rank_) +
                                   " has operations pending in it. Wait for them first.");
  return {};
}

Status Admission::MarkReady(Submission* submission) const {
  const std::string subject = submission->request.Subject() + ": ";
  std::shared_ptr<Device>& device = submission->handle->device;
  Status status = devices_->Find(submission->request.device, &device);
  if (!status.ok()) return {status.code(), subject + status.message()};
  InContext current(*device);
  for (CUstream stream : submission->streams) {
    bool capturing;
    status = device->IsCapturing(stream, &capturing);
    if (!status.ok()) return {status.code(), subject + status.message()};
    if (capturing)
      return Status::Unsupported(
          subject +
          "expected a stream that runs but found one that a CUDA graph is captured from: ranks agree on "
          "the host, which a graph cannot hold. Communicate outside of the capture.");
    std::shared_ptr<DeviceEvent> event;
    RT_TRY(DeviceEvent::Record(device, stream, &event));
    submission->ready.push_back(std::move(event));
  }
  return {};
}

}  // namespace ringtrain
