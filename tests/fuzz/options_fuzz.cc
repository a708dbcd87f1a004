// The options that a rank hands over as text, and the layout of pretended hosts, which is one of them.
#include <numeric>

#include "base/options.h"
#include "fuzz.h"
#include "transport/rendezvous.h"

namespace ringtrain {
namespace {

constexpr int kRanks = 6;

}  // namespace

std::vector<std::string> Seeds() {
  std::string all;
#define RT_OPTION(name, type, initial, lowest, highest, agrees, horovod, sentence) \
  all += std::string(#name "=") + initial + "\n";
#include "tables/options.def"
#undef RT_OPTION
  return {all, "chunk_bytes=262144\nstall_warning_seconds=1e9\n", "algorithm=ring\n\n", "2+3+1", "6"};
}

}  // namespace ringtrain

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace ringtrain;
  const std::string text(reinterpret_cast<const char*>(data), size);
  Options options;
  const Status status = Options::Parse(text, &options);
  Expect(status.ok() || !status.message().empty(), "a reason for what is refused");
  std::vector<int> layout;
  if (!ParseLayout(text, kRanks, &layout).ok()) return 0;
  Expect(std::accumulate(layout.begin(), layout.end(), 0) == kRanks, "a layout of all ranks");
  for (int ranks : layout) Expect(ranks > 0, "no host without ranks");
  return 0;
}
