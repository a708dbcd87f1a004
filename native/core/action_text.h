// The actions of authority.h and membership.h as text, for a driver in another language: a line each, the kind first,
// its columns parted by tabs. Frames, uids and keys are in hexadecimal; a text comes last, without tabs and line ends.
//
//   authority    write RECORD | send HOST UID FRAME | evict HOST UID FRAME (the frame, and its end) | beat HOST |
//                start HOST SLOT | say TEXT | end 0|1 TEXT
//   membership   send FRAME | abandon | connect COUNT RANK KEY, then for each member in rank order
//                member UID HOST SLOT JOINS ADDRESS | run | pause | depart | fence TEXT
#ifndef RINGTRAIN_CORE_ACTION_TEXT_H_
#define RINGTRAIN_CORE_ACTION_TEXT_H_

#include <string>

#include "core/authority.h"
#include "core/membership.h"

namespace ringtrain {

std::string Lines(const AuthorityActions& actions);
// me: whose actions they are.
std::string Lines(const MembershipActions& actions, const Uid& me);

std::string InHex(const std::string& bytes);
std::string InHex(const Uid& uid);
// False for what is not in hexadecimal.
bool FromHex(const std::string& text, std::string* bytes);
bool FromHex(const std::string& text, Uid* uid);

}  // namespace ringtrain
#endif  // RINGTRAIN_CORE_ACTION_TEXT_H_
