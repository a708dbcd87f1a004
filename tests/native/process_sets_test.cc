// The table of process sets: lanes are used again and shared by none, so that tags of messages under way differ.
#include "world/process_sets.h"

#include <set>

#include "check.h"
#include "collectives/group.h"

namespace ringtrain {
namespace {

RT_TEST(a_lane_is_used_again_and_shared_by_none) {
  ProcessSetTable table;
  for (int id = 0; id < 3; ++id) RT_CHECK_EQ(table.Add(id, {0, id + 1}), id);
  table.Remove(1);
  RT_CHECK_EQ(table.count(), 2);
  RT_CHECK(table.Members(1).empty());
  RT_CHECK_EQ(table.Add(3, {0, 1}), 1);
  RT_CHECK_EQ(table.Add(4, {0, 1}), 3);
  table.Remove(99);
  RT_CHECK(table.Members(4) == (std::vector<int>{0, 1}));
}

RT_TEST(tags_of_sets_far_apart_differ) {
  ProcessSetTable table;
  std::set<int> tags;
  for (int id = 0; id <= 3 * Group::kMaxGroups; ++id) {
    const int lane = table.Add(id, {0, 1});
    if (id % Group::kMaxGroups == 0) {  // stays; all others go at once
      Group group;
      group.lane = lane;
      RT_CHECK(tags.insert(group.OrderedTag()).second);
      RT_CHECK(group.OrderedTag() < Wire::kMaxTag);
      for (uint64_t exchange = 1000; exchange < 1000 + Group::kExchangesApart; ++exchange)
        RT_CHECK(tags.insert(group.ExchangeTag(exchange)).second);
      for (uint64_t chunk = 1000; chunk < 1000 + Group::kChunksApart; ++chunk) {
        RT_CHECK(tags.insert(group.Tag(chunk)).second);
        RT_CHECK(group.Tag(chunk) >= 0 && group.Tag(chunk) < Wire::kMaxTag);
      }
    } else {
      table.Remove(id);
    }
  }
}

}  // namespace
}  // namespace ringtrain
