// Status: the one error idiom of the native code. A code (tables/status.def) and, unless ok, a text that a person can
// act on.
#ifndef RINGTRAIN_BASE_STATUS_H_
#define RINGTRAIN_BASE_STATUS_H_

#include <string>
#include <utility>

#include "tables/tables.h"

namespace ringtrain {

class Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  static Status InvalidArgument(std::string message) { return {StatusCode::kInvalidArgument, std::move(message)}; }
  static Status Mismatch(std::string message) { return {StatusCode::kMismatch, std::move(message)}; }
  static Status Unsupported(std::string message) { return {StatusCode::kUnsupported, std::move(message)}; }
  static Status Timeout(std::string message) { return {StatusCode::kTimeout, std::move(message)}; }
  static Status PeerLost(std::string message) { return {StatusCode::kPeerLost, std::move(message)}; }
  static Status Closed(std::string message) { return {StatusCode::kClosed, std::move(message)}; }
  static Status Internal(std::string message) { return {StatusCode::kInternal, std::move(message)}; }

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

#define RT_TRY(expression)                        \
  do {                                            \
    ::ringtrain::Status rt_status = (expression); \
    if (!rt_status.ok()) return rt_status;        \
  } while (0)

}  // namespace ringtrain
#endif  // RINGTRAIN_BASE_STATUS_H_
