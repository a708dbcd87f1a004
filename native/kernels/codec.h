// Codec: the form in which elements travel between hosts, and the one place that knows it: how many bytes it takes, how
// it is made, added up and turned back, what must not be cut, and what is kept of a tensor from one time to the next.
//
// The data plane (collectives/image.h) chooses a codec once for each batch, by its compression and dtype, and calls it
// for each *run*: elements of one tensor that lie side by side. Every host encodes its sum of a run; the host that
// finishes the run decodes those of all hosts, adds them in host order, and encodes the result, which all decode. So
// nothing is rounded more than twice, however many hosts there are.
#ifndef RINGTRAIN_KERNELS_CODEC_H_
#define RINGTRAIN_KERNELS_CODEC_H_

#include <cstddef>

#include "kernels/reduce.h"
#include "tables/tables.h"

namespace ringtrain {

// What encoding has lost of each element of a run: the last time, which is made up for now, and this time. Two places,
// so that what a step has lost can be taken back with the step. Both nullptr where nothing is kept.
struct Feedback {
  const float* before = nullptr;
  float* after = nullptr;
};

class Codec {
 public:
  // What it is for every tensor. Equal on all ranks: cuts and sizes of messages follow from it.
  struct Form {
    // Elements of a block, which are encoded together. A run begins where a block begins, counted from the start of the
    // tensor, or of a member's share of one, and ends where a block ends or with the tensor or share. 1: any element
    // may be the first of a run. In a window too small for a block, blocks are cut to what fits.
    size_t block = 1;
    // Tensors of fewer elements travel as they are.
    size_t least = 0;
    // Keeps what encoding has lost of each element, and makes up for it the next time (collectives/residuals.h).
    bool feedback = false;
  };

  explicit Codec(const Form& form) : form_(form) {}
  virtual ~Codec() = default;
  Codec(const Codec&) = delete;
  Codec& operator=(const Codec&) = delete;

  const Form& form() const { return form_; }

  // Whether elements of the dtype travel as they lie in memory. Then Encode and Decode are not called.
  virtual bool identity() const { return false; }
  // Whether a sum over some hosts may travel on, to be added to by the next one: it must not be rounded for that.
  virtual bool PartialSums(DType) const { return false; }
  // The dtype that elements of `dtype` have on the wire; `dtype` itself where the encoded form is none. What knows
  // dtypes alone goes by it: NCCL, the kernels on GPUs, Adasum.
  virtual DType Wire(DType dtype) const { return dtype; }

  // Bytes of a run on the wire. By the count alone, never by values: all members count the same messages.
  virtual size_t WireBytes(DType dtype, size_t count) const = 0;

  // The functions below take `wire` at any address. No overlap, except that Reduce may write to the very address of a
  // source. feedback: where the codec keeps it.

  // wire = encoded (elements + before); after = what that has lost.
  virtual void Encode(DType dtype, char* wire, const void* elements, size_t count, Feedback feedback) const = 0;
  // elements = decoded wire * factor, in `dtype`.
  virtual void Decode(DType dtype, void* elements, const char* wire, size_t count, double factor) const = 0;
  // wire = encoded (scale(s0 ∘ s1 ∘ …) + before), left to right over the decoded sources; after = what that has lost.
  // The scaling is the divisor, and the postscale of the identity: all else happens before the first encoding.
  virtual void Reduce(DType dtype, Reduction reduction, char* wire, const void* const* sources, int source_count,
                      size_t count, const Scaling& scaling, Feedback feedback) const = 0;

 private:
  const Form form_;
};

// For what is not compressed.
const Codec& IdentityCodec();
// For a tensor of `elements` of an operation that reduces. The identity where the compression does not concern it.
// Without feedback where the operation's name does not come again.
const Codec& CodecFor(Compression compression, DType dtype, size_t elements, bool comes_again = true);

}  // namespace ringtrain
#endif  // RINGTRAIN_KERNELS_CODEC_H_
