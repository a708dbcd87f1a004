// Ahead: what the two hosts of a batch have sent each other before it began (agree/ahead.h).
#ifndef RINGTRAIN_COLLECTIVES_AHEAD_H_
#define RINGTRAIN_COLLECTIVES_AHEAD_H_

#include <string>

namespace ringtrain {

struct Ahead {
  bool sent = false, came = false;
  std::string contribution;  // that came
};

}  // namespace ringtrain
#endif  // RINGTRAIN_COLLECTIVES_AHEAD_H_
