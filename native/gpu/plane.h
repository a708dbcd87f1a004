// Plane: how the tensors of one process set on one choice of GPUs, one for each member, travel. It finds out at the
// first of them, with the other members (choice.h has the rules), opens what that takes, and makes the tasks.
//
// NCCL is opened before the first task or, with option nccl_opening=beside, while tasks go through the host: then the
// members ask each other before every kBatchesToAsk-th batch whether it is open, and all change over at the same one.
#ifndef RINGTRAIN_GPU_PLANE_H_
#define RINGTRAIN_GPU_PLANE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/log.h"
#include "base/options.h"
#include "collectives/group.h"
#include "gpu/choice.h"
#include "gpu/nccl_opening.h"
#include "gpu/nccl_task.h"
#include "gpu/staged.h"
#include "transport/world.h"

namespace ringtrain {

// The GPUs of a process set's members.
struct MemberGpus {
  const std::vector<int64_t>& of_all;  // by member
  std::shared_ptr<Device> mine;        // nullptr on a rank that has joined
};

class Plane {
 public:
  // order: of the process set's launches. If the members have to meet, that takes its share of the group's sequence
  // here.
  Plane(const Options& options, Group* group, MemberGpus gpus, const World& world, LaunchOrder* order, Log* log);
  ~Plane();

  // Whether the next batch, which all members are at, can become a task: it is known how its tensors travel, or that
  // they cannot. Advance brings it about. If the members have to ask each other before, that takes its share of the
  // group's sequence here.
  bool Admits();
  // Why tensors cannot travel here: the same on all members.
  const Status& refusal() const { return refusal_; }
  // The task that carries a batch out; takes its share of the group's sequence. The device's context must be current.
  Status MakeTask(DeviceBatch batch, std::unique_ptr<DeviceTask>* task);

  // Not ok where what is under way cannot end any more.
  Status Advance(bool* moved);
  // Aborts the communicators of all of these at once.
  static void AbortCommunicators(const std::vector<Plane*>& planes);
  // The world has failed, and communicators are aborted: waits until the GPU has let go of tensors, a second at most.
  // False if it has not.
  bool Abandon();

 private:
  enum class State { kMeeting, kOpening, kAsking, kReady };
  enum Answer : char { kNotYet, kOpen, kFailed };
  static constexpr int kBatchesToAsk = 16;

  GpuFacts Facts();
  Status HasKernels() const;
  void Meet(std::string told);
  Status Choose();
  Status OpenNccl(const std::vector<GpuFacts>& facts);
  Answer OpeningIs() const;
  void ChangeOver();
  void FailBeside(const Status& status);
  void GiveUpNccl();
  Status OpenCopies();
  int FirstOfRanks() const;
  Status OpenAcross();
  Status OpenAlone();
  Status AdvanceOpening(bool* moved);
  void AdvanceBeside(bool* moved);
  Status Explain(const Status& status) const;
  void LeaveToDevice();

  const Options& options_;
  Group* const group_;
  const std::shared_ptr<Device> device_;
  const World& world_;
  Log* const log_;
  const bool within_hosts_;  // communicators are for the ranks of one host
  State state_ = State::kReady;
  Status refusal_;
  Way way_ = Way::kStaged;
  CopyStreams copies_;
  NcclLane lane_;
  std::unique_ptr<NcclOpening> opening_;  // of the lane
  bool beside_ = false;                   // it is opened, or has been, while tasks go through the host
  int admitted_ = 0;                      // batches since then, or since members have asked each other whether it is
  std::string failure_;                   // why it cannot be opened here

  std::string told_, heard_;       // facts or answers: this member's, and all members'
  std::unique_ptr<Task> meeting_;  // exchanges them
  Nanoseconds open_by_ = kNever;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_GPU_PLANE_H_
