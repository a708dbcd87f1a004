// JSON's strings, for the files that the core writes itself.
#ifndef RINGTRAIN_BASE_JSON_TEXT_H_
#define RINGTRAIN_BASE_JSON_TEXT_H_

#include <cstddef>
#include <string>

namespace ringtrain {

// `text` as a JSON string, cut behind `longest` bytes, by "...". Bytes that are not UTF-8 become the replacement
// character.
std::string Quoted(const std::string& text, size_t longest);

}  // namespace ringtrain
#endif  // RINGTRAIN_BASE_JSON_TEXT_H_
