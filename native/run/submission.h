// Handle: the end of an operation that its submitter holds. Submission: the end that the core holds. SubmissionTable:
// those that are not done, by name.
#ifndef RINGTRAIN_RUN_SUBMISSION_H_
#define RINGTRAIN_RUN_SUBMISSION_H_

#include <atomic>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "agree/frame.h"
#include "agree/request.h"
#include "base/clock.h"
#include "base/doorbell.h"
#include "base/mutex.h"
#include "device/device.h"
#include "include/ringtrain.h"
#include "observe/flight.h"
#include "run/output_memory.h"

namespace ringtrain {

// Written by the driver until Finish, read by anyone afterwards; what may change later are the last three members.
//
// With tensors on a GPU there are two ends: done, when all work is on the GPU's queue, and finished, when it has passed
// `completion`. Between them the world can fail, and the result with it.
class Handle {
 public:
  struct Output {
    void* data = nullptr;
    bool owned = false;  // allocated by the core, not yet taken
    Shape shape;
  };

  Handle() = default;
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  ~Handle() {
    for (Output& output : outputs) {
      if (!output.owned) continue;
      if (device == nullptr)
        Outputs().Free(output.data);
      else
        Device::Free(device->index(), output.data);
    }
  }

  bool done() const { return state_.load(std::memory_order_acquire) == kDone; }
  // The operation's, or why the result is lost.
  const Status& status() const { return on_gpu_.load() == OnGpu::kLost ? cause_ : status_; }
  // Whether the GPU has passed it, too; always true without one.
  bool finished() const;
  // The world has failed. A kernel that is aborted ends as one that is done, so from here on the completion says
  // nothing to others until the driver has told whether it had passed before: Keep or Lose follows.
  void Doubt() { on_gpu_.store(OnGpu::kInDoubt); }
  void Keep() { on_gpu_.store(OnGpu::kPassed); }
  // The GPU's work will never be done.
  void Lose(const Status& cause) {
    cause_ = cause;
    on_gpu_.store(OnGpu::kLost);
  }
  void Finish(Status status) {
    status_ = std::move(status);
    if (state_.exchange(kDone, std::memory_order_acq_rel) == kAwaited) FutexWake(&state_, INT32_MAX);
  }
  // Sleeps until the operation is done, the deadline, or for no reason.
  void Sleep(Nanoseconds deadline) {
    uint32_t state = kPending;
    state_.compare_exchange_strong(state, kAwaited, std::memory_order_acq_rel);
    if (state != kDone) FutexWait(&state_, kAwaited, deadline);
  }

  std::vector<Output> outputs;
  std::vector<int64_t> received_splits;
  int result = -1;
  std::shared_ptr<Device> device;           // where the tensors are; nullptr: host memory
  std::shared_ptr<DeviceEvent> completion;  // nullptr: nothing is left to do once the operation is done

 private:
  // Of many operations that end together mostly one is awaited: the others end without a call of the kernel.
  static constexpr uint32_t kPending = 0, kAwaited = 1, kDone = 2;

  enum class OnGpu { kUnderWay, kInDoubt, kPassed, kLost };

  std::atomic<uint32_t> state_{kPending};
  Status status_;
  std::atomic<OnGpu> on_gpu_{OnGpu::kUnderWay};  // all in one order with the looks at the completion
  Status cause_;                                 // written before kLost
};

// Makes what the stream is given from now on wait for the handle's result.
Status HoldBack(const Handle& handle, CUstream stream);

struct Submission {
  int process_set = 0;
  Request request;
  std::vector<const void*> inputs;
  std::vector<void*> outputs;                       // nullptr where the core or `allocate` provides it
  std::vector<size_t> room;                         // bytes of outputs of an operation with rows
  std::vector<CUstream> streams;                    // of tensors on a GPU, each once: what they hold now comes first
  std::vector<std::shared_ptr<DeviceEvent>> ready;  // recorded on those
  rt_allocate allocate = nullptr;
  rt_done done = nullptr;
  void* callback_context = nullptr;
  Nanoseconds submitted = 0;
  uint64_t number = 0;  // by the table
  // As FlownOperation has them, by the driver; any thread reads.
  std::atomic<Nanoseconds> announced{0}, started{0};
  std::atomic<uint64_t> agreed{0};
  std::shared_ptr<Handle> handle = std::make_shared<Handle>();

  void Finish(const Status& status) {
    if (!status.ok() || handle->completion == nullptr) CallBack(status);
    handle->Finish(status);
  }
  // Tells whom the submitter wants to hear of the end, once: when a GPU that still is at work has passed the
  // completion.
  void CallBack(const Status& status) {
    const rt_done call = std::exchange(done, nullptr);
    if (call != nullptr)
      call(callback_context, static_cast<int32_t>(status.code()), status.ok() ? nullptr : status.message().c_str());
  }
};

// What is to be remembered of it.
FlownOperation Flown(const Submission& submission);

// Any thread.
class SubmissionTable {
 public:
  // remembered: how many that have ended.
  explicit SubmissionTable(size_t remembered = 0) : flown_(remembered) {}

  struct News {
    std::vector<std::shared_ptr<Submission>> submissions;
    std::vector<std::pair<int, Refusal>> refusals;  // process set, refusal
  };

  // Refuses a name that is not done yet, a process set that is being removed, and everything once closed.
  Status Add(std::shared_ptr<Submission> submission);
  // Tells the peers; the submitter has been told. Not if an earlier submission of that name goes on: they have that
  // one.
  void AddRefusal(int process_set, Refusal refusal);
  // What came since the last call. False if nothing did.
  bool TakeNews(News* news);
  bool has_news() const { return has_news_.load(std::memory_order_seq_cst); }  // ordered with who drives, in Context

  // nullptr if this rank has not submitted it.
  std::shared_ptr<Submission> Find(int process_set, const std::string& name) const;
  bool Pending(int process_set) const;
  // Ends an operation: its name is free before its handle is done, so that a waiter can submit it again at once.
  void Finish(const std::shared_ptr<Submission>& submission, const Status& status);
  // Fails all that is pending and all that will come with the first cause given.
  void Close(const Status& cause);
  Status closed() const;
  // The last operations that have ended, and all that are pending, by number.
  std::vector<FlownOperation> Flown() const;
  // Of those that are pending, the one that was submitted first; nullptr if none is.
  std::shared_ptr<Submission> Oldest() const;

 private:
  using Names = std::unordered_map<std::string, std::shared_ptr<Submission>>;

  bool PendingIn(int process_set) const RT_REQUIRES(mutex_);
  void Remember(const Submission& submission, StatusCode status) RT_REQUIRES(mutex_);

  mutable Mutex mutex_;
  std::map<int, Names> pending_ RT_GUARDED_BY(mutex_);  // by process set
  std::multiset<int> leaving_ RT_GUARDED_BY(mutex_);    // process sets whose removal is pending
  News news_ RT_GUARDED_BY(mutex_);
  uint64_t submissions_ RT_GUARDED_BY(mutex_) = 0;
  FlightRing flown_ RT_GUARDED_BY(mutex_);
  Status closed_ RT_GUARDED_BY(mutex_);
  std::atomic<bool> has_news_{false};
};

}  // namespace ringtrain
#endif  // RINGTRAIN_RUN_SUBMISSION_H_
