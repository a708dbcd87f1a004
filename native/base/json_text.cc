#include "base/json_text.h"

#include <algorithm>
#include <cstdio>

namespace ringtrain {
namespace {

// How many bytes a UTF-8 sequence with this first byte has, 0 if none begins so.
size_t SequenceLength(unsigned first) {
  if (first < 0x80) return 1;
  if (first >= 0xc2 && first < 0xe0) return 2;
  if (first >= 0xe0 && first < 0xf0) return 3;
  if (first >= 0xf0 && first < 0xf5) return 4;
  return 0;
}

// Length of the UTF-8 sequence at text[i], 0 if it is malformed.
size_t SequenceLength(const std::string& text, size_t i) {
  const auto byte = [&](size_t at) { return at < text.size() ? static_cast<unsigned char>(text[at]) : 0u; };
  const unsigned first = byte(i);
  const size_t length = SequenceLength(first);
  for (size_t k = 1; k < length; ++k)
    if ((byte(i + k) & 0xc0) != 0x80) return 0;
  const unsigned second = byte(i + 1);
  const bool overlong = (first == 0xe0 && second < 0xa0) || (first == 0xf0 && second < 0x90);
  const bool outside =
      (first == 0xed && second >= 0xa0) || (first == 0xf4 && second >= 0x90);  // surrogates, above U+10FFFF
  return overlong || outside ? 0 : length;
}

}  // namespace

std::string Quoted(const std::string& text, size_t longest) {
  std::string quoted = "\"";
  for (size_t i = 0; i < text.size();) {
    const size_t length = SequenceLength(text, i);
    const auto byte = static_cast<unsigned char>(text[i]);
    if (quoted.size() > longest) return quoted + "...\"";
    if (length == 0) {
      quoted += "\\ufffd";
    } else if (byte < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\u%04x", byte);
      quoted += escape;
    } else {
      if (byte == '"' || byte == '\\') quoted += '\\';
      quoted.append(text, i, length);
    }
    i += std::max<size_t>(length, 1);
  }
  return quoted + '"';
}

}  // namespace ringtrain
