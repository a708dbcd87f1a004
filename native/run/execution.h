// Execution: one agreed batch under way, from the responses to the handles. It describes the batch to the data plane,
// provides the outputs, advances the tasks and ends the operations. Made and moved by the executor.
#ifndef RINGTRAIN_RUN_EXECUTION_H_
#define RINGTRAIN_RUN_EXECUTION_H_

#include <memory>
#include <string>
#include <vector>

#include "agree/negotiator.h"
#include "collectives/group.h"
#include "gpu/plane.h"
#include "run/books.h"
#include "run/error_feedback.h"
#include "run/stage_spans.h"
#include "transport/world.h"

namespace ringtrain {

class Execution {
 public:
  // ahead: what the members of a set on two hosts have sent each other before it.
  Execution(const World& world, const Books& books, Residuals* residuals, Group* group, effect::Execute execute,
            Ahead ahead = {});

  // Of one that will not be carried out: what this rank contributes. False if its operations have ended meanwhile.
  bool Contribute(std::string* contribution);

  // The GPUs of the members, -1 for one that has joined; empty for host memory.
  const std::vector<int64_t>& devices() const { return responses_[0].devices; }
  // This rank's; nullptr for host memory, and on a rank that has joined.
  const std::shared_ptr<Device>& device() const { return device_; }

  // Makes the tasks, which take their shares of the group's sequence: call it in the agreed order. plane: nullptr for
  // host memory.
  Status Prepare(Plane* plane);
  Status Advance(bool* moved);
  bool done() const;
  // Numbers its operations, the same on all members, behind those that *agreed counts.
  void Number(uint64_t* agreed);
  // Ends the operations; with tensors on a GPU, that may still be at work until `completion`. counted_until: of the
  // group's time under way, which batches that overlap share.
  void Finish(Nanoseconds* counted_until);
  const std::shared_ptr<DeviceEvent>& completion() const { return completion_; }
  // Finished; whether the GPU has passed the completion, too. Not ok if it takes longer than option
  // gpu_timeout_seconds.
  Status LookAtDevice(Nanoseconds* counted_until, bool* passed);
  // Finished; the world has failed, and communicators will be aborted. Returns whether the GPU had passed the
  // completion before; else Lose follows.
  bool EndedBefore(Nanoseconds* counted_until);
  // Finished, but the GPU's work will never be done.
  void Lose(const Status& cause);
  // "allreduce 'x'", of its first operation.
  std::string Subject() const { return responses_[0].request.Subject(); }

 private:
  int members() const { return group_->topology.member_count(); }
  int me() const { return group_->topology.me; }

  Status AddOperation(size_t index);
  Batch& BatchFor(const Response& response, size_t index);
  int64_t Divisor() const;
  BatchTensor Describe(const Response& response, size_t index) const;
  int64_t Rows(const Response& response, const BatchTensor& tensor) const;
  Status ProvideOutput(const Response& response, size_t index, const BatchTensor& tensor, Submission* submission);
  bool CanDrop(const Request& request) const;
  double Counts(const Batch& batch) const;
  Status MakeTasks(Plane* plane);
  Status TakeAhead();
  Status AdvanceTasks(bool* moved);
  Status CheckTime(Nanoseconds begin) const;
  void CallBack(const Status& status);
  std::string OnDevice(const std::string& text) const;
  void CountTraffic(Nanoseconds now, Nanoseconds* counted_until);
  int64_t MovedBytes(const Submission& submission) const;

  const World& world_;
  const Books& books_;
  Group* const group_;
  const std::vector<Response> responses_;
  const std::vector<bool> joined_;
  const Nanoseconds agreed_;
  Ahead ahead_;                                           // until the tasks are made
  std::vector<std::shared_ptr<Submission>> submissions_;  // by response; nullptr if this rank has joined
  std::vector<Status> lacks_;                             // by response: why this rank has no output
  std::shared_ptr<Device> device_;
  Status refusal_;  // why the plane carries none of it out
  ErrorFeedback feedback_;
  std::vector<Batch> batches_;  // until the tasks are made
  std::vector<std::unique_ptr<Task>> tasks_;
  std::vector<const DeviceTask*> device_tasks_;  // those of tasks_ that are
  std::shared_ptr<DeviceEvent> completion_;
  Nanoseconds enqueued_ = 0;  // when the host had nothing left to do
  StageSpans spans_;          // by response; empty without a timeline
  std::vector<char> scratch_;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_RUN_EXECUTION_H_
