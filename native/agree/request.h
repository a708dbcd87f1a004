// Request: what one rank wants. Response: what all members of a process set have agreed to do. Both are values.
#ifndef RINGTRAIN_AGREE_REQUEST_H_
#define RINGTRAIN_AGREE_REQUEST_H_

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "agree/shape.h"
#include "base/bytes.h"
#include "base/status.h"
#include "tables/tables.h"

namespace ringtrain {

struct TensorSpec {
  DType dtype = DType::kFloat32;
  Shape shape;

  bool operator==(const TensorSpec& other) const { return dtype == other.dtype && shape == other.shape; }
  int64_t elements() const;
  int64_t row_elements() const;  // of one row of the first dimension
  size_t bytes() const { return static_cast<size_t>(elements()) * Bytes(dtype); }
  size_t row_bytes() const { return static_cast<size_t>(row_elements()) * Bytes(dtype); }
  std::string Text() const;  // float32[128, 10]
};

// Kinds of tables/attributes.def.
enum class AttributeKind { kReduction, kCompression, kFactor, kOwnCount, kRank };
// Their types, in the same order.
template <AttributeKind kind>
using AttributeValue =
    std::tuple_element_t<static_cast<size_t>(kind), std::tuple<Reduction, Compression, double, int64_t, int>>;

constexpr int kAnyRank = -1;  // root of a receive

struct Request {
  static constexpr int64_t kNoCount = -1;  // of an attribute kOwnCount

  std::string name;
  Operation operation = Operation::kAllreduce;
#define RT_ATTRIBUTE(name, kind, initial, scope, label, advice) \
  AttributeValue<AttributeKind::kind> name = static_cast<AttributeValue<AttributeKind::kind>>(initial);
#include "tables/attributes.def"
#undef RT_ATTRIBUTE
  int device = -1;  // host memory, or a GPU's index
  bool cacheable = true;
  std::vector<TensorSpec> tensors;  // several: a group
  // alltoall: rows for each member; process sets: ranks, or the id; of a pair: the tag
  std::vector<int64_t> splits;

  bool operator==(const Request& other) const;
  // allreduce 'fc1.bias'
  std::string Subject() const;
  size_t bytes() const;
  // The rows that this member says (collectives/rows.h): kGather, of each tensor; kExchange, for each member; else
  // none.
  std::vector<int64_t> own_rows() const;
  void set_own_rows(const int64_t* rows);
};

struct Response {
  Request request;  // the members'; where something may differ, the lists below have it. kExchange: this member's own
  // What members say of their rows (collectives/rows.h). kGather: [member * tensors + tensor]. kExchange: what each has
  // for this member, and at the end the most that any two of one host have for each other.
  std::vector<int64_t> rows;
  int result = -1;  // join: the last rank; add_process_set: the id
  // Members' own attributes, named in the plural: by member, 0 for one that has joined; else empty.
#define RT_ATTRIBUTE(name, kind, initial, scope, label, advice)
#define RT_OWN_ATTRIBUTE(name, kind, initial, scope, label, advice) std::vector<int64_t> name##s;
#include "tables/attributes.def"
#undef RT_ATTRIBUTE
  std::vector<int64_t> devices;  // tensors on GPUs: by member, -1 for one that has joined; else empty
  // kExchange, on the coordinator alone: [from * members + to]. All of it to each member would be a number for each
  // triple of members.
  std::shared_ptr<const std::vector<int64_t>> exchanged;

  // On the coordinator: what this member is told.
  Response For(int member, int members) const;
  // The request that this member must have sent for the response to fit. kExchange: this rank's, unless it coordinates.
  Request RequestOf(int member, int members) const;
  // Whether it is this one; without making it where all members' are the same.
  bool IsOf(int member, int members, const Request& request) const;
};

void Encode(const TensorSpec& tensor, Encoder* encoder);
TensorSpec DecodeTensor(Decoder* decoder);
void Encode(const Request& request, Encoder* encoder);
Request DecodeRequest(Decoder* decoder);
void Encode(const Response& response, Encoder* encoder);
Response DecodeResponse(Decoder* decoder);

}  // namespace ringtrain
#endif  // RINGTRAIN_AGREE_REQUEST_H_
