// CrossGroup: the members of a process set that have one local rank, one from each host, as a group of their own. Its
// batches go around the ring of hosts, with tags and memory apart from those of the whole set. The plane owns it, for
// allreduces that are NCCL's within a host only.
#ifndef RINGTRAIN_GPU_CROSS_GROUP_H_
#define RINGTRAIN_GPU_CROSS_GROUP_H_

#include <memory>

#include "base/options.h"
#include "collectives/group.h"
#include "transport/host_memory.h"

namespace ringtrain {

class CrossGroup {
 public:
  // set: the whole process set's, whose hosts have equally many members.
  static Status Open(const Group& set, const Options& options, std::unique_ptr<CrossGroup>* opened);

  Group* group() { return &group_; }

 private:
  CrossGroup() = default;

  Group group_;
  std::unique_ptr<HostMemory> alone_;  // this rank's is the only member on its host
};

}  // namespace ringtrain
#endif  // RINGTRAIN_GPU_CROSS_GROUP_H_
