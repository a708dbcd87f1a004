// Plane: how the tensors of one process set on one choice of GPUs, one for each member, travel. It finds out at the
// first of them, with the other members (choice.h has the rules), opens what that takes, and makes the tasks.
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

class Plane {
 public:
  // devices: by member; device: this member's, nullptr on a rank that has joined. order: of the process set's launches.
  // If the members have to meet, that takes its share of the group's sequence here.
  Plane(const Options& options, Group* group, const std::vector<int64_t>& devices, std::shared_ptr<Device> device,
        const World& world, LaunchOrder* order, Log* log);
  ~Plane();

  // Whether it is known how tensors travel, or that they cannot; Advance brings it about.
  bool ready() const { return state_ == State::kReady; }
  // Why tensors cannot travel here: the same on all members.
  const Status& refusal() const { return refusal_; }
  // The task that carries a batch out; takes its share of the group's sequence. The device's context must be current.
  Status MakeTask(DeviceBatch batch, std::unique_ptr<DeviceTask>* task);

  // Not ok where what is under way cannot end any more.
  Status Advance(bool* moved);
  // The world has failed: lets go of what the GPU waits for.
  void Abandon();

 private:
  enum class State { kMeeting, kOpening, kReady };

  GpuFacts Facts();
  void Meet();
  Status Choose();
  Status OpenNccl(const std::vector<GpuFacts>& facts);
  Status OpenCopies();
  int FirstOfRanks() const;
  Status OpenAcross();
  Status OpenAlone();
  Status AdvanceOpening(bool* moved);
  Status Explain(const Status& status) const;

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

  std::string told_, heard_;       // facts: this member's, and all members'
  std::unique_ptr<Task> meeting_;  // exchanges them
  Nanoseconds open_by_ = kNever;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_GPU_PLANE_H_
