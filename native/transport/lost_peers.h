// LostPeers: which peers a wire has lost, and which of them nobody has been told of yet. For wires to implement
// TakeLostPeer with.
#ifndef RINGTRAIN_TRANSPORT_LOST_PEERS_H_
#define RINGTRAIN_TRANSPORT_LOST_PEERS_H_

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "transport/wire.h"

namespace ringtrain {

class LostPeers {
 public:
  bool any() const { return !lost_.empty(); }
  bool Has(int rank) const { return any() && Find(rank); }
  // The first cause of a rank counts.
  void Add(int rank, std::string cause) {
    if (!Has(rank)) lost_.push_back({rank, std::move(cause), false});
  }
  // No frame is left that had arrived: the peers that are lost by now may be told of.
  void FramesAreTaken() {
    if (any()) tellable_ = lost_.size();
  }
  bool Take(LostPeer* lost) {
    if (told_ == tellable_) return false;
    *lost = lost_[told_++];
    return true;
  }

 private:
  bool Find(int rank) const {
    for (const LostPeer& lost : lost_)
      if (lost.rank == rank) return true;
    return false;
  }

  std::vector<LostPeer> lost_;      // in the order in which they were
  size_t told_ = 0, tellable_ = 0;  // of them, counted from the first
};

}  // namespace ringtrain
#endif  // RINGTRAIN_TRANSPORT_LOST_PEERS_H_
