// The C ABI: translation only. Exceptions (out of memory, mostly) end here, as statuses or as what a function returns
// where there is no memory: whatever can allocate is within Guard or Or.
#ifndef RINGTRAIN_C_API_TRANSLATE_H_
#define RINGTRAIN_C_API_TRANSLATE_H_

#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>

#include "base/status.h"
#include "base/without_memory.h"

namespace ringtrain {

inline char* CopyText(const std::string& text) { return strdup(text.c_str()); }

inline int32_t Report(const Status& status, char** error) {
  if (!status.ok() && error != nullptr) *error = CopyText(status.message());
  return static_cast<int32_t>(status.code());
}

template <typename Body>
Status Guard(Body body) {
  try {
    try {
      return body();
    } catch (const std::runtime_error& error) {
      return Status::Internal(error.what());
    }
  } catch (const std::exception&) {
    return Status::NoMemory();
  }
}

// The text that body() makes; nullptr where there is no memory for it.
template <typename Body>
char* TextBy(Body body) {
  return Or<char*>(nullptr, [&] { return CopyText(body()); });
}

inline std::string TextOf(const char* text) { return text == nullptr ? "" : text; }

}  // namespace ringtrain
#endif  // RINGTRAIN_C_API_TRANSLATE_H_
