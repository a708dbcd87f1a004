// Batch: what one agreed step of the data plane moves, and Task: such a step under way. Built by the executor from
// responses.
#ifndef RINGTRAIN_COLLECTIVES_BATCH_H_
#define RINGTRAIN_COLLECTIVES_BATCH_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "base/status.h"
#include "collectives/ahead.h"
#include "collectives/residuals.h"
#include "kernels/codec.h"
#include "kernels/reduce.h"
#include "tables/tables.h"

namespace ringtrain {

struct BatchTensor {
  const char* input = nullptr;  // nullptr on a rank that has joined: it contributes nothing
  char* output = nullptr;       // nullptr on a rank that has joined, or has no memory: it wants nothing
  size_t bytes = 0;             // of the input, where all have the same shape
  size_t row_bytes = 0;         // of one row of the first dimension, where the layout has rows
  // As rows.h says for the layout of the operation; else empty.
  std::vector<int64_t> rows;
  int64_t most_within_host = 0;  // kExchange: rows that any two members of one host have for each other, at most
  int operation = 0;             // of those that share the batch: what an observer is told
  // What the codec has lost of the tensor so far, if it keeps that; of this one the elements from the offset on.
  Residual* residual = nullptr;
  size_t residual_offset = 0;
};

// One operation on several tensors; all tensors of one that reduces have the same dtype.
struct Batch {
  Operation operation = Operation::kAllreduce;
  Reduction reduction = Reduction::kSum;
  DType dtype = DType::kUInt8;
  const Codec* codec = &IdentityCodec();  // of what travels between hosts
  Scaling scaling;
  std::vector<double> weights;  // by member, of a weighted average: 0 contributes nothing; else empty
  int root = 0;                 // member
  std::vector<bool> joined;     // by member: takes part without a contribution
  std::vector<BatchTensor> tensors;
  Ahead ahead;  // of what goes to all hosts as it is

  DType wire() const { return codec->Wire(dtype); }
};

// The stages of a tensor's way, as the timeline shows them.
enum class Stage { kPack, kWire, kReduce, kUnpack };
constexpr int kStageCount = 4;

// Told when a stage of some tensors of an operation has run; only while a timeline is on.
class StageObserver {
 public:
  virtual ~StageObserver() = default;
  virtual void OnStage(Stage stage, int operation, int64_t begin, int64_t end, size_t bytes) = 0;
};

class Task {
 public:
  virtual ~Task() = default;
  // Does what can be done without waiting; the first call is the first to touch tensors. *moved if that was anything.
  // Bounded work, so that negotiation gets its turn.
  virtual Status Advance(bool* moved) = 0;
  virtual bool done() const = 0;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_COLLECTIVES_BATCH_H_
