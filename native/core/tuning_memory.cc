#include "core/tuning_memory.h"

#include <algorithm>
#include <sstream>

#include "base/bytes.h"
#include "transport/tcp/sha256.h"

namespace ringtrain {
namespace {

constexpr char kHead[] = "ringtrain autotune 1";  // and the format's number
constexpr size_t kKeyLetters = 64;

bool IsKey(const std::string& text) {
  return text.size() == kKeyLetters && text.find_first_not_of("0123456789abcdef") == std::string::npos;
}

}  // namespace

bool TuningMemory::Read(const std::string& text) {
  findings_.clear();
  if (text.empty()) return true;
  std::istringstream lines(text);
  std::string line;
  std::getline(lines, line);
  if (line != kHead) return false;
  std::vector<std::pair<std::string, Settings>> read;
  while (std::getline(lines, line)) {
    const size_t space = line.find(' ');
    Settings settings;
    if (space == std::string::npos || !IsKey(line.substr(0, space)) ||
        !ParseSettings(line.substr(space + 1), &settings))
      return false;
    read.emplace_back(line.substr(0, space), settings);
  }
  findings_ = std::move(read);
  return true;
}

std::string TuningMemory::Text() const {
  std::string text = std::string(kHead) + "\n";
  for (const auto& [key, settings] : findings_) text += key + " " + TextOf(settings) + "\n";
  return text;
}

std::optional<Settings> TuningMemory::Find(const std::string& key) const {
  for (const auto& finding : findings_)
    if (finding.first == key) return finding.second;
  return {};
}

void TuningMemory::Keep(const std::string& key, const Settings& settings) {
  const auto same = [&](const auto& finding) { return finding.first == key; };
  findings_.erase(std::remove_if(findings_.begin(), findings_.end(), same), findings_.end());
  findings_.emplace_back(key, settings);
  if (findings_.size() > kMost) findings_.erase(findings_.begin());
}

std::string KeyOf(const std::vector<std::string>& facts) {
  Encoder encoder;
  for (const std::string& fact : facts) encoder.Text(fact);
  const std::string bytes = encoder.Take();
  Sha256 sha;
  sha.Update(bytes.data(), bytes.size());
  std::string key;
  for (uint8_t byte : sha.Finish()) {
    key += "0123456789abcdef"[byte >> 4];
    key += "0123456789abcdef"[byte & 15];
  }
  return key;
}

}  // namespace ringtrain
