// Batch: what one agreed step of the data plane moves, and Task: such a step under way. Built by the executor from responses.
#ifndef RINGTRAIN_COLLECTIVES_BATCH_H_
#define RINGTRAIN_COLLECTIVES_BATCH_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "base/status.h"
#include "kernels/reduce.h"
#include "tables/tables.h"

namespace ringtrain {

struct BatchTensor {
  const char* input = nullptr;  // nullptr on a rank that has joined: it contributes nothing
  char* output = nullptr;       // nullptr on a rank that has joined: it wants nothing
  size_t bytes = 0;             // of the input where all have the same shape, of the whole of it for reducescatter
  size_t row_bytes = 0;         // allgather, alltoall, reducescatter: bytes of one row of the first dimension
  // Rows by member: allgather, what it contributes; reducescatter, what it receives. alltoall: rows [from * members + to].
  std::vector<int64_t> rows;
};

// One operation on several tensors; all tensors of one that reduces have the same dtype.
struct Batch {
  Operation operation = Operation::kAllreduce;
  Reduction reduction = Reduction::kSum;
  DType dtype = DType::kUInt8;
  DType wire = DType::kUInt8;  // in which it travels between hosts: `dtype`, or float16 or bfloat16 for wider floats
  Scaling scaling;
  std::vector<double> weights;  // by member, of a weighted average: 0 contributes nothing; else empty
  int root = 0;                 // member
  std::vector<bool> joined;  // by member: takes part without a contribution
  std::vector<BatchTensor> tensors;
};

// The stages of a tensor's way, as the timeline shows them.
enum class Stage { kPack, kWire, kReduce, kUnpack };
constexpr int kStageCount = 4;

// Told when a stage of some tensors of the batch has run; only while a timeline is on.
class StageObserver {
 public:
  virtual ~StageObserver() = default;
  virtual void OnStage(Stage stage, int tensor, int64_t begin, int64_t end, size_t bytes) = 0;
};

class Task {
 public:
  virtual ~Task() = default;
  // Does what can be done without waiting; the first call is the first to touch tensors. *moved if that was anything. Bounded work, so that negotiation gets its turn.
  virtual Status Advance(bool* moved) = 0;
  virtual bool done() const = 0;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_COLLECTIVES_BATCH_H_
