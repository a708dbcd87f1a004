// TuningMemory: what tuning has found before, by what it was found for. A text of one line for each finding, which rank
// 0 reads when its world opens (tuner.h); here are the texts, pure.
#ifndef RINGTRAIN_CORE_TUNING_MEMORY_H_
#define RINGTRAIN_CORE_TUNING_MEMORY_H_

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/tuned.h"

namespace ringtrain {

class TuningMemory {
 public:
  static constexpr size_t kMost = 256;  // findings; the oldest go first

  // Of a file's text, "" for none. False for a text that is not one of ours: then nothing is remembered.
  bool Read(const std::string& text);
  std::string Text() const;

  // key: see KeyOf.
  std::optional<Settings> Find(const std::string& key) const;
  void Keep(const std::string& key, const Settings& settings);

 private:
  std::vector<std::pair<std::string, Settings>> findings_;  // the oldest first
};

// A digest of what a finding holds for: a model, as a step's operations tell it, hosts and ranks, release, settings to
// begin with.
std::string KeyOf(const std::vector<std::string>& facts);

}  // namespace ringtrain
#endif  // RINGTRAIN_CORE_TUNING_MEMORY_H_
