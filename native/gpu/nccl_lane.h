// NcclLane: what the tasks of a plane share on their way through NCCL: communicators, streams, fusion buffers, kernels.
// The plane owns it, nccl_opening.h fills it; tasks take its channels and buffers in turn, in the order in which they
// are made, which is that of all members.
#ifndef RINGTRAIN_GPU_NCCL_LANE_H_
#define RINGTRAIN_GPU_NCCL_LANE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "device/device.h"
#include "device/pack_kernels.h"
#include "device/sum_kernels.h"
#include "gpu/communicator.h"
#include "gpu/cross_group.h"
#include "gpu/nccl_plan.h"
#include "gpu/staged.h"

namespace ringtrain {

// The order in which batches of a process set are launched, whatever their GPUs: the one in which they are agreed, on
// every rank.
struct LaunchOrder {
  uint64_t tickets = 0;   // taken
  uint64_t launched = 0;  // of those, are with NCCL
};

// Waits until the GPU has done what is on these streams, and so lets go of the memory of operations; a second at most.
// False if it has not. nullptr: no stream.
bool AwaitEnds(const std::shared_ptr<Device>& device, const std::vector<const Stream*>& streams);

struct NcclLane {
  struct Channel {
    std::unique_ptr<Communicator> communicator;  // nullptr with one member
    std::unique_ptr<Stream> collective;
    std::unique_ptr<DeviceMemory> room_memory;
    NcclRoom room;  // in it; used on that stream
  };
  struct Buffer {
    void* memory = nullptr;
    std::shared_ptr<DeviceEvent> free;  // after which it may be written; nullptr at first
    bool taken = false;                 // by a task that has not recorded `free` yet
  };

  Channel& NextChannel() { return channels[next_channel++ % channels.size()]; }
  // Whether the algorithm adds by kernels of ours.
  bool sums_by_itself() const { return algorithm == "ordered"; }
  // Those that are open, and nullptr for others.
  std::vector<const Stream*> Streams() const;
  // Whether no communicator has anything in progress. Not ok if anything that was asked of one has failed.
  Status Poll(bool* idle) const;
  // Appends them to *all.
  void AddCommunicators(std::vector<Communicator*>* all) const;
  // Ends what is under way on the GPU, and waits until it has let go of the memory of operations, which goes back to
  // their owners now; a second at most. False if it has not.
  bool Abort();

  std::shared_ptr<Device> device;
  std::string algorithm;  // option nccl_algorithm
  std::unique_ptr<Stream> packing, finishing;
  PackKernels* packs = nullptr;            // the device's
  SumKernels* sums = nullptr;              // its, where the algorithm needs them
  size_t buffer_bytes = 0;                 // of tensors; a buffer is longer, so that it can be cut into equal shards
  std::unique_ptr<NcclMemory> registered;  // all buffers, or
  std::unique_ptr<DeviceMemory> unregistered;  // the same where NCCL cannot know them
  std::vector<Channel> channels;
  std::vector<Buffer> buffers;
  size_t next_channel = 0, next_buffer = 0;
  LaunchOrder* order = nullptr;
  // The communicators' ranks: the members, or those of one host, whose shards then cross to the other hosts.
  Topology ranks;
  std::unique_ptr<CrossGroup> across;
  const CopyStreams* copies = nullptr;  // for the shards
  size_t chunk_bytes = 0;               // of a shard that cross at a time
};

}  // namespace ringtrain
#endif  // RINGTRAIN_GPU_NCCL_LANE_H_
