// Pipeline: a batch on its way through the window of its host and, with several hosts, around the ring. The hot loop.
//
// Each chunk passes five stages on every member; a stage runs as soon as the counters of the others on this host allow
// it, so that several chunks are under way and nobody waits for the slowest one at a time:
//
//     pack      lay my contribution to others' cells into my slot            needs: all have reduced its last chunk
//     reduce    lead a ring: reduce or fetch its cells into my result slot   needs: all have packed it
//     ring      across hosts: scatter-reduce, allgather (ring.h)             needs: the wire
//     publish   let the others on this host see my result slot               needs: chunks before are published
//     unpack    copy the results of all leaders into my outputs              needs: all leaders have published it
//
// A member's own contribution is read, and on a single host its own result written, without a detour through the slots.
// Waiting is not done here: Advance returns when nothing can move, and the driver sleeps until a peer's doorbell.
#ifndef RINGTRAIN_COLLECTIVES_PIPELINE_H_
#define RINGTRAIN_COLLECTIVES_PIPELINE_H_

#include <memory>
#include <vector>

#include "collectives/group.h"
#include "collectives/partition.h"
#include "collectives/ring.h"

namespace ringtrain {

class Pipeline : public Task {
 public:
  Pipeline(Batch batch, Group* group, StageObserver* observer);

  Status Advance(bool* moved) override;
  bool done() const override { return consumed_ == end_; }

 private:
  bool reduces() const { return operation_.reduces; }
  bool several_hosts() const { return hosts_ > 1; }

  // One chunk each; false if it cannot run yet or nothing is left for it.
  bool TryPack();
  bool TryReduce();
  Status TryRing(bool* moved);
  bool TryPublish();
  bool TryUnpack();

  void StartRing(const Chunk& chunk, char* result);
  void Pack(const Chunk& chunk, char* slot);
  char* ResultOf(const Chunk& chunk, int leader, uint64_t number) const;
  void ReduceCells(const Chunk& chunk, char* result);
  void ReduceSegment(const Segment& segment, size_t slot_offset, char* result);
  void GatherSources(const Segment& segment, size_t slot_offset);
  void ReduceReplicated(const Chunk& chunk);
  void FetchCells(const Chunk& chunk, char* result);
  void Unpack(const Chunk& chunk);
  void UnpackCell(const Chunk& chunk, const Cell& cell, const char* result);

  const Cell& CellOf(const Chunk& chunk, int ring, int host) const { return chunk.cells[ring * hosts_ + host]; }
  Chunk& InFlight(uint64_t chunk) { return in_flight_[chunk % in_flight_.size()]; }
  bool Wants(const Segment& segment) const;
  bool PeersReached(std::atomic<uint64_t> StageCounters::* counter, uint64_t needed, uint64_t* known) const;
  uint64_t Mine(std::atomic<uint64_t> StageCounters::* counter) const;
  void Post(std::atomic<uint64_t> StageCounters::* counter, uint64_t value);
  int64_t Clock() const { return observer_ == nullptr ? 0 : Now(); }
  void Observe(Stage stage, const Chunk& chunk, int64_t begin);

  const Batch batch_;
  const OperationRow& operation_;
  const bool all_receive_all_;  // else each member its share
  Group* const group_;
  StageObserver* const observer_;
  const Partition partition_;
  const int hosts_;
  const int me_;                   // member
  const int local_;                // my place on my host
  const int locals_;               // members on my host
  int ring_ = -1;                  // the ring that I lead, or -1
  bool straight_;                  // reductions on one host: a leader reduces straight into its own output
  Scaling local_scaling_;          // applied within the host
  std::vector<bool> contributes_;  // by local member
  std::vector<double> weights_;    // of a weighted average: those of the local members that contribute

  // Chunks of the window's sequence: mine are [begin_, end_), and each cursor is the next one of its stage.
  const uint64_t begin_, end_;
  uint64_t packed_, reduced_, published_, consumed_;
  // Least values of the peers' counters that were last seen: most checks need not look at shared memory.
  uint64_t peers_packed_ = 0, peers_reduced_ = 0, peers_published_ = 0, peers_consumed_ = 0;

  size_t ahead_taken_ = 0;  // bytes of what came ahead

  std::vector<Chunk> in_flight_;
  std::vector<std::unique_ptr<RingPass>> passes_;  // by result slot
  std::vector<const void*> sources_;               // of one reduction; kept to save allocating it
};

}  // namespace ringtrain
#endif  // RINGTRAIN_COLLECTIVES_PIPELINE_H_
