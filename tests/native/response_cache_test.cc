// The response cache against a plain model of it. Failures print the seed.
#include "agree/response_cache.h"

#include <deque>
#include <random>

#include "check.h"

namespace ringtrain {
namespace {

Response Named(const std::string& name) {
  Response response;
  response.request.name = name;
  return response;
}

RT_TEST(least_recently_used_entry_goes_first) {
  ResponseCache cache(2);
  cache.Insert(1, Named("a"));
  cache.Insert(2, Named("b"));
  cache.Touch(1);
  cache.Insert(3, Named("c"));
  RT_CHECK(cache.Find(1) != nullptr);
  RT_CHECK(cache.Find(2) == nullptr);
  RT_CHECK(cache.Find(3) != nullptr);
  RT_CHECK_EQ(cache.IdOf("b"), ResponseCache::kNone);
  RT_CHECK_EQ(cache.IdOf("c"), ResponseCache::Id{3});
}

RT_TEST(finding_is_not_using) {
  ResponseCache cache(2);
  cache.Insert(1, Named("a"));
  cache.Insert(2, Named("b"));
  cache.Find(1);
  cache.IdOf("a");
  cache.Insert(3, Named("c"));
  RT_CHECK(cache.Find(1) == nullptr);
}

RT_TEST(new_response_replaces_the_one_of_its_name) {
  ResponseCache cache(2);
  cache.Insert(1, Named("a"));
  cache.Insert(2, Named("b"));
  cache.Insert(3, Named("a"));
  RT_CHECK(cache.Find(1) == nullptr);
  RT_CHECK(cache.Find(2) != nullptr);
  RT_CHECK_EQ(cache.IdOf("a"), ResponseCache::Id{3});
}

RT_TEST(no_capacity_holds_nothing) {
  ResponseCache cache(0);
  cache.Insert(1, Named("a"));
  cache.Touch(1);
  RT_CHECK(cache.Find(1) == nullptr);
  RT_CHECK_EQ(cache.IdOf("a"), ResponseCache::kNone);
}

RT_TEST(agrees_with_a_plain_list) {
  for (uint64_t seed = 1; seed <= 50; ++seed) {
    std::mt19937_64 random(seed);
    const size_t capacity = 1 + seed % 6;
    ResponseCache cache(capacity);
    std::deque<std::pair<ResponseCache::Id, std::string>> model;  // most recently used first
    ResponseCache::Id next = 1;
    for (int step = 0; step < 500; ++step) {
      const std::string name = std::to_string(random() % 9);
      auto found = model.begin();
      while (found != model.end() && found->second != name) ++found;
      RT_REQUIRE_EQ(cache.IdOf(name), found == model.end() ? ResponseCache::kNone : found->first);
      if (found != model.end() && random() % 2 == 0) {
        const auto entry = *found;
        cache.Touch(entry.first);
        model.erase(found);
        model.push_front(entry);
        continue;
      }
      if (found != model.end())
        model.erase(found);
      else if (model.size() == capacity)
        model.pop_back();
      cache.Insert(next, Named(name));
      model.emplace_front(next++, name);
      for (const auto& entry : model) {
        RT_REQUIRE(cache.Find(entry.first) != nullptr);
        RT_REQUIRE_EQ(cache.Find(entry.first)->request.name, entry.second);
      }
    }
  }
}

}  // namespace
}  // namespace ringtrain
