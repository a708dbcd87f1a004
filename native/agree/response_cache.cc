#include "agree/response_cache.h"

#include <utility>

namespace ringtrain {

const Response* ResponseCache::Find(Id id) const {
  auto found = by_id_.find(id);
  return found == by_id_.end() ? nullptr : &found->second->response;
}

ResponseCache::Id ResponseCache::IdOf(const std::string& name) const {
  auto found = by_name_.find(name);
  return found == by_name_.end() ? kNone : found->second->id;
}

void ResponseCache::Insert(Id id, Response response) {
  if (capacity_ == 0) return;
  auto same_name = by_name_.find(response.request.name);
  if (same_name != by_name_.end())
    Erase(same_name->second);
  else if (entries_.size() == capacity_)
    Erase(std::prev(entries_.end()));
  entries_.push_front({id, std::move(response)});
  by_id_[id] = entries_.begin();
  by_name_[entries_.front().response.request.name] = entries_.begin();
}

void ResponseCache::Touch(Id id) {
  auto found = by_id_.find(id);
  if (found != by_id_.end()) entries_.splice(entries_.begin(), entries_, found->second);
}

void ResponseCache::Erase(Entries::iterator entry) {
  by_id_.erase(entry->id);
  by_name_.erase(entry->response.request.name);
  entries_.erase(entry);
}

}  // namespace ringtrain
