// Samples: what is left of an epoch's order of samples, and how it is dealt to ranks, window by window. Pure; the same
// on all ranks.
//
// Positions 0, 1, … of the order are drawn in equal numbers of draws by all ranks. Position n of what is left goes to
// rank n modulo the number of ranks (Cut::kPositions), or so within each batch. A window that is released takes what
// was dealt in it, but for the shares of ranks that were lost before they could contribute: these come back, and are
// dealt first.
//
// A rank may draw for later windows, as a loader does that has worker processes. That binds nobody: what is in no
// window is given up when another dealing begins, and dealt there. So ranks may have drawn ahead by different amounts.
//
// Batches. What is left is cut into batches as one process cuts it. Within a batch of N positions the rank at place p
// of n has p, p + n, p + 2n, … So shares differ by one at most. Weighed by its number of positions each rank's mean
// makes the mean of the batch. Ranks of unequal speed have unequal shares of it: then a place has consecutive
// positions, one and its part of the others (Share). Where positions cost differently, as sentences of unequal length,
// a place has as many as come nearest to its part of what the batch costs (Cost). Where a batch has fewer positions
// than there are ranks, places N and above compute what place p modulo N does, since every rank must take part, and
// weigh nothing; if a place is lost within the step, the lowest of those that have computed the same takes its part.
#ifndef RINGTRAIN_ELASTIC_SAMPLES_H_
#define RINGTRAIN_ELASTIC_SAMPLES_H_

#include <cstdint>
#include <vector>

#include "elastic/step.h"

namespace ringtrain {

enum class Cut : int32_t {
  kPositions = 0,      // a draw is one position; a few come twice where the last ones cannot be divided evenly
  kBatches = 1,        // a draw is this rank's share of a batch, of one size on all ranks together
  kGrowingBatches = 2  // of so many positions for each rank
};

struct SamplePlan {
  Cut cut = Cut::kPositions;
  int64_t count = 0;        // positions of the epoch
  int64_t batch = 1;        // positions of a batch, as the cut says
  bool drops_last = false;  // what is too little for a batch is left out, at the end of the epoch
};

class Samples {
 public:
  // next: the first position that was never dealt. given_back: positions before it that are to be dealt again,
  // ascending.
  Samples(const SamplePlan& plan, int64_t next, std::vector<int64_t> given_back);

  // Deals to so many ranks from here on, where nothing is taken.
  void Deal(int32_t size, int32_t place);
  // Of batches, from here on, where nothing is taken: what each place has beyond one position, in any unit; empty for
  // equal shares, as Deal leaves them to other ranks.
  void Share(const std::vector<int64_t>& parts);
  // What positions of the order cost, in turn: above 0, in any unit; none if all cost alike. Of batches, where nothing
  // is taken.
  void Cost(std::vector<int64_t> costs);
  // Gives up what was drawn for later windows.
  void ForgetAhead() { drawn_ = taken_; }
  // This rank's positions of the next draw, for whatever window; none if there is none left.
  std::vector<int64_t> DrawAhead();
  // So many more of the draws that were made ahead are in the open window, the earliest first. Returns how many
  // positions of this rank they have.
  int64_t Take(int64_t draws);
  // The window is released: what was dealt in it is done, at the places of these contributors.
  void Release(const Contributors& contributors);
  // Positions of the open window that this rank stands for among the contributors, which it is one of.
  int64_t Weight(const Contributors& contributors) const;
  // What this rank's positions of the open window cost; their number if all cost alike.
  int64_t Work() const;

  // As of the last window that was released.
  int64_t next() const { return next_; }
  const std::vector<int64_t>& given_back() const { return given_back_; }
  // Positions that no released window has taken.
  int64_t left() const { return static_cast<int64_t>(given_back_.size()) + plan_.count - next_; }
  // If nothing changes: draws that this rank still has in a window, and their positions.
  int64_t draws_left() const;
  int64_t shares_left() const;

  int32_t size() const { return size_; }
  int32_t place() const { return place_; }
  int64_t taken() const { return taken_; }  // draws in the open window
  int64_t drawn() const { return drawn_; }  // since the last release; more than taken() if it has drawn ahead
  int64_t batch() const { return batch_; }

 private:
  struct Slice {  // positions in a batch, from the first on, each a step further
    int64_t first, end, step;
  };
  bool by_position() const { return plan_.cut == Cut::kPositions; }
  int64_t Batches(int64_t positions) const;
  int64_t At(int64_t index) const;        // of what is left
  int64_t CountIn(int64_t number) const;  // positions of a batch
  int64_t CostAt(int64_t index) const;
  // Where each place's share of a batch begins in it, and the last one ends; none if shares are not consecutive.
  std::vector<int64_t> Begins(int64_t number) const;
  std::vector<int64_t> BeginsByCost(int64_t number, const std::vector<int64_t>& parts) const;
  Slice SliceOf(int64_t number) const;                     // of a batch, this rank's
  int64_t SizeOfShares(int64_t first, int64_t end) const;  // of batches
  int64_t Dealt(int64_t draws) const;
  // Of what is dealt, the positions that are no contributor's.
  std::vector<int64_t> Lost(int64_t dealt, const std::vector<int32_t>& contributors) const;

  SamplePlan plan_;
  int64_t next_;
  std::vector<int64_t> given_back_;
  int32_t size_ = 1, place_ = 0;
  std::vector<int64_t> before_;  // with unequal shares: the sum of the parts of all places before each, and of all
  std::vector<int64_t> costs_;   // of positions of the order
  int64_t batch_;
  int64_t taken_ = 0, drawn_ = 0;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_ELASTIC_SAMPLES_H_
