// What the attributes of a request mean together: what is wrong with it, or with what members have agreed on, with a
// function for each who asks. Pure.
#ifndef RINGTRAIN_AGREE_CHECK_H_
#define RINGTRAIN_AGREE_CHECK_H_

#include <vector>

#include "agree/request.h"
#include "base/status.h"

namespace ringtrain {

// What this rank can see alone to be wrong with a request of its own. members: global ranks of the process set.
Status Check(const Request& request, const std::vector<int>& members);
// What no member can see alone to be wrong with what they have agreed on.
Status Check(const Response& response);
// Whether what has come from another rank can be used in this process set: the lists have their lengths, and what is
// named is there.
bool Fits(const Request& request, const std::vector<int>& members);
bool Fits(const Response& response, const std::vector<int>& members);
// Whether there can be such a tensor: no extent is negative, and its bytes can be counted.
bool IsPossible(const TensorSpec& tensor);
// Whether it is an allreduce in host memory to which each member contributes its tensor as it is, but for a factor and
// the cast of the first one of its batch.
bool IsPlain(const Response& response, const Request& first);

}  // namespace ringtrain
#endif  // RINGTRAIN_AGREE_CHECK_H_
