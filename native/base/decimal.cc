#include "base/decimal.h"

#include <locale.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>

namespace ringtrain {
namespace {

locale_t Plain() {
  static const locale_t plain = newlocale(LC_ALL_MASK, "C", nullptr);
  return plain;
}

}  // namespace

std::string Decimal(const char* format, double value) {
  const locale_t before = uselocale(Plain());  // of this thread
  char text[400];                              // the longest double has 309 digits before the point
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
  std::snprintf(text, sizeof text, format, value);
#pragma GCC diagnostic pop
  uselocale(before);
  return text;
}

bool ReadDecimal(const std::string& text, double* value) {
  char* end = nullptr;
  *value = strtod_l(text.c_str(), &end, Plain());
  return !text.empty() && *end == '\0' && std::isfinite(*value);
}

}  // namespace ringtrain
