// Adasum: an allreduce that adds gradients as far as they are orthogonal, and averages them as far as they are parallel
// (Maleki et al., "Scaling Distributed Training with Adaptive Summation", arXiv:2006.02924). Of two vectors
//
//     (1 - p a·b / |a|²) a  +  (1 - q a·b / |b|²) b        p + q = 1
//
// tensor by tensor, up a binary tree over the members in rank order (adasum_plan.h). p and q are the paper's 1/2 where
// both stand for as many members, which is always so for a power of two of them; else p is the part of the members for
// which a stands, so that parallel vectors give their average. In the paper's terms: p is how often the step a comes
// first. A vector of zeros leaves the other as it is, which is what a member that has joined contributes.
//
// Members exchange what a round says: through the window's contribution slots on one host, by messages between hosts. A
// chunk of a round is counted by every member of the host, whether it has a part in it or not. Dot products are taken
// in double, in blocks that are counted from the start of each slice, so they depend on (tensor, members) alone; 16-bit
// floats are widened to float32 at the first level and rounded once, at the end. Each element of the result is computed
// by one member and handed to all, so that every rank has the same bits, those of a NaN included.
//
// A batch whose wire is narrower than its dtype sends its vectors rounded between hosts. Prescale and postscale both
// multiply the result, which comes to the same: a factor on all vectors changes no coefficient.
#ifndef RINGTRAIN_COLLECTIVES_ADASUM_H_
#define RINGTRAIN_COLLECTIVES_ADASUM_H_

#include <cstdint>
#include <vector>

#include "collectives/adasum_plan.h"
#include "collectives/group.h"
#include "collectives/run_messages.h"
#include "collectives/runs.h"
#include "kernels/adasum.h"

namespace ringtrain {

class Adasum : public Task {
 public:
  Adasum(Batch batch, Group* group, StageObserver* observer);

  Status Advance(bool* moved) override;
  bool done() const override { return done_; }

 private:
  // A vector over all tensors, or over some slices of each.
  struct View {
    DType dtype = DType::kFloat32;
    Slices slices;
    std::vector<char*> starts;  // by tensor: where its first slice lies
  };
  // Side by side in one tensor, of the slices that this member keeps.
  struct Block {
    size_t tensor, offset, count;
  };

  size_t Cut(size_t tensor, int slice) const;
  size_t MostElements(int width) const;
  uint64_t LocalChunks(const AdasumRound& round) const;
  DType Travels(const AdasumRound& round, bool between_hosts) const;
  bool narrows() const { return batch_.wire() != batch_.dtype; }
  bool last_level() const { return round().level + 1 == plan_.levels(); }
  const AdasumRound& round() const { return plan_.rounds()[round_]; }

  void TakeRoom();
  View InRoom(size_t offset, Slices slices) const;
  char* At(const View& view, size_t tensor, int slice) const;
  Runs RunsOf(const View& view, Slices slices) const;

  bool MyTurn() const;
  Status Turn(bool* moved);
  void BeginRound();
  void BeginHalves();
  void EndExchange();
  void EndRound();
  void Finish();

  bool TryPack();
  bool TryFetch();
  bool between_hosts() const;

  bool NextBlock(size_t arrived, Block* block);
  bool TryMultiply();
  bool TryCombine();
  void CombineBlock(const Block& block);
  void Deliver(const char* sum, const Block& block) const;
  void Observe(Stage stage, int64_t begin) const;

  const Batch batch_;
  Group* const group_;
  StageObserver* const observer_;
  const AdasumPlan plan_;
  const int me_, local_, locals_;
  const DType work_;  // of vectors under way: float32 or float64
  const uint64_t begin_, end_;

  // The round under way.
  size_t round_ = 0;
  bool started_ = false, combining_ = false, done_ = false;
  AdasumPart part_;
  DType travels_ = DType::kFloat32;
  Runs sends_, receives_;
  size_t arrived_ = 0;  // elements
  RunMessages messages_;
  uint64_t packed_, consumed_, round_end_;
  int64_t round_began_ = 0;

  // The level under way: my vector, of which I keep some slices, the other one's, and my slices widened where mine are
  // of 16 bits.
  View mine_, theirs_, widened_;
  Slices keeps_;
  size_t block_tensor_ = 0, block_offset_ = 0, blocked_ = 0;  // the next block
  std::vector<Dots> dots_, incoming_;                         // by tensor
  View result_;
  std::vector<char> of_joined_;  // zeros to contribute, and room for a result that nobody wants
  size_t whole_at_ = 0, even_at_ = 0, odd_at_ = 0, widened_at_ = 0;  // in the group's room
};

}  // namespace ringtrain
#endif  // RINGTRAIN_COLLECTIVES_ADASUM_H_
