#include "run/signs.h"

namespace ringtrain {

SignsOfLife SignsNow(const World& world, const Wire& wire, HostMemory* memory) {
  SignsOfLife signs(world.host_of.size());
  for (int rank = 0; rank < world.size; ++rank) signs[rank].count = wire.arrivals(rank);
  for (int rank : world.my_host()) {
    const int local_rank = world.local_rank_of[rank];
    LifeSign& life = memory->control().place(local_rank).life;
    // The end is read first: of a process that has ended it is settled whether its rank had left.
    const bool ended = life.Died() || memory->HasEnded(local_rank);
    signs[rank] = {life.left(), ended, life.beats()};
  }
  return signs;
}

}  // namespace ringtrain
