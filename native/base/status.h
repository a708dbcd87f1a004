// Status: the one error idiom of the native code. A code (tables/status.def) and, unless ok, a text that a person can
// act on.
#ifndef RINGTRAIN_BASE_STATUS_H_
#define RINGTRAIN_BASE_STATUS_H_

#include <memory>
#include <new>
#include <string>
#include <utility>

#include "tables/tables.h"

namespace ringtrain {

inline const std::string kNoText;
// What there is to say without memory for other words.
inline const std::string kNoMemoryText =
    "the memory of this process must suffice, but has run out. Start fewer ranks on its host, or send less at a time.";

class Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message) : code_(code) {
    if (message.empty()) return;
    try {
      message_ = std::make_shared<const std::string>(std::move(message));
    } catch (const std::bad_alloc&) {  // it says that memory has run out, which is the first thing to know
    }
  }

  static Status InvalidArgument(std::string message) { return {StatusCode::kInvalidArgument, std::move(message)}; }
  static Status Mismatch(std::string message) { return {StatusCode::kMismatch, std::move(message)}; }
  static Status Unsupported(std::string message) { return {StatusCode::kUnsupported, std::move(message)}; }
  static Status Timeout(std::string message) { return {StatusCode::kTimeout, std::move(message)}; }
  static Status PeerLost(std::string message) { return {StatusCode::kPeerLost, std::move(message)}; }
  static Status Closed(std::string message) { return {StatusCode::kClosed, std::move(message)}; }
  static Status Internal(std::string message) { return {StatusCode::kInternal, std::move(message)}; }
  // Memory has run out, of which this takes none.
  static Status NoMemory() { return {StatusCode::kInternal, std::string()}; }

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_ != nullptr ? *message_ : ok() ? kNoText : kNoMemoryText; }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::shared_ptr<const std::string> message_;  // so that a copy takes no memory; nullptr: none, or none was found
};

#define RT_TRY(expression)                        \
  do {                                            \
    ::ringtrain::Status rt_status = (expression); \
    if (!rt_status.ok()) return rt_status;        \
  } while (0)

}  // namespace ringtrain
#endif  // RINGTRAIN_BASE_STATUS_H_
