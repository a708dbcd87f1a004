#include "core/action_text.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <variant>

namespace ringtrain {
namespace {

constexpr size_t kDigits = 16;  // of half a uid

int Digit(char digit) {
  if (digit >= '0' && digit <= '9') return digit - '0';
  return digit >= 'a' && digit <= 'f' ? digit - 'a' + 10 : -1;
}

std::string OneColumn(std::string text) {
  std::replace_if(text.begin(), text.end(), [](char each) { return each == '\t' || each == '\n'; }, ' ');
  return text;
}

template <typename... Columns>
std::string Line(const std::string& first, const Columns&... columns) {
  return (first + ... + (std::string("\t") + columns)) + "\n";
}

std::string LineOf(const authority_action::Write& write) { return Line("write", InHex(write.record)); }
std::string LineOf(const authority_action::Send& send) {
  if (send.frame.type == ControlType::kBeat) return Line("beat", send.host);
  const bool to_a_host = !(Uid() < send.frame.process.uid);
  if (send.frame.type == ControlType::kAsk && to_a_host) return Line("ask", send.host, InHex(send.frame.Encode()));
  const std::string kind = send.frame.type == ControlType::kEvict ? "evict" : "send";
  return Line(kind, send.host, InHex(send.frame.process.uid), InHex(send.frame.Encode()));
}
std::string LineOf(const authority_action::Start& start) {
  return Line("start", start.host, std::to_string(start.slot));
}
std::string LineOf(const authority_action::Say& say) { return Line("say", OneColumn(say.text)); }
std::string LineOf(const authority_action::End& end) { return Line("end", end.well ? "1" : "0", OneColumn(end.text)); }

std::string LinesOf(const membership_action::Connect& connect, const Uid& me) {
  const ControlFrame& form = connect.form;
  std::string members;
  size_t rank = 0;
  for (size_t place = 0; place < form.members.size(); ++place) {
    const auto& [process, joins] = form.members[place];
    if (process.uid == me) rank = place;
    members += Line("member", InHex(process.uid), process.host, std::to_string(process.slot), joins ? "1" : "0",
                    OneColumn(process.address));
  }
  return Line("connect", std::to_string(form.epoch.count), std::to_string(rank), InHex(form.key)) + members;
}

struct OfMembership {
  const Uid& me;
  std::string operator()(const membership_action::Send& send) const { return Line("send", InHex(send.frame.Encode())); }
  std::string operator()(const membership_action::Abandon&) const { return Line("abandon"); }
  std::string operator()(const membership_action::Connect& connect) const { return LinesOf(connect, me); }
  std::string operator()(const membership_action::Run&) const { return Line("run"); }
  std::string operator()(const membership_action::Depart&) const { return Line("depart"); }
  std::string operator()(const membership_action::Fence& fence) const { return Line("fence", OneColumn(fence.cause)); }
  std::string operator()(const membership_action::Pause&) const { return Line("pause"); }
};

}  // namespace

std::string Lines(const AuthorityActions& actions) {
  std::string lines;
  for (const AuthorityAction& action : actions)
    lines += std::visit([](const auto& what) { return LineOf(what); }, action);
  return lines;
}

std::string Lines(const MembershipActions& actions, const Uid& me) {
  std::string lines;
  for (const MembershipAction& action : actions) lines += std::visit(OfMembership{me}, action);
  return lines;
}

std::string InHex(const std::string& bytes) {
  static constexpr char kHex[] = "0123456789abcdef";
  std::string text;
  for (const char each : bytes) {
    const auto byte = static_cast<unsigned char>(each);
    text += {kHex[byte >> 4], kHex[byte & 15]};
  }
  return text;
}

std::string InHex(const Uid& uid) {
  char text[2 * kDigits + 1];
  std::snprintf(text, sizeof text, "%016" PRIx64 "%016" PRIx64, uid.high, uid.low);
  return text;
}

bool FromHex(const std::string& text, std::string* bytes) {
  if (text.size() % 2 != 0) return false;
  for (size_t at = 0; at < text.size(); at += 2) {
    const int high = Digit(text[at]), low = Digit(text[at + 1]);
    if (high < 0 || low < 0) return false;
    bytes->push_back(static_cast<char>(16 * high + low));
  }
  return true;
}

bool FromHex(const std::string& text, Uid* uid) {
  std::string bytes;
  if (text.size() != 2 * kDigits || !FromHex(text, &bytes)) return false;
  for (size_t at = 0; at < bytes.size(); ++at) {
    uint64_t& half = at < bytes.size() / 2 ? uid->high : uid->low;
    half = half << 8 | static_cast<unsigned char>(bytes[at]);
  }
  return true;
}

}  // namespace ringtrain
