// Rows of the tables, for C++ by id and for Python as text.
#include "tables/tables.h"

#include <cstring>

namespace ringtrain {

const DTypeRow* Find(DType dtype) {
  switch (dtype) {
#define RT_DTYPE(name, id, bytes, dlpack_code, dlpack_bits, text)                          \
  case DType::name: {                                                                      \
    static const DTypeRow row = {bytes, dlpack_code == 2 || dlpack_code == 4, text};       \
    return &row;                                                                           \
  }
#include "tables/dtypes.def"
#undef RT_DTYPE
  }
  return nullptr;
}

const OperationRow* Find(Operation operation) {
  switch (operation) {
#define RT_OPERATION(name, id, text, reduces, rooted, output, fuses, adjoint)              \
  case Operation::name: {                                                                  \
    static const OperationRow row = {text, reduces != 0, rooted != 0, Output::output, fuses != 0}; \
    return &row;                                                                           \
  }
#include "tables/operations.def"
#undef RT_OPERATION
  }
  return nullptr;
}

const char* Text(Reduction reduction) {
  switch (reduction) {
#define RT_REDUCTION(name, id, text) \
  case Reduction::name:              \
    return text;
#include "tables/reductions.def"
#undef RT_REDUCTION
  }
  return nullptr;
}

const char* Text(Compression compression) {
  switch (compression) {
#define RT_COMPRESSION(name, id, text) \
  case Compression::name:              \
    return text;
#include "tables/compressions.def"
#undef RT_COMPRESSION
  }
  return nullptr;
}

const char* Text(StatusCode code) {
  switch (code) {
#define RT_STATUS(name, id, text) \
  case StatusCode::name:          \
    return text;
#include "tables/status.def"
#undef RT_STATUS
  }
  return nullptr;
}

const char* TableText(const char* name) {
  static const struct {
    const char* name;
    const char* text;
  } tables[] = {
      {"dtypes",
#define RT_DTYPE(name, id, bytes, dlpack_code, dlpack_bits, text) \
  #id "\t" text "\t" #bytes "\t" #dlpack_code "\t" #dlpack_bits "\n"
#include "tables/dtypes.def"
#undef RT_DTYPE
      },
      {"operations",
#define RT_OPERATION(name, id, text, reduces, rooted, output, fuses, adjoint) \
  #id "\t" text "\t" #reduces "\t" #rooted "\t" #output "\t" #fuses "\t" adjoint "\n"
#include "tables/operations.def"
#undef RT_OPERATION
      },
      {"reductions",
#define RT_REDUCTION(name, id, text) #id "\t" text "\n"
#include "tables/reductions.def"
#undef RT_REDUCTION
      },
      {"compressions",
#define RT_COMPRESSION(name, id, text) #id "\t" text "\n"
#include "tables/compressions.def"
#undef RT_COMPRESSION
      },
      {"status",
#define RT_STATUS(name, id, text) #id "\t" text "\n"
#include "tables/status.def"
#undef RT_STATUS
      },
      {"counters",
#define RT_COUNTER(name, id, text, sentence) #id "\t" text "\t" sentence "\n"
#include "tables/counters.def"
#undef RT_COUNTER
      },
      {"options",
#define RT_OPTION(name, type, initial, lowest, highest, horovod, sentence) \
  #name "\t" #type "\t" initial "\t" lowest "\t" highest "\t" horovod "\t" sentence "\n"
#include "tables/options.def"
#undef RT_OPTION
      },
  };
  for (const auto& table : tables)
    if (std::strcmp(table.name, name) == 0) return table.text;
  return nullptr;
}

}  // namespace ringtrain
