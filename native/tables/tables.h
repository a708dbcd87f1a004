// The .def tables as C++ enumerations and rows. Each list exists once, in its .def file.
#ifndef RINGTRAIN_TABLES_TABLES_H_
#define RINGTRAIN_TABLES_TABLES_H_

#include <cstddef>
#include <cstdint>

namespace ringtrain {

enum class DType : int32_t {
#define RT_DTYPE(name, id, bytes, dlpack_code, dlpack_bits, text) name = id,
#include "tables/dtypes.def"
#undef RT_DTYPE
};

enum class Operation : int32_t {
#define RT_OPERATION(name, id, text, reduces, rooted, layout, fuses, adjoint) name = id,
#include "tables/operations.def"
#undef RT_OPERATION
};

#define RT_OPERATION(name, id, text, reduces, rooted, layout, fuses, adjoint) +1
constexpr int kOperationCount = 0
#include "tables/operations.def"
    ;
#undef RT_OPERATION

enum class Reduction : int32_t {
#define RT_REDUCTION(name, id, text, map, fold, finish) name = id,
#include "tables/reductions.def"
#undef RT_REDUCTION
};

enum class Compression : int32_t {
#define RT_COMPRESSION(name, id, text, adds, casts) name = id,
#include "tables/compressions.def"
#undef RT_COMPRESSION
};

enum class StatusCode : int32_t {
#define RT_STATUS(name, id, text) name = id,
#include "tables/status.def"
#undef RT_STATUS
};

enum class Counter : int32_t {
#define RT_COUNTER(name, id, text, sentence) name = id,
#include "tables/counters.def"
#undef RT_COUNTER
};
#define RT_COUNTER(name, id, text, sentence) +1
constexpr int kCounterCount = 0
#include "tables/counters.def"
    ;
#undef RT_COUNTER

// Which rows of a tensor a member contributes and receives; collectives/rows.h computes with it.
enum class Layout : int32_t { kWhole, kGather, kScatter, kExchange, kPair, kNone };
// The result: of the input's shape; of another first dimension, known after negotiation; no data.
enum class Output : int32_t { kSame, kRows, kNone };
constexpr Output OutputOf(Layout layout) {
  if (layout == Layout::kNone) return Output::kNone;
  return layout == Layout::kWhole || layout == Layout::kPair ? Output::kSame : Output::kRows;
}

// What can be computed with elements of a type; of kNone nothing: they are moved alone.
enum class Arithmetic : int32_t { kBool, kInteger, kFloat, kComplex, kNone };
// Whether sums are rounded, and so depend on their order.
constexpr bool Rounds(Arithmetic arithmetic) {
  return arithmetic == Arithmetic::kFloat || arithmetic == Arithmetic::kComplex;
}
struct DTypeRow {
  size_t bytes;
  Arithmetic arithmetic;
  const char* text;
};
struct OperationRow {
  const char* text;
  bool reduces;
  bool rooted;
  Layout layout;
  Output output;  // that of the layout
  bool fuses;
};

// What a reduction does with each contribution, with two values, and with the last of them (kernels/reduce.cc).
enum class Map : int32_t { kItself, kSquare };
enum class Fold : int32_t { kAdd, kMultiply, kLeast, kGreatest, kProject, kAnd, kOr, kXor };  // kProject: Adasum's
enum class Finish : int32_t { kLeave, kDivide, kRoot, kDivideByWeights };                     // kDivide: by the ranks
struct ReductionRow {
  const char* text;
  Map map;
  Fold fold;
  Finish finish;
  // Whether the result is a multiple of the sum, so that what a codec loses may be added later.
  bool adds() const { return map == Map::kItself && fold == Fold::kAdd; }
  // Whether a division follows: of integers and of bool it would lose something.
  bool divides() const { return finish == Finish::kDivide || finish == Finish::kDivideByWeights; }
  // Whether it is one of the bits of integers, and of truth values.
  bool takes_bits() const { return fold == Fold::kAnd || fold == Fold::kOr || fold == Fold::kXor; }
};

struct CompressionRow {
  const char* text;
  bool adds;   // for sums and averages alone
  bool casts;  // each element travels by itself as a dtype, and nothing is kept of what that has lost
};

// The operations for which an attribute of a request counts.
enum class Scope : int32_t { kReduces, kRooted };
inline bool Counts(Scope scope, const OperationRow& operation) {
  return scope == Scope::kReduces ? operation.reduces : operation.rooted;
}

// nullptr for an id without a row: ids come from outside.
const DTypeRow* Find(DType dtype);
const OperationRow* Find(Operation operation);
const ReductionRow* Find(Reduction reduction);
const CompressionRow* Find(Compression compression);
const char* Text(Reduction reduction);
const char* Text(Compression compression);
const char* Text(StatusCode code);

inline const char* Text(DType dtype) { return Find(dtype)->text; }
inline const char* Text(Operation operation) { return Find(operation)->text; }
inline size_t Bytes(DType dtype) { return Find(dtype)->bytes; }

// The table called `name` as text, one row a line, columns parted by tabs; nullptr if there is none.
const char* TableText(const char* name);

}  // namespace ringtrain
#endif  // RINGTRAIN_TABLES_TABLES_H_
