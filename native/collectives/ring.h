// One chunk's way around the ring of hosts.
//
// The chunk lies in a slot, cut into one part for each host. Four hosts, parts a b c d; what each host holds after each
// step of the scatter-reduce (+ is a partial sum) and of the allgather (A is the finished part a):
//
//     start            step 1           step 2           step 3           allgather, 3 steps
//     0: a b c d       0: a b c+ d      0: a b+ c+ d     0: A  b+ c+ d    0: A B C D
//     1: a b c d       1: a b c d+      1: a b c+ d+     1: a  B  c+ d+   1: A B C D
//     2: a b c d       2: a+ b c d      2: a+ b c d+     2: a+ b  C  d+   2: A B C D
//     3: a b c d       3: a b+ c d      3: a+ b+ c d     3: a+ b+ c  D    3: A B C D
//
// Host h sends to h + 1 and receives from h - 1; part h is finished by host h, which adds last. Every host sends
// 2 (H - 1) / H of the chunk, the least there is (Patarasuk and Yuan, 2009). A pass never has more than one message
// each way under way; several chunks at once keep both directions of the wire full.
//
// 16-bit floats do not travel as partial sums, which would round at each host: every host's sum goes straight to the
// part's host, is added there in float32 in host order, and is rounded once. The bytes are the same.
//
// Sites. Where long lines connect sites, the ring is one of the k hosts of a site, and its parts are strands: of the
// parts p of all hosts, strand s has those with p mod k = s. Host h has strand h mod k, in which its own part is.
// Between the two halves each host exchanges the parts of its strand with those that have them at the other sites,
// where k may be another. So every byte crosses a line once each way:
//
//     site 0: hosts 0 1, site 1: hosts 2 3; strand 0 is a c, strand 1 is b d
//     start         ring in a site    exchange           ring in a site
//     0: a b c d    0: a+ b c+ d      0: A b C d         0: A B C D       0 and 2 exchange a+ c+ with each other,
//     1: a b c d    1: a b+ c d+      1: a B c D         1: A B C D       1 and 3 b+ d+
//
// Two sites send each other all parts, and each adds both. Of more of them each host adds the part that is its own, and
// hands it out. A part's sum is that of the sites' sums, site by site.
//
// Small batches take fewer steps, since their time is that of the steps, not of the bytes. A part's host gets from all
// others what they contribute to it, adds that in the order of the ring, and hands the sum out: 2 steps between few
// hosts, 2 log2(H) between many (doubling.h). A chunk that is smaller still goes to all hosts as it is, in 1 or
// log2(H); each host then does what all of them do above. Between two hosts that are far from each other a large one
// does, too: the bytes are the same, and it crosses once. All have the same operands in the same order: the bits are
// the same.
//
// Of a batch that is smaller still what this host contributes may have gone ahead of it, and what the other does may
// have come: then there is nothing to send, or to receive.
//
// A compressed batch travels as an image of the slot (image.h), in the same way. Each host's sum is encoded into it,
// the part's host's own too, the average is taken before the sum is encoded, and all hosts decode the same bits; the
// postscale comes after that, so that it can bring back what the encoded form could not hold.
#ifndef RINGTRAIN_COLLECTIVES_RING_H_
#define RINGTRAIN_COLLECTIVES_RING_H_

#include <cstdint>
#include <vector>

#include "collectives/doubling.h"
#include "collectives/group.h"
#include "collectives/host_messages.h"
#include "collectives/image.h"

namespace ringtrain {

class RingPass {
 public:
  // leaders: the member of each host that takes part. The batch, of so many chunks, outlives the pass; prescaling has
  // been done within the hosts.
  RingPass(Group* group, std::vector<int> leaders, const Batch& batch, int chunks);

  // Starts with the cells of `ring` of a chunk, which lie in `slot`: it is the pass's until it is done. number: the
  // chunk's, in the window's sequence. ahead: what has come of it before from the other host, else nullptr.
  void Start(char* slot, const Chunk& chunk, int ring, uint64_t number, const char* ahead);
  Status Advance(bool* moved);
  bool done() const { return phase_ == Phase::kDone; }
  // Of the chunk, as it travels.
  size_t bytes() const { return image_.total(); }
  // Time from the start to the end of the pass, for the timeline.
  int64_t started() const { return started_; }

 private:
  enum class Way { kWhole, kAtOnce, kDoubling, kRing };
  enum class Phase {
    kWhole,           // to all hosts as it is
    kWholeDoubling,   // the same, from host to host
    kReduceStep,      // of the ring
    kDirectReduce,    // to the parts' hosts
    kDoublingReduce,  // the same, from host to host
    kStrand,          // between two sites
    kCrossReduce,     // to the parts' hosts at other sites
    kCrossGather,     // from there
    kDirectGather,    // from the parts' hosts
    kDoublingGather,  // the same, from host to host
    kGatherStep,      // of the ring
    kDone
  };

  int Host(int distance) const { return (me_ + distance + hosts_) % hosts_; }  // from this one on
  // Of the ring within the site: a strand, from this host's own on.
  int Strand(int distance) const { return ((me_ + distance) % places_ + places_) % places_; }
  // The host of a site that has a strand, or that of a part.
  int HostWith(int site, int part) const;
  int sites() const { return topology_.site_count(); }
  // action(part) for each of this host's strand; a Status.
  template <typename Action>
  Status ForStrand(int strand, Action action) const;

  Way Choose() const;
  Phase First() const;
  Phase Following(Phase phase) const;
  int Steps(Phase phase) const;
  Status StartStep();
  void FinishStep();
  void FinishPhase();
  Status StartRingStep(int send_strand, int receive_strand, bool adds);
  Status StartStrand();
  Status StartCrossReduce();
  void FinishCrossReduce();
  Status StartCrossGather();
  void AddStrand(int strand, bool came_first, const Scaling& scaling);
  size_t StrandBytes(int strand) const;
  Status StartDirectReduce();
  void FinishDirectReduce();
  void FinishDoublingReduce();
  Status StartDirectGather();
  Status StartWhole();
  Status StartWholeDoubling();
  void FinishWhole();
  void AddAsOnTheWay(int part, const std::vector<char*>& by_host);
  Status Receive(int host, int part) { return messages_.Receive(host, image_.at(part), image_.bytes(part)); }
  Status Send(int host, int part) { return messages_.Send(host, image_.at(part), image_.bytes(part)); }
  char* Room(size_t bytes);
  void Enter(Phase phase);
  void Finish();

  Group* const group_;
  const bool reduces_, gathers_;  // which of the two halves there are
  const bool direct_;             // partial sums do not travel
  const bool sent_ahead_;         // by this host
  const Scaling scaling_;         // of the last addition
  const Topology& topology_;
  const int hosts_, me_;
  const size_t chunks_;
  const int site_, places_;  // this host's site, and how many hosts that has

  Image image_;  // what travels
  HostMessages messages_;
  Doubling doubling_;
  const char* ahead_ = nullptr;
  Way way_ = Way::kRing;
  Phase phase_ = Phase::kDone;
  int step_ = 0;  // of the phase
  bool step_started_ = false;
  int64_t started_ = 0;
  std::vector<char> incoming_;  // sums on their way in; of all other hosts, by distance, or of the last one
};

}  // namespace ringtrain
#endif  // RINGTRAIN_COLLECTIVES_RING_H_
