// Alltoall: each member sends other rows to every other. Members of one host exchange them through the window, chunk by
// chunk; between hosts every pair exchanges its rows directly, a few pairs at a time, from input to output without a
// copy of ours.
#ifndef RINGTRAIN_COLLECTIVES_ALLTOALL_H_
#define RINGTRAIN_COLLECTIVES_ALLTOALL_H_

#include <vector>

#include "collectives/group.h"
#include "collectives/rows.h"

namespace ringtrain {

class Alltoall : public Task {
 public:
  Alltoall(Batch batch, Group* group, StageObserver* observer);

  Status Advance(bool* moved) override;
  bool done() const override {
    return own_copied_ == own_bytes_ && consumed_ == end_ && pairs_done_ == pairs_ && messages_.empty();
  }

 private:
  size_t BytesTo(int to) const { return RowsTo(tensor_.rows, to) * tensor_.row_bytes; }
  size_t BytesFrom(int from) const { return RowsFrom(tensor_.rows, members_, from) * tensor_.row_bytes; }
  uint64_t LocalChunks() const;

  bool TryPack();
  bool TryFetch();
  Status StartPair();
  Status TestMessages(bool* moved);
  bool TryCopyOwn();

  const Batch batch_;
  const BatchTensor& tensor_;
  Group* const group_;
  StageObserver* const observer_;
  const int members_, me_, local_, locals_;
  const size_t step_bytes_;  // of each pair on this host in one chunk
  const uint64_t begin_, end_;
  uint64_t packed_, consumed_;
  const uint64_t exchange_;                             // number of this alltoall
  const size_t own_bytes_;                              // that stay on this member
  std::vector<size_t> input_offsets_, output_offsets_;  // by member: of what it gets, and gives
  size_t own_copied_ = 0;
  int pairs_done_ = 0;  // distances to members on other hosts that were started
  int pairs_;
  std::vector<Wire::Ticket> messages_;
  int64_t wire_begin_ = 0;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_COLLECTIVES_ALLTOALL_H_
