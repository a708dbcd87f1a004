// Rows of the tables, for C++ by id and for Python as text.
#include "tables/tables.h"

#include <cstring>

namespace ringtrain {
namespace {

constexpr Arithmetic ArithmeticOf(int dlpack_code) {
  switch (dlpack_code) {
    case 0:
    case 1:
      return Arithmetic::kInteger;
    case 2:
    case 4:
      return Arithmetic::kFloat;
    case 5:
      return Arithmetic::kComplex;
    case 6:
      return Arithmetic::kBool;
    default:
      return Arithmetic::kNone;
  }
}

}  // namespace

const DTypeRow* Find(DType dtype) {
  switch (dtype) {
#define RT_DTYPE(name, id, bytes, dlpack_code, dlpack_bits, text)         \
  case DType::name: {                                                     \
    static const DTypeRow row = {bytes, ArithmeticOf(dlpack_code), text}; \
    return &row;                                                          \
  }
#include "tables/dtypes.def"
#undef RT_DTYPE
  }
  return nullptr;
}

const OperationRow* Find(Operation operation) {
  switch (operation) {
#define RT_OPERATION(name, id, text, reduces, rooted, layout, fuses, adjoint)                                        \
  case Operation::name: {                                                                                            \
    static const OperationRow row = {text,      reduces != 0, rooted != 0, Layout::layout, OutputOf(Layout::layout), \
                                     fuses != 0};                                                                    \
    return &row;                                                                                                     \
  }
#include "tables/operations.def"
#undef RT_OPERATION
  }
  return nullptr;
}

const ReductionRow* Find(Reduction reduction) {
  switch (reduction) {
#define RT_REDUCTION(name, id, text, map, fold, finish)                           \
  case Reduction::name: {                                                         \
    static const ReductionRow row = {text, Map::map, Fold::fold, Finish::finish}; \
    return &row;                                                                  \
  }
#include "tables/reductions.def"
#undef RT_REDUCTION
  }
  return nullptr;
}

const CompressionRow* Find(Compression compression) {
  switch (compression) {
#define RT_COMPRESSION(name, id, text, adds, casts)                  \
  case Compression::name: {                                          \
    static const CompressionRow row = {text, adds != 0, casts != 0}; \
    return &row;                                                     \
  }
#include "tables/compressions.def"
#undef RT_COMPRESSION
  }
  return nullptr;
}

namespace {

struct NamedId {
  int32_t id;
  const char* text;
};

template <size_t kRows>
const char* TextOf(int32_t id, const NamedId (&rows)[kRows]) {
  for (const NamedId& row : rows)
    if (row.id == id) return row.text;
  return nullptr;
}

constexpr NamedId kStatuses[] = {
#define RT_STATUS(name, id, text) {id, text},
#include "tables/status.def"
#undef RT_STATUS
};

}  // namespace

const char* Text(Reduction reduction) {
  const ReductionRow* row = Find(reduction);
  return row == nullptr ? nullptr : row->text;
}
const char* Text(Compression compression) {
  const CompressionRow* row = Find(compression);
  return row == nullptr ? nullptr : row->text;
}
const char* Text(StatusCode code) { return TextOf(static_cast<int32_t>(code), kStatuses); }

const char* TableText(const char* name) {
  static const struct {
    const char* name;
    const char* text;
  } tables[] = {
      {
          "dtypes",
#define RT_DTYPE(name, id, bytes, dlpack_code, dlpack_bits, text) \
  #id "\t" text "\t" #bytes "\t" #dlpack_code "\t" #dlpack_bits "\n"
#include "tables/dtypes.def"
#undef RT_DTYPE
      },
      {
          "operations",
#define RT_OPERATION(name, id, text, reduces, rooted, layout, fuses, adjoint) \
  #id "\t" text "\t" #reduces "\t" #rooted "\t" #layout "\t" #fuses "\t" adjoint "\n"
#include "tables/operations.def"
#undef RT_OPERATION
      },
      {
          "attributes",
#define RT_ATTRIBUTE(name, kind, initial, scope, label, advice) #name "\t" #kind "\t" #initial "\t" #scope "\n"
#include "tables/attributes.def"
#undef RT_ATTRIBUTE
      },
      {
          "reductions",
#define RT_REDUCTION(name, id, text, map, fold, finish) #id "\t" text "\t" #name "\n"
#include "tables/reductions.def"
#undef RT_REDUCTION
      },
      {
          "compressions",
#define RT_COMPRESSION(name, id, text, adds, casts) #id "\t" text "\t" #adds "\n"
#include "tables/compressions.def"
#undef RT_COMPRESSION
      },
      {
          "status",
#define RT_STATUS(name, id, text) #id "\t" text "\n"
#include "tables/status.def"
#undef RT_STATUS
      },
      {
          "counters",
#define RT_COUNTER(name, id, text, sentence) #id "\t" text "\t" sentence "\n"
#include "tables/counters.def"
#undef RT_COUNTER
      },
      {
          "options",
#define RT_OPTION(name, type, initial, lowest, highest, agrees, horovod, sentence) \
  #name "\t" #type "\t" initial "\t" lowest "\t" highest "\t" #agrees "\t" horovod "\t" sentence "\n"
#include "tables/options.def"
#undef RT_OPTION
      },
  };
  for (const auto& table : tables)
    if (std::strcmp(table.name, name) == 0) return table.text;
  return nullptr;
}

}  // namespace ringtrain
