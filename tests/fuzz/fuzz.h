// What each *_fuzz.cc here has: libFuzzer's entry, which feeds a decoder, and inputs to start from, made by the encoder
// of today.
//
//   NAME_fuzz --write-seeds DIR    writes them, one a file; everything else is libFuzzer's own command line
#ifndef RINGTRAIN_TESTS_FUZZ_FUZZ_H_
#define RINGTRAIN_TESTS_FUZZ_FUZZ_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace ringtrain {

std::vector<std::string> Seeds();

// Ends the process, which libFuzzer reports with the input, unless what must hold does.
void Expect(bool holds, const char* what);

}  // namespace ringtrain

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

#endif  // RINGTRAIN_TESTS_FUZZ_FUZZ_H_
