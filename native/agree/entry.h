// Entry: an operation that some members of a process set have submitted, and others not yet; the arbiter's.
#ifndef RINGTRAIN_AGREE_ENTRY_H_
#define RINGTRAIN_AGREE_ENTRY_H_

#include <deque>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "agree/member_set.h"
#include "agree/request.h"
#include "agree/response_cache.h"
#include "agree/stall_watch.h"
#include "base/clock.h"

namespace ringtrain {

struct Arrival {  // one request of some members, all in the same words
  MemberSet members;
  ResponseCache::Id id = ResponseCache::kNone;
  // Of the id: by the time all are there it may have been evicted. Whoever needs a member's request makes it then.
  std::shared_ptr<const Response> response;
  Request request;  // unless id
};

struct Entry {
  std::string name;
  std::vector<Arrival> arrivals;  // no member is in two of them
  MemberSet present;              // who is in any
  int refused = -1;               // by whose own rank, which has raised already
  StallWatch::Clock clock;
  int last = 0;  // member that submitted last
  Nanoseconds last_at = 0, last_but_one_at = 0;
  std::list<std::string>::iterator place;  // among the names that wait

  // A member that is not present, of so many, has submitted it.
  void Add(Nanoseconds now, int member, int members, Arrival arrival, const ResponseCache& cache);
  // Some member's request, but for what is the member's own.
  const Request& any() const;
  // Under which all have submitted it, or kNone.
  ResponseCache::Id id_of_all() const;
  // By member, of so many; nullptr for who is not present. Those that came by an id are made, and kept in *made.
  std::vector<const Request*> Requests(int members, std::deque<Request>* made) const;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_AGREE_ENTRY_H_
