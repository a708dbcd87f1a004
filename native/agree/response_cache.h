// Response cache: what the members of a process set agreed on before, by a small id, so that the same request travels
// as that id.
//
// Every member applies the same sequence of Insert and Touch, in the order of the coordinator's frames, so all caches
// are equal without a word about them. Ids are never used again: one that a member sends late, for an entry that has
// been evicted, is unknown and can be asked for again, but never means something else.
#ifndef RINGTRAIN_AGREE_RESPONSE_CACHE_H_
#define RINGTRAIN_AGREE_RESPONSE_CACHE_H_

#include <list>
#include <string>
#include <unordered_map>

#include "agree/request.h"

namespace ringtrain {

class ResponseCache {
 public:
  using Id = uint64_t;
  static constexpr Id kNone = 0;

  explicit ResponseCache(size_t capacity) : capacity_(capacity) {}

  size_t capacity() const { return capacity_; }
  // nullptr if the id is unknown.
  const Response* Find(Id id) const;
  // kNone if there is no entry under this name.
  Id IdOf(const std::string& name) const;
  // Enters a response under a new id; replaces the entry of that name, or else the least recently used one.
  void Insert(Id id, Response response);
  // The entry was used again.
  void Touch(Id id);

 private:
  struct Entry {
    Id id;
    Response response;
  };
  using Entries = std::list<Entry>;  // most recently used first

  void Erase(Entries::iterator entry);

  const size_t capacity_;
  Entries entries_;
  std::unordered_map<Id, Entries::iterator> by_id_;
  std::unordered_map<std::string, Entries::iterator> by_name_;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_AGREE_RESPONSE_CACHE_H_
