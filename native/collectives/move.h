// Elements from one place to another, as another dtype where that is asked for.
#ifndef RINGTRAIN_COLLECTIVES_MOVE_H_
#define RINGTRAIN_COLLECTIVES_MOVE_H_

#include <cstddef>
#include <cstring>

#include "kernels/convert.h"
#include "tables/tables.h"

namespace ringtrain {

inline void Move(char* to, DType as, const char* from, DType is, size_t count) {
  if (as == is)
    std::memcpy(to, from, count * Bytes(is));
  else
    Convert(is, as, to, from, count);
}

}  // namespace ringtrain
#endif  // RINGTRAIN_COLLECTIVES_MOVE_H_
