// Match: do the requests of all members fit together, and what follows from them? Pure.
#ifndef RINGTRAIN_AGREE_MATCH_H_
#define RINGTRAIN_AGREE_MATCH_H_

#include <vector>

#include "agree/request.h"

namespace ringtrain {

// requests: by member, nullptr for one that has joined; at least one is there. members: global ranks. hosts: by member,
// any numbers that are equal for members of one host; empty: all on one. The response is the coordinator's.
// Where they do not fit: kMismatch with a text that names the attribute, both values and the ranks on each side.
Status Match(const std::vector<const Request*>& requests, const std::vector<int>& members,
             const std::vector<int>& hosts, Response* response);

}  // namespace ringtrain
#endif  // RINGTRAIN_AGREE_MATCH_H_
