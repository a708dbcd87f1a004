#include "agree/ahead.h"

#include <algorithm>
#include <utility>

#include "agree/check.h"

namespace ringtrain {
namespace {

constexpr size_t kMostBytes =
    4096;  // of a batch: it is sealed with the frame (transport/tcp/record.h), which takes time

}  // namespace

bool GoesAhead(const std::vector<const Response*>& batch) {
  size_t bytes = 0;
  const Request& first = batch[0]->request;
  const DType dtype = first.tensors.empty() ? DType::kUInt8 : first.tensors[0].dtype;
  for (const Response* response : batch) {
    bytes += response->request.bytes();
    if (!IsPlain(*response, first) || bytes > kMostBytes) return false;
    for (const TensorSpec& tensor : response->request.tensors)
      if (tensor.dtype != dtype) return false;
  }
  return bytes > 0;
}

void AheadOf::Send(uint32_t schedule, uint64_t batch, const std::string& contribution, std::string* carried) {
  Encoder encoder;
  encoder.Unsigned(batch);
  encoder.Text(contribution);
  *carried += encoder.Take();
  batches_[{schedule, batch}].sent = true;
}

bool AheadOf::Receive(uint32_t schedule, const std::string& carried) {
  Decoder decoder(carried);
  while (decoder.ok() && !decoder.AtEnd()) {
    const uint64_t number = decoder.Unsigned();
    std::string contribution = decoder.Text();
    if (!decoder.ok()) return false;
    Ahead& batch = batches_[{schedule, number}];
    batch.came = true;
    batch.contribution = std::move(contribution);
  }
  return decoder.ok();
}

Ahead AheadOf::Take(uint32_t schedule, uint64_t batch) {
  const auto behind = batches_.upper_bound({schedule, batch});
  Ahead taken;
  const auto found = batches_.find({schedule, batch});
  if (found != batches_.end()) taken = std::move(found->second);
  batches_.erase(batches_.begin(), behind);
  return taken;
}

}  // namespace ringtrain
