#include "agree/entry.h"

#include <algorithm>
#include <utility>

namespace ringtrain {

void Entry::Add(Nanoseconds now, int member, int members, Arrival arrival, const ResponseCache& cache) {
  last = member;
  last_but_one_at = std::exchange(last_at, now);
  present.Add(member);
  Arrival* same = arrivals.empty() ? nullptr : &arrivals.back();
  if (same != nullptr && same->id == arrival.id &&
      (arrival.id != ResponseCache::kNone || same->request == arrival.request)) {
    same->members.Add(member);
  } else {
    arrival.members = MemberSet(members);
    arrival.members.Add(member);
    if (arrival.id != ResponseCache::kNone)
      arrival.response = std::make_shared<const Response>(*cache.Find(arrival.id));
    arrivals.push_back(std::move(arrival));
  }
}

const Request& Entry::any() const {
  const Arrival& arrival =
      *std::find_if(arrivals.begin(), arrivals.end(), [](const Arrival& some) { return some.members.size() > 0; });
  return arrival.id == ResponseCache::kNone ? arrival.request : arrival.response->request;
}

ResponseCache::Id Entry::id_of_all() const {
  const ResponseCache::Id id = arrivals[0].id;
  for (const Arrival& arrival : arrivals)
    if (arrival.id != id) return ResponseCache::kNone;
  return id;
}

std::vector<const Request*> Entry::Requests(int members, std::deque<Request>* made) const {
  std::vector<const Request*> requests(static_cast<size_t>(members), nullptr);
  for (const Arrival& arrival : arrivals) {
    arrival.members.ForEach([&](int member) {
      const bool by_id = arrival.id != ResponseCache::kNone;
      if (by_id) made->push_back(arrival.response->RequestOf(member, members));
      requests[static_cast<size_t>(member)] = by_id ? &made->back() : &arrival.request;
    });
  }
  return requests;
}

}  // namespace ringtrain
