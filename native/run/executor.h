// Executor: runs what the negotiators have agreed on, batch after batch, on the data plane of each process set.
// The driver's thread only. Nothing here waits.
#ifndef RINGTRAIN_RUN_EXECUTOR_H_
#define RINGTRAIN_RUN_EXECUTOR_H_

#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "run/execution.h"
#include "transport/world.h"

namespace ringtrain {

class Executor {
 public:
  Executor(const World& world, const Books& books, Wire& wire, HostMemory* memory, Residuals* residuals);
  ~Executor();

  void AddGroup(int process_set, int lane, const std::vector<int>& members);
  void RemoveGroup(int process_set);

  // Has what this rank contributes to these batches go with a promise; and takes what has come with one, which is false
  // if that cannot be read.
  void SendAhead(const std::vector<PromisedBatch>& batches, Frame* promise);
  bool ReceiveAhead(const Frame& promise);

  // Starts a batch of data operations. Those of a process set begin, and take their shares of its window, in the order
  // of the calls.
  Status Start(int process_set, effect::Execute execute);
  // Moves every group's batches; appends the process set of each that is finished.
  Status Advance(bool* moved, std::vector<int>* finished);
  bool busy() const { return under_way_ > 0; }
  // Work is on a GPU, which cannot ring: somebody must look.
  bool MustPoll() const { return on_devices_ > 0; }
  // The world has failed: what is on GPUs will not be done.
  void Abandon(const Status& cause);
  bool busy(int process_set) const;

 private:
  using Devices = std::vector<int64_t>;  // by member
  struct Lane {
    Group group;
    std::unique_ptr<HostMemory> alone;  // memory of a group whose only member on this host is this rank
    LaunchOrder launches;
    AheadOf ahead;
    std::map<Devices, std::unique_ptr<Plane>> planes;
    std::deque<std::unique_ptr<Execution>> executions;
    uint64_t agreed = 0;                              // operations so far, the same on all members
    Nanoseconds counted_until = 0;                    // of the time that batches were under way
    size_t prepared = 0;                              // of the executions, counted from the front
    std::deque<std::unique_ptr<Execution>> enqueued;  // finished, while a GPU is still at work for them
  };

  Status MapWindow(Lane* lane);
  Plane* PlaneOf(const Execution& execution, Lane* lane);
  std::vector<Plane*> Planes() const;
  Status PrepareInOrder(Lane* lane);
  void Retire(Lane* lane);
  void Forget(const Execution& execution);
  Status AdvanceDevices(Lane* lane, bool* moved);
  static void TakeEnded(Lane* lane);

  const World& world_;
  const Books& books_;
  Wire& wire_;
  HostMemory* const memory_;
  Residuals* const residuals_;
  std::map<int, Lane> lanes_;  // by process set
  int under_way_ = 0;
  int on_devices_ = 0;  // of those under way
};

}  // namespace ringtrain
#endif  // RINGTRAIN_RUN_EXECUTOR_H_
