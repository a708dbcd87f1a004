// Cooldown: when a slot may get a rank again after one has failed there. A pause doubles from failure to failure; three
// slots of a host that pause at once make the host pause. Ten healthy minutes, and all is forgotten.
#ifndef RINGTRAIN_ELASTIC_COOLDOWN_H_
#define RINGTRAIN_ELASTIC_COOLDOWN_H_

#include <algorithm>
#include <map>
#include <string>

#include "base/clock.h"

namespace ringtrain {

class Cooldown {
 public:
  // first, longest: of the pauses.
  Cooldown(Nanoseconds first, Nanoseconds longest) : first_(first), longest_(longest) {}

  void Failed(Nanoseconds now, const std::string& host, int slot) {
    Host& all = hosts_[host];
    Double(now, &all.slots[slot]);
    const auto pausing = std::count_if(all.slots.begin(), all.slots.end(),
                                       [now](const auto& entry) { return entry.second.until > now; });
    if (pausing >= kSlotsOfAHost) Double(now, &all.host);
  }

  // 0 for a slot that has never failed.
  Nanoseconds until(const std::string& host, int slot) const {
    const auto found = hosts_.find(host);
    if (found == hosts_.end()) return 0;
    const auto pause = found->second.slots.find(slot);
    return std::max(found->second.host.until, pause == found->second.slots.end() ? 0 : pause->second.until);
  }

 private:
  static constexpr int kSlotsOfAHost = 3;
  static constexpr Nanoseconds kForgotten = 600 * kSecond;
  struct Pause {
    Nanoseconds length = 0, until = 0;
  };
  struct Host {
    Pause host;
    std::map<int, Pause> slots;
  };

  void Double(Nanoseconds now, Pause* pause) const {
    const bool forgotten = pause->length == 0 || now - pause->until >= kForgotten;
    pause->length = forgotten ? first_ : std::min(2 * pause->length, longest_);
    pause->until = now + pause->length;
  }

  const Nanoseconds first_, longest_;
  std::map<std::string, Host> hosts_;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_ELASTIC_COOLDOWN_H_
