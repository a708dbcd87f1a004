// Hosts: those of an elastic job, and their slots: whose agent is heard, who sits where, and which slot may get a rank.
#ifndef RINGTRAIN_ELASTIC_HOSTS_H_
#define RINGTRAIN_ELASTIC_HOSTS_H_

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "elastic/control.h"
#include "elastic/cooldown.h"
#include "elastic/roster.h"

namespace ringtrain {

class Hosts {
 public:
  struct Host {
    enum Presence { kAway, kAsked, kPresent } presence = kAway;
    Nanoseconds heard = 0;
    std::set<Uid> unheard;  // processes that its agent has named, and that have not said who they are
    std::map<int, bool> taken;
    std::set<int> closed;  // slots in which nobody is started any more, since a notice closed them
    bool leaves = false;
  };

  // slots: by host.
  Hosts(const std::map<std::string, int>& slots, Cooldown cooldown);

  // A host that may have ranks, as if nobody had known it.
  void Add(const std::string& name, int slots);
  void Remove(const std::string& name) { hosts_.erase(name); }
  bool has(const std::string& name) const { return hosts_.count(name) > 0; }
  Host* Find(const std::string& name);  // nullptr if it is not there
  // Which is made if it is not there.
  Host& Of(const std::string& name) { return hosts_[name]; }
  const Host& at(const std::string& name) const { return hosts_.at(name); }

  std::vector<std::string> NotAway() const;
  // Of these, of whose agents nothing was heard for so long.
  std::vector<std::string> Silent(Nanoseconds now, Nanoseconds bound) const;
  // Whether a host's agent is present, and all processes that it has named.
  bool HasAnswered(const std::string& name) const;
  bool AllHaveAnswered() const;
  // Nothing was heard for a while because nobody listened.
  void Skip(Nanoseconds missed);

  // ---- slots ----
  // A rank has failed there: the slot pauses.
  void Failed(Nanoseconds now, const std::string& host, int slot) { cooldown_.Failed(now, host, slot); }
  // How many may have a rank, of hosts that stay.
  size_t Open() const;
  // Whether one of these has none of the roster's yet, so that a rank may come to which those that leave can give the
  // state.
  bool AnyOpenBeside(const Roster& roster) const;
  // Free slots in which a rank is to be started: they count as taken from here on.
  std::vector<std::pair<std::string, int>> TakeFree(Nanoseconds now);

 private:
  std::map<std::string, Host> hosts_;
  Cooldown cooldown_;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_ELASTIC_HOSTS_H_
