#include "base/tuned.h"

#include <cerrno>
#include <cstdlib>
#include <sstream>

namespace ringtrain {
namespace {

struct Range {
  int64_t lowest, highest;
};

// Of the options that are numbers.
struct Ranges {
#define RT_OPTION(name, type, initial, lowest, highest, agrees, horovod, sentence) \
  static Range name() { return {std::atoll(lowest), std::atoll(highest)}; }
#include "tables/options.def"
#undef RT_OPTION
};

constexpr const char* kNames[] = {
#define RT_TUNABLE(name, ...) #name,
#include "tables/tunables.def"
#undef RT_TUNABLE
};

bool ParseNumber(const std::string& text, int64_t* number) {
  char* end = nullptr;
  errno = 0;
  *number = std::strtoll(text.c_str(), &end, 10);
  return !text.empty() && *end == '\0' && errno == 0;
}

}  // namespace

const std::vector<int64_t>& ValuesOf(Tunable tunable) {
  static const std::vector<int64_t> values[] = {
#define RT_TUNABLE(name, ...) {__VA_ARGS__},
#include "tables/tunables.def"
#undef RT_TUNABLE
  };
  return values[static_cast<int>(tunable)];
}

const char* NameOf(Tunable tunable) { return kNames[static_cast<int>(tunable)]; }

Settings SettingsOf(const Options& options) {
  return {
#define RT_TUNABLE(name, ...) options.name,
#include "tables/tunables.def"
#undef RT_TUNABLE
  };
}

bool InRange(const Settings& settings) {
  const Range ranges[] = {
#define RT_TUNABLE(name, ...) Ranges::name(),
#include "tables/tunables.def"
#undef RT_TUNABLE
  };
  for (size_t i = 0; i < settings.size(); ++i)
    if (settings[i] < ranges[i].lowest || settings[i] > ranges[i].highest) return false;
  return true;
}

std::string TextOf(const Settings& settings) {
  std::string text;
  for (size_t i = 0; i < settings.size(); ++i)
    text += (i > 0 ? "," : "") + std::string(kNames[i]) + "=" + std::to_string(settings[i]);
  return text;
}

bool ParseSettings(const std::string& text, Settings* settings) {
  std::istringstream parts(text);
  size_t count = 0;
  for (std::string part; std::getline(parts, part, ','); ++count) {
    if (count == settings->size()) return false;
    const std::string begin = std::string(kNames[count]) + "=";
    if (part.compare(0, begin.size(), begin) != 0) return false;
    if (!ParseNumber(part.substr(begin.size()), &(*settings)[count])) return false;
  }
  return count == settings->size() && InRange(*settings);
}

int MostStreams(const Options& options) {
  const std::vector<int64_t>& values = ValuesOf(Tunable::tcp_streams);
  const bool tunes = options.autotune != 0 && !options.given("tcp_streams");
  return static_cast<int>(tunes ? values.back() : options.tcp_streams);
}

Settings Tuned::All() const {
  Settings settings;
  for (size_t i = 0; i < settings.size(); ++i) settings[i] = values_[i].load(std::memory_order_relaxed);
  return settings;
}

void Tuned::Store(const Settings& settings) {
  for (size_t i = 0; i < settings.size(); ++i) values_[i].store(settings[i], std::memory_order_relaxed);
}

void Tuned::Set(uint64_t operations, const Settings& settings) {
  Store(settings);
  MutexLock lock(mutex_);
  changes_.push_back({operations, settings});
}

std::vector<Tuned::Change> Tuned::Changes() const {
  MutexLock lock(mutex_);
  return changes_;
}

}  // namespace ringtrain
