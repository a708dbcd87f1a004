// Which task carries a batch out.
#include "collectives/adasum.h"
#include "collectives/alltoall.h"
#include "collectives/pipeline.h"

namespace ringtrain {

std::unique_ptr<Task> MakeTask(Batch batch, Group* group, StageObserver* observer) {
  if (Find(batch.operation)->layout == Layout::kExchange)
    return std::make_unique<Alltoall>(std::move(batch), group, observer);
  if (batch.reduction == Reduction::kAdasum &&
      group->topology.member_count() > 1)  // of one it is the vector, as a sum is
    return std::make_unique<Adasum>(std::move(batch), group, observer);
  return std::make_unique<Pipeline>(std::move(batch), group, observer);
}

}  // namespace ringtrain
