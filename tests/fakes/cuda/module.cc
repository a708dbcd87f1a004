#include "cuda/module.h"

#include <algorithm>
#include <cctype>

#include "cuda/kernels.h"
#include "cuda/results.h"
#include "strict.h"

namespace fakes {
namespace {

// ISA version that a driver of a CUDA version accepts, both as ten times major plus minor: 12.1 brought 8.1, 13.0
// brought 9.0.
int NewestIsa(int driver_version) {
  const int major = driver_version / 1000, minor = driver_version % 1000 / 10;
  return major >= 13 ? 90 + minor : 80 + minor;
}

// The digits behind a directive, a dot between them left out: ".version 8.1" gives 81, ".target sm_75" 75; -1 without
// it.
int DirectiveNumber(const std::string& text, const std::string& directive) {
  const size_t at = text.find(directive);
  if (at == std::string::npos) return -1;
  int number = -1;
  for (size_t i = at + directive.size(); i < text.size() && (std::isdigit(text[i]) || text[i] == '.'); ++i)
    if (text[i] != '.') number = std::max(number, 0) * 10 + (text[i] - '0');
  return number;
}

// Calls visit(name, bytes of the parameter) for each ".entry NAME( .param .align 8 .b8 NAME_param_0[BYTES] )".
template <typename Visit>
void ForEachEntry(const std::string& text, const Visit& visit) {
  const std::string keyword = ".entry ";
  for (size_t at = text.find(keyword); at != std::string::npos; at = text.find(keyword, at)) {
    at += keyword.size();
    const size_t open = text.find('(', at), bracket = text.find('[', open), close = text.find(')', open);
    if (close == std::string::npos || bracket > close) return;
    visit(text.substr(at, open - at), std::stoul(text.substr(bracket + 1)));
  }
}

}  // namespace

int LoadModule(const char* ptx, int driver_version, int capability, Module* module) {
  const std::string text = std::string("\n") + ptx;  // a directive may begin the text
  const int version = DirectiveNumber(text, ".version ");
  const int target = DirectiveNumber(text, ".target sm_");
  if (version < 0 || target < 0) return kInvalidPtx;
  if (version > NewestIsa(driver_version)) return kUnsupportedPtxVersion;
  if (target > capability) return kNoBinaryForGpu;
  bool parameters_fit = true;
  ForEachEntry(text, [&](const std::string& name, size_t bytes) {
    parameters_fit &= bytes <= (version >= 81 ? 32764 : 4352);
    module->functions[name] = {name, bytes, FindKernel(name)};
  });
  return parameters_fit ? kSuccess : kInvalidPtx;
}

}  // namespace fakes
