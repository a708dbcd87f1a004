#include "tensorflow/step_row.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "tables/look_schedule.h"

namespace ringtrain::tensorflow {
namespace {

struct StepRow {
  int64_t digest = 0;  // of the settings, which a graph has as they were when it was traced
  LookSchedule* schedule =
      nullptr;  // in Python's memory; what the graph calls where a look is asked for keeps it alive
};

// The bytes of the only input; nullptr if the kernel has failed.
const void* Input(TF_OpKernelContext* context, TensorPointer* held, const StatusPointer& status) {
  TF_Tensor* input = nullptr;
  tf().TF_GetInput(context, 0, &input, status.get());
  if (!Ok(status)) return nullptr;
  held->reset(input);
  return tf().TF_TensorData(input);
}

// The memory of the only output; nullptr if the kernel has failed.
void* Output(TF_OpKernelContext* context, TF_DataType dtype, int ndim, const int64_t* shape, size_t bytes,
             TensorPointer* held, const StatusPointer& status) {
  held->reset(tf().TF_AllocateOutput(context, 0, dtype, shape, ndim, bytes, status.get()));
  return Ok(status) ? tf().TF_TensorData(held->get()) : nullptr;
}

// Zeros count nothing, as of a rank that has joined.
void Fill(const StepRow& step_row, const void* rate, uint8_t* row) {
  const TakenStep taken = TakeStep(step_row.schedule);
  std::memset(row, 0, kRow);
  row[kRow - 1] = taken.asks ? 1 : 0;
  if (!taken.counts) return;
  std::memcpy(row, &step_row.digest, sizeof step_row.digest);
  std::memcpy(row + sizeof step_row.digest, rate, sizeof(double));
  std::transform(row, row + kSaid, row + kSaid, [](uint8_t byte) { return static_cast<uint8_t>(~byte); });
}

bool IsQuiet(const uint8_t* most) {
  if (most[kRow - 1] != 0) return false;
  const auto is_complement = [](uint8_t one, uint8_t other) { return one == static_cast<uint8_t>(~other); };
  return std::equal(most, most + kSaid, most + kSaid, is_complement) ||
         std::all_of(most, most + 2 * kSaid, [](uint8_t byte) { return byte == 0; });
}

}  // namespace

void* CreateStepRow(TF_OpKernelConstruction* construction) {
  StatusPointer status = NewStatus();
  auto step_row = std::make_unique<StepRow>();
  int64_t address = 0;
  tf().TF_OpKernelConstruction_GetAttrInt64(construction, "digest", &step_row->digest, status.get());
  if (Ok(status)) tf().TF_OpKernelConstruction_GetAttrInt64(construction, "schedule", &address, status.get());
  step_row->schedule = reinterpret_cast<LookSchedule*>(address);
  if (Ok(status)) return step_row.release();
  tf().TF_OpKernelConstruction_Failure(construction, status.get());
  return nullptr;
}

void ComputeStepRow(void* step_row, TF_OpKernelContext* context) {
  StatusPointer status = NewStatus();
  TensorPointer input, output;
  const int64_t shape[] = {static_cast<int64_t>(kRow)};
  const void* rate = Input(context, &input, status);
  void* row = rate == nullptr ? nullptr : Output(context, TF_UINT8, 1, shape, kRow, &output, status);
  if (row != nullptr) return Fill(*static_cast<const StepRow*>(step_row), rate, static_cast<uint8_t*>(row));
  tf().TF_OpKernelContext_Failure(context, status.get());
}

void DeleteStepRow(void* step_row) { delete static_cast<StepRow*>(step_row); }

void ComputeIsQuiet(void*, TF_OpKernelContext* context) {
  StatusPointer status = NewStatus();
  TensorPointer input, output;
  const void* most = Input(context, &input, status);
  void* quiet = most == nullptr ? nullptr : Output(context, TF_BOOL, 0, nullptr, sizeof(bool), &output, status);
  if (quiet != nullptr)
    *static_cast<bool*>(quiet) = IsQuiet(static_cast<const uint8_t*>(most));
  else
    tf().TF_OpKernelContext_Failure(context, status.get());
}

}  // namespace ringtrain::tensorflow
