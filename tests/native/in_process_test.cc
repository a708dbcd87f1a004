// The in-process transport does what every transport must do, between threads.
#include "transport/in_process.h"

#include "check.h"
#include "transport_conformance.h"

using namespace ringtrain;

namespace {

struct Joined {
  std::unique_ptr<Transport> transport;
  std::unique_ptr<HostMemory> memory;
};

Joined Join(const std::shared_ptr<Hub>& hub, int rank) {
  Joined joined;
  RT_REQUIRE_OK(Hub::Join(hub, rank, &joined.transport, &joined.memory));
  return joined;
}

}  // namespace

RT_TEST(conforms_for_each_world_and_layout) {
  for (const std::vector<int>& layout : {std::vector<int>{1}, {2}, {3}, {2, 2}, {3, 1}}) {
    auto hub = std::make_shared<Hub>(layout);
    check::RunRanks(hub->size(), [&hub](int rank) {
      Joined joined = Join(hub, rank);
      RT_CHECK_EQ(joined.transport->rank(), rank);
      RT_CHECK_EQ(joined.transport->size(), hub->size());
      Conformance(*joined.transport).All();
      joined.transport->Close(true, 5.0);
    });
  }
}

RT_TEST(a_rank_joins_once_and_within_the_world) {
  auto hub = std::make_shared<Hub>(std::vector<int>{2});
  const Joined first = Join(hub, 0);
  Joined again;
  for (int rank : {0, -1, 2})
    RT_CHECK_EQ(Hub::Join(hub, rank, &again.transport, &again.memory).code(), StatusCode::kInvalidArgument);
}

RT_TEST(layouts_are_parsed_and_must_add_up) {
  std::vector<int> layout;
  RT_REQUIRE_OK(ParseLayout("2+1", 3, &layout));
  RT_CHECK(layout == (std::vector<int>{2, 1}));
  RT_REQUIRE_OK(ParseLayout("", 3, &layout));
  RT_CHECK(layout == std::vector<int>{3});
  for (const char* text : {"2+2", "3+0", "1++2", "+3", "a", "-1+4", "3 "})
    RT_CHECK_EQ(ParseLayout(text, 3, &layout).code(), StatusCode::kInvalidArgument);
}
