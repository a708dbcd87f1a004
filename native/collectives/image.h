// Image: a chunk's slot as it travels between hosts, in the form of the batch's codec. With the identity it is the slot
// itself, so nothing is copied; else it lies in memory of its own, a part for each host, run after run.
#ifndef RINGTRAIN_COLLECTIVES_IMAGE_H_
#define RINGTRAIN_COLLECTIVES_IMAGE_H_

#include <cstddef>
#include <vector>

#include "base/counters.h"
#include "collectives/batch.h"
#include "collectives/partition.h"

namespace ringtrain {

class Image {
 public:
  // The batch and the counters outlive the image.
  Image(const Batch& batch, Counters* counters) : batch_(batch), codec_(*batch.codec), counters_(counters) {}

  // Takes the cells of one ring, one for each host, which lie in `slot`, and encodes them.
  void Take(char* slot, const Chunk& chunk, int ring, int hosts);

  // What travels of the host's cell.
  char* at(int host) const { return data_ + parts_[host].offset; }
  size_t bytes(int host) const { return parts_[host].bytes; }

  // Of all parts, which lie one behind the other from at(0) on.
  size_t total() const { return encoded_bytes_; }
  // Whether something is kept of what rounding loses: then a part can be finished by its own host alone.
  bool keeps() const { return codec_.form().feedback; }

  // to = scale(s0 ∘ s1 ∘ …); it and each source have the form of that host's part, and it may be one of them.
  void Reduce(int host, char* to, const void* const* sources, int source_count, const Scaling& scaling);
  // Back into the slot, with the postscale. Nothing to do for the identity, whose postscale belongs to the last sum.
  void Decode(int host) const;

 private:
  struct Part {
    size_t offset, bytes;
    int first, end;  // its runs
  };
  struct Run {
    char* elements;  // in the slot
    size_t count;
    size_t offset;       // of what travels
    Residual* residual;  // nullptr where the codec keeps none; else from element `first` on
    size_t first;
  };

  Feedback Sent(const Run& run) const;
  Feedback Finished(const Run& run) const;
  void AddRun(char* elements, const Segment& segment, size_t bytes);

  const Batch& batch_;
  const Codec& codec_;
  Counters* const counters_;
  char* data_ = nullptr;
  std::vector<Part> parts_;  // by host
  std::vector<Run> runs_;
  size_t encoded_bytes_ = 0;
  std::vector<char> encoded_;
  std::vector<const void*> sources_;  // of one run; kept to save allocating it
};

}  // namespace ringtrain
#endif  // RINGTRAIN_COLLECTIVES_IMAGE_H_
