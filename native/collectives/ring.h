// One chunk's way around the ring of hosts.
//
// The chunk lies in a slot, cut into one part for each host. Four hosts, parts a b c d; what each host holds after each step
// of the scatter-reduce (+ is a partial sum) and of the allgather (A is the finished part a):
//
//     start            step 1           step 2           step 3           allgather, 3 steps
//     0: a b c d       0: a b c+ d      0: a b+ c+ d     0: A  b+ c+ d    0: A B C D
//     1: a b c d       1: a b c d+      1: a b c+ d+     1: a  B  c+ d+   1: A B C D
//     2: a b c d       2: a+ b c d      2: a+ b c d+     2: a+ b  C  d+   2: A B C D
//     3: a b c d       3: a b+ c d      3: a+ b+ c d     3: a+ b+ c  D    3: A B C D
//
// Host h sends to h + 1 and receives from h - 1; part h is finished by host h, which adds last. Every host sends
// 2 (H - 1) / H of the chunk, the least there is (Patarasuk and Yuan, 2009). A pass never has more than one message each way
// under way; several chunks at once keep both directions of the wire full.
//
// 16-bit floats do not travel as partial sums, which would round at each host: every host's sum goes straight to the part's
// host, is added there in float32 in host order, and is rounded once. The bytes are the same.
//
// A batch whose wire is narrower than its dtype travels as a 16-bit image of the slot. Each host's sum is rounded into it, the
// part's host's own too, the average is taken before the sum is rounded, and all hosts widen the same bits; the postscale comes
// after that, so that it can bring back what the narrow format could not hold.
#ifndef RINGTRAIN_COLLECTIVES_RING_H_
#define RINGTRAIN_COLLECTIVES_RING_H_

#include <cstdint>
#include <vector>

#include "collectives/group.h"

namespace ringtrain {

class RingPass {
 public:
  struct Part {
    size_t offset, bytes;
  };

  // leaders: the member of each host that takes part. The batch outlives the pass; prescaling has been done within the hosts.
  RingPass(Group* group, std::vector<int> leaders, const Batch& batch);

  // Starts with the chunk in `slot`; parts by host. The slot is the pass's until it is done.
  void Start(char* slot, uint64_t chunk, std::vector<Part> parts);
  Status Advance(bool* moved);
  bool done() const { return phase_ == Phase::kDone; }
  // Time from the start to the end of the pass, for the timeline.
  int64_t started() const { return started_; }

 private:
  enum class Phase { kReduceStep, kDirectReduce, kGatherStep, kDone };

  bool narrows() const { return batch_.wire != batch_.dtype; }
  bool reduces() const { return batch_.operation == Operation::kAllreduce || batch_.operation == Operation::kReducescatter; }
  bool gathers() const { return batch_.operation != Operation::kReducescatter; }
  int Host(int distance) const;
  void Narrow();
  void Widen() const;
  Status StartStep();
  Status StartExchange(int send_part, int receive_part, char* receive_into);
  Status StartDirect();
  Status FinishStep();
  void FinishDirect();
  Status TestAll(bool* complete);
  Status Send(int host, int part);
  void Enter(Phase phase);
  void EndReduce();
  void Finish();

  Group* const group_;
  const std::vector<int> leaders_;  // member by host
  const Batch& batch_;
  const Scaling scaling_;  // of the last addition
  const int hosts_, me_;

  char* slot_ = nullptr;
  char* data_ = nullptr;     // what travels: the slot, or its image
  std::vector<char> image_;  // of a slot that is narrowed
  std::vector<Part> parts_;  // of data_
  int tag_ = 0;
  Phase phase_ = Phase::kDone;
  int step_ = 0;
  bool step_started_ = false;
  int64_t started_ = 0;
  std::vector<char> incoming_;              // partial sums on their way in
  std::vector<Transport::Ticket> tickets_;  // of the step under way
};

}  // namespace ringtrain
#endif  // RINGTRAIN_COLLECTIVES_RING_H_
