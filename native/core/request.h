// Request: what one rank wants. Response: what all members of a process set have agreed to do. Both are values.
#ifndef RINGTRAIN_CORE_REQUEST_H_
#define RINGTRAIN_CORE_REQUEST_H_

#include <cstdint>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/status.h"
#include "tables/tables.h"

namespace ringtrain {

struct TensorSpec {
  DType dtype = DType::kFloat32;
  std::vector<int64_t> shape;

  bool operator==(const TensorSpec& other) const { return dtype == other.dtype && shape == other.shape; }
  int64_t elements() const;
  int64_t row_elements() const;  // of one row of the first dimension
  size_t bytes() const { return static_cast<size_t>(elements()) * Bytes(dtype); }
  size_t row_bytes() const { return static_cast<size_t>(row_elements()) * Bytes(dtype); }
  std::string Text() const;  // float32[128, 10]
};

struct Request {
  static constexpr int64_t kUnweighted = -1;

  std::string name;
  Operation operation = Operation::kAllreduce;
  Reduction reduction = Reduction::kSum;
  double prescale = 1.0, postscale = 1.0;
  int64_t weight = kUnweighted;  // of this member's contribution to an average
  Compression compression = Compression::kNone;
  int root = -1;    // global rank
  int device = -1;  // host memory, or a GPU's index
  bool cacheable = true;
  std::vector<TensorSpec> tensors;  // several: a group
  std::vector<int64_t> splits;      // alltoall: rows for each member; process sets: ranks, or the id

  bool operator==(const Request& other) const;
  // allreduce 'fc1.weight'
  std::string Subject() const;
  size_t bytes() const;
};

struct Response {
  Request request;  // the members'; where something may differ, the lists below have it
  // allgather: rows [member * tensors + tensor]; alltoall: rows [from * members + to]; else empty.
  std::vector<int64_t> rows;
  int result = -1;  // join: the last rank; add_process_set: the id
  std::vector<int64_t> weights;  // weighted average: by member, 0 for one that has joined; else empty
  std::vector<int64_t> devices;  // tensors on GPUs: by member, -1 for one that has joined; else empty

  // The request that this member must have sent for the response to fit.
  Request RequestOf(int member, int members) const;
};

// The dtype in which tensors of `dtype` travel between hosts.
DType WireDType(Compression compression, DType dtype);

// What this rank can see alone to be wrong with a request of its own. members: global ranks of the process set.
Status Check(const Request& request, const std::vector<int>& members);

void Encode(const Request& request, Encoder* encoder);
Request DecodeRequest(Decoder* decoder);
void Encode(const Response& response, Encoder* encoder);
Response DecodeResponse(Decoder* decoder);

}  // namespace ringtrain
#endif  // RINGTRAIN_CORE_REQUEST_H_
