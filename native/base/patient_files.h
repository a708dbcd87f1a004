// Files, small and whole. A file system may hang: a writer (writer.h) replaces them, and a thread of its own reads,
// which is left behind after kFilePatience.
#ifndef RINGTRAIN_BASE_PATIENT_FILES_H_
#define RINGTRAIN_BASE_PATIENT_FILES_H_

#include <string>

namespace ringtrain {

// All of it goes into a file beside, which then takes the place of what was there; the folder is made if need be.
// Returns why it has not been done; "" if it has.
std::string ReplaceFile(const std::string& path, const std::string& text);

// All of the file, up to most_bytes; *text is "" if there is none. Returns why it cannot be read; "" if it has been.
std::string ReadFile(const std::string& path, size_t most_bytes, std::string* text);

}  // namespace ringtrain
#endif  // RINGTRAIN_BASE_PATIENT_FILES_H_
