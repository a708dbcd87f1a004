// What the C ABIs of the authority and of a membership share: both give actions for events, and speak in control
// frames.
#ifndef RINGTRAIN_C_API_CONTROL_H_
#define RINGTRAIN_C_API_CONTROL_H_

#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <string>
#include <utility>
#include <variant>

#include "base/clock.h"
#include "base/without_memory.h"
#include "elastic/control.h"

namespace ringtrain {

constexpr size_t kUidDigits = 32;

// The number of actions that follow from `act(&actions)`.
template <typename Decider, typename Act>
int32_t ActionsOf(Decider* decider, Act act) {
  decider->actions.clear();
  decider->given = 0;
  return Or<int32_t>(-1, [&] {
    act(&decider->actions);
    return static_cast<int32_t>(decider->actions.size());
  });
}

// The next one of them, by `into`.
template <typename Decider, typename Action, typename Into>
int32_t Next(Decider* decider, Action* action, Into into) {
  if (decider->given == decider->actions.size()) return 0;
  *action = {};
  return Or<int32_t>(-1, [&] { return std::visit(into, decider->actions[decider->given]), ++decider->given, 1; });
}

inline Nanoseconds InNanoseconds(double seconds) {
  return seconds > 9e9 ? kNever : static_cast<Nanoseconds>(seconds * 1e9);
}

inline double InSeconds(Nanoseconds time) {
  return time == kNever ? std::numeric_limits<double>::infinity() : static_cast<double>(time) / 1e9;
}

inline std::string TextOf(const Uid& uid) {
  char text[kUidDigits + 1];
  std::snprintf(text, sizeof text, "%016" PRIx64 "%016" PRIx64, uid.high, uid.low);
  return text;
}

// False for what is no uid.
inline bool UidIn(const std::string& text, Uid* uid) {
  constexpr char kDigits[] = "0123456789abcdef";
  if (text.size() != kUidDigits || text.find_first_not_of(kDigits) != std::string::npos) return false;
  uid->high = std::strtoull(text.substr(0, kUidDigits / 2).c_str(), nullptr, 16);
  uid->low = std::strtoull(text.substr(kUidDigits / 2).c_str(), nullptr, 16);
  return true;
}

inline bool ProcessIn(const char* host, int32_t slot, const char* uid, Process* process) {
  process->host = host;
  process->slot = slot;
  return UidIn(uid, &process->uid);
}

inline bool FrameIn(const void* bytes, size_t size, ControlFrame* frame) {
  return ControlFrame::Decode(std::string(static_cast<const char*>(bytes), size), frame);
}

template <typename Action>
void SetFrame(const std::string& bytes, Action* action) {
  action->frame = bytes.data();
  action->frame_bytes = bytes.size();
}

}  // namespace ringtrain
#endif  // RINGTRAIN_C_API_CONTROL_H_
