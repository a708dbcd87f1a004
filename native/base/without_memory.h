// Where the C ABI has no memory for what it was asked for: exceptions end there.
#ifndef RINGTRAIN_BASE_WITHOUT_MEMORY_H_
#define RINGTRAIN_BASE_WITHOUT_MEMORY_H_

#include <cstdint>
#include <exception>

// What body() returns, or `without` where there is no memory for it.
template <typename Result, typename Body>
Result Or(Result without, Body body) {
  try {
    return body();
  } catch (const std::exception&) {
    return without;
  }
}

// 1, or 0 where there is no memory for it.
template <typename Body>
int32_t Done(Body body) {
  return Or<int32_t>(0, [&] { return body(), 1; });
}

#endif  // RINGTRAIN_BASE_WITHOUT_MEMORY_H_
