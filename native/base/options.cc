#include "base/options.h"

#include <cctype>
#include <cmath>
#include <sstream>

#include "base/decimal.h"

namespace ringtrain {
namespace {

struct OptionRow {
  const char* name;
  OptionType type;
  const char* initial;
  const char* lowest;
  const char* highest;
};

Status Refuse(const OptionRow& row, const std::string& expected, const std::string& found) {
  return Status::InvalidArgument(std::string("option ") + row.name + ": expected " + expected + " but found '" + found +
                                 "'.");
}

Status ParseNumber(const OptionRow& row, const std::string& text, double* value) {
  double lowest = 0, highest = 0;
  ReadDecimal(row.lowest, &lowest);
  ReadDecimal(row.highest, &highest);
  if (!ReadDecimal(text, value) || *value < lowest || *value > highest)
    return Refuse(row, std::string("a number in [") + row.lowest + ", " + row.highest + "]", text);
  return {};
}

Status Assign(const OptionRow& row, const std::string& text, double* value) { return ParseNumber(row, text, value); }

Status Assign(const OptionRow& row, const std::string& text, int64_t* value) {
  double number = 0;
  RT_TRY(ParseNumber(row, text, &number));
  if (number != std::floor(number)) return Refuse(row, "a whole number", text);
  *value = static_cast<int64_t>(number);
  return {};
}

Status Assign(const OptionRow& row, const std::string& text, std::string* value) {
  if (row.type == OptionType::kChoice) {
    std::string choices = std::string("|") + row.lowest + "|";
    if (text.empty() || choices.find("|" + text + "|") == std::string::npos)
      return Refuse(row, std::string("one of ") + row.lowest, text);
  }
  *value = text;
  return {};
}

std::string ValueText(const std::string& value) { return value; }
std::string ValueText(int64_t value) { return std::to_string(value); }
std::string ValueText(double value) { return Decimal("%f", value); }

std::string VariableOf(std::string name) {
  for (char& letter : name) letter = static_cast<char>(std::toupper(static_cast<unsigned char>(letter)));
  return "RINGTRAIN_" + name;
}

}  // namespace

Status Options::Set(const std::string& name, const std::string& value) {
#define RT_OPTION(field, type, initial, lowest, highest, agrees, horovod, sentence) \
  if (name == #field) return Assign(OptionRow{#field, OptionType::type, initial, lowest, highest}, value, &field);
#include "tables/options.def"
#undef RT_OPTION
  return Status::InvalidArgument("option '" + name + "' does not exist; docs/options.md lists them.");
}

Status Options::Parse(const std::string& lines, Options* options) {
#define RT_OPTION(field, type, initial, lowest, highest, agrees, horovod, sentence) \
  RT_TRY(options->Set(#field, initial));
#include "tables/options.def"
#undef RT_OPTION
  std::istringstream stream(lines);
  for (std::string line; std::getline(stream, line);) {
    if (line.empty()) continue;
    size_t equals = line.find('=');
    if (equals == std::string::npos)
      return Status::InvalidArgument("options: expected name=value but found '" + line + "'.");
    const std::string name = line.substr(0, equals);
    RT_TRY(options->Set(name, line.substr(equals + 1)));
  }
  return {};
}

std::vector<std::pair<std::string, std::string>> Options::Agreed() const {
  std::vector<std::pair<std::string, std::string>> agreed;
#define RT_OPTION(field, type, initial, lowest, highest, agrees, horovod, sentence) \
  if (agrees) agreed.emplace_back(VariableOf(#field), ValueText(field));
#include "tables/options.def"
#undef RT_OPTION
  return agreed;
}

}  // namespace ringtrain
