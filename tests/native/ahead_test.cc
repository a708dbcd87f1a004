// Contributions that go ahead of their batches: which do, and that none is taken for another's.
#include "agree/ahead.h"

#include "check.h"

using namespace ringtrain;

namespace {

Response Sum(int64_t count, DType dtype = DType::kFloat32) {
  Response response;
  response.request.name = "x";
  response.request.operation = Operation::kAllreduce;
  response.request.reduction = Reduction::kSum;
  response.request.tensors = {{dtype, {count}}};
  return response;
}

bool Goes(const std::vector<Response>& batch) {
  std::vector<const Response*> responses;
  for (const Response& response : batch) responses.push_back(&response);
  return GoesAhead(responses);
}

}  // namespace

RT_TEST(small_plain_sums_go_ahead) {
  RT_CHECK(Goes({Sum(256)}));
  RT_CHECK(Goes({Sum(512), Sum(512)}));
  RT_CHECK(!Goes({Sum(512), Sum(513)}));
  RT_CHECK(!Goes({Sum(0)}));
  RT_CHECK(!Goes({Sum(8), Sum(8, DType::kFloat64)}));
  Response other = Sum(8);
  other.request.operation = Operation::kAllgather;
  RT_CHECK(!Goes({other}));
  other = Sum(8);
  other.request.reduction = Reduction::kAdasum;
  RT_CHECK(!Goes({other}));
  other = Sum(8);
  other.request.compression = Compression::kFloat16;
  RT_CHECK(Goes({other}) && Goes({other, other}));
  RT_CHECK(!Goes({other, Sum(8)}) && !Goes({Sum(8), other}));
  other = Sum(8);
  other.request.compression = Compression::kPlainInt8;
  RT_CHECK(!Goes({other}));
  other = Sum(8);
  other.weights = {1, 2};
  RT_CHECK(!Goes({other}));
  other = Sum(8);
  other.devices = {0, 0};
  RT_CHECK(!Goes({other}));
}

RT_TEST(a_contribution_comes_to_its_own_batch_alone) {
  AheadOf here, there;
  std::string carried;
  here.Send(3, 7, "seven", &carried);
  here.Send(3, 9, "", &carried);
  RT_REQUIRE(there.Receive(3, carried));
  RT_CHECK(!there.Take(2, 7).came);
  const Ahead seven = there.Take(3, 7);
  RT_CHECK(seven.came && !seven.sent);
  RT_CHECK_EQ(seven.contribution, std::string("seven"));
  RT_CHECK(!there.Take(3, 7).came);
  RT_CHECK(!there.Take(3, 8).came);
  RT_CHECK(there.Take(3, 9).came);
  RT_CHECK(here.Take(3, 7).sent && !here.Take(3, 8).sent && here.Take(3, 9).sent);
}

RT_TEST(what_went_ahead_of_batches_that_a_schedule_ended_before_is_dropped) {
  AheadOf here;
  std::string carried;
  here.Send(3, 7, "old", &carried);
  RT_CHECK(!here.Take(4, 0).sent);
  RT_CHECK(!here.Take(4, 7).sent);
}

RT_TEST(bytes_that_no_rank_has_made_are_refused) {
  AheadOf here;
  RT_CHECK(here.Receive(1, ""));
  for (const char* bytes : {"\1", "\1\5abc", "\x80"}) RT_CHECK(!here.Receive(1, bytes));
}
