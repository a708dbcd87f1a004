#include "elastic/hosts.h"

#include <algorithm>

namespace ringtrain {

Hosts::Hosts(const std::map<std::string, int>& slots, Cooldown cooldown) : cooldown_(std::move(cooldown)) {
  for (const auto& [name, count] : slots)
    for (int slot = 0; slot < count; ++slot) hosts_[name].taken[slot] = false;
}

void Hosts::Add(const std::string& name, int slots) {
  Host& host = hosts_[name] = Host();
  for (int slot = 0; slot < slots; ++slot) host.taken[slot] = false;
}

Hosts::Host* Hosts::Find(const std::string& name) {
  const auto found = hosts_.find(name);
  return found == hosts_.end() ? nullptr : &found->second;
}

std::vector<std::string> Hosts::NotAway() const {
  std::vector<std::string> names;
  for (const auto& [name, host] : hosts_)
    if (host.presence != Host::kAway) names.push_back(name);
  return names;
}

std::vector<std::string> Hosts::Silent(Nanoseconds now, Nanoseconds bound) const {
  std::vector<std::string> names;
  for (const auto& [name, host] : hosts_)
    if (host.presence != Host::kAway && now - host.heard >= bound) names.push_back(name);
  return names;
}

bool Hosts::HasAnswered(const std::string& name) const {
  const auto found = hosts_.find(name);
  return found != hosts_.end() && found->second.presence == Host::kPresent && found->second.unheard.empty();
}

bool Hosts::AllHaveAnswered() const {
  return std::all_of(hosts_.begin(), hosts_.end(), [&](const auto& entry) { return HasAnswered(entry.first); });
}

void Hosts::Skip(Nanoseconds missed) {
  for (auto& entry : hosts_) entry.second.heard += missed;
}

// ---- slots ----

size_t Hosts::Open() const {
  size_t slots = 0;
  for (const auto& [name, host] : hosts_)
    if (!host.leaves) slots += host.taken.size() - host.closed.size();
  return slots;
}

bool Hosts::AnyOpenBeside(const Roster& roster) const {
  for (const auto& [name, host] : hosts_) {
    if (host.presence == Host::kAway || host.leaves) continue;
    for (const auto& entry : host.taken)
      if (host.closed.count(entry.first) == 0 && !roster.IsTaken(name, entry.first)) return true;
  }
  return false;
}

std::vector<std::pair<std::string, int>> Hosts::TakeFree(Nanoseconds now) {
  std::vector<std::pair<std::string, int>> free;
  for (auto& [name, host] : hosts_) {
    if (host.presence != Host::kPresent || host.leaves) continue;
    for (auto& [slot, taken] : host.taken) {
      if (taken || host.closed.count(slot) > 0 || now < cooldown_.until(name, slot)) continue;
      taken = true;
      free.emplace_back(name, slot);
    }
  }
  return free;
}

}  // namespace ringtrain
