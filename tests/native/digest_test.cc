#include "base/digest.h"

#include <set>
#include <string>
#include <vector>

#include "check.h"

namespace ringtrain {
namespace {

RT_TEST(every_bit_and_its_place_count) {
  for (const size_t bytes : {1, 7, 8, 63, 64, 65, 200}) {
    std::string memory(bytes, '\0');
    std::set<uint64_t> seen = {DigestOf(memory.data(), bytes, 0)};
    for (size_t at = 0; at < bytes; ++at)
      for (int bit = 0; bit < 8; ++bit) {
        memory[at] = static_cast<char>(1 << bit);
        seen.insert(DigestOf(memory.data(), bytes, 0));
        memory[at] = 0;
      }
    RT_CHECK_EQ(seen.size(), 8 * bytes + 1);
  }
}

RT_TEST(words_that_change_places_are_seen) {
  for (const size_t distance : {1, 8, 64}) {  // within a line, between lines
    std::vector<uint64_t> words(200);
    for (size_t i = 0; i < words.size(); ++i) words[i] = i * i;
    const uint64_t before = DigestOf(words.data(), 8 * words.size(), 0);
    std::swap(words[3], words[3 + distance]);
    RT_CHECK(DigestOf(words.data(), 8 * words.size(), 0) != before);
  }
}

RT_TEST(length_and_seed_count) {
  const std::string zeros(200, '\0');
  std::set<uint64_t> seen;
  for (size_t bytes = 0; bytes <= zeros.size(); ++bytes)
    for (const uint64_t seed : {0, 1, 2}) seen.insert(DigestOf(zeros.data(), bytes, seed));
  RT_CHECK_EQ(seen.size(), 3 * (zeros.size() + 1));
}

RT_TEST(it_is_the_same_wherever_memory_begins) {
  const std::string text(300, 'r');
  std::string moved = "?" + text;
  RT_CHECK_EQ(DigestOf(text.data(), 300, 5), DigestOf(moved.data() + 1, 300, 5));
}

}  // namespace
}  // namespace ringtrain
