// Lists of ranks as people write them: "rank 3", "ranks 0-2, 5".
#ifndef RINGTRAIN_BASE_RANKS_H_
#define RINGTRAIN_BASE_RANKS_H_

#include <string>
#include <vector>

namespace ringtrain {

inline std::string RanksText(const std::vector<int>& ascending) {
  std::string text = ascending.size() == 1 ? "rank " : "ranks ";
  for (size_t first = 0; first < ascending.size();) {
    size_t last = first;
    while (last + 1 < ascending.size() && ascending[last + 1] == ascending[last] + 1) ++last;
    if (first > 0) text += ", ";
    text += std::to_string(ascending[first]);
    if (last > first) text += (last == first + 1 ? ", " : "-") + std::to_string(ascending[last]);
    first = last + 1;
  }
  return text;
}

}  // namespace ringtrain
#endif  // RINGTRAIN_BASE_RANKS_H_
