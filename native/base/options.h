// Options of a context: the rows of tables/options.def as typed fields, parsed strictly from "name=value" lines.
#ifndef RINGTRAIN_BASE_OPTIONS_H_
#define RINGTRAIN_BASE_OPTIONS_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"

namespace ringtrain {

enum class OptionType { kInt, kNumber, kText, kChoice };

template <OptionType type>
struct OptionValue {
  using Type = std::string;
};
template <>
struct OptionValue<OptionType::kInt> {
  using Type = int64_t;
};
template <>
struct OptionValue<OptionType::kNumber> {
  using Type = double;
};

struct Options {
#define RT_OPTION(name, type, initial, lowest, highest, agrees, horovod, sentence) \
  OptionValue<OptionType::type>::Type name{};
#include "tables/options.def"
#undef RT_OPTION

  // Sets every option: from the table's default, then from the lines. An unknown name or a value out of range is
  // refused.
  static Status Parse(const std::string& lines, Options* options);
  // Those on which all ranks must agree, as the environment variable and its value, in the order of the table.
  std::vector<std::pair<std::string, std::string>> Agreed() const;
  // Whether one of the lines has set it, were it to the default.

 private:
  Status Set(const std::string& name, const std::string& value);
};

}  // namespace ringtrain
#endif  // RINGTRAIN_BASE_OPTIONS_H_
