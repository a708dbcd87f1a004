// Tensor fusion as properties over random ready sets. Failures print the seed.
#include "agree/fusion.h"

#include <random>
#include <set>

#include "check.h"

namespace ringtrain {
namespace {

size_t Pick(std::mt19937_64* random, size_t bound) {
  return std::uniform_int_distribution<size_t>(0, bound - 1)(*random);
}

Request RandomRequest(std::mt19937_64* random, int index) {
  constexpr Operation kOperations[] = {Operation::kAllreduce, Operation::kAllreduce,    Operation::kAllgather,
                                       Operation::kBroadcast, Operation::kAlltoall,     Operation::kBarrier,
                                       Operation::kJoin,      Operation::kReducescatter};
  constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16};
  constexpr Reduction kReductions[] = {Reduction::kSum, Reduction::kAverage};
  Request request;
  request.name = std::to_string(index);
  request.operation = kOperations[Pick(random, 8)];
  request.reduction = kReductions[Pick(random, 2)];
  if (request.operation == Operation::kBroadcast) request.root = static_cast<int>(Pick(random, 2));
  if (Pick(random, 5) == 0) request.prescale = 0.5;
  if (Pick(random, 5) == 0) request.postscale = 2;
  if (Pick(random, 5) == 0) request.compression = Compression::kFloat16;
  if (Find(request.operation)->output == Output::kNone) return request;
  for (size_t tensors = 1 + Pick(random, 2); tensors > 0; --tensors)
    request.tensors.push_back({kDTypes[Pick(random, 2)], {static_cast<int64_t>(Pick(random, 50))}});
  return request;
}

Response RandomResponse(std::mt19937_64* random, int index) {
  Response response;
  response.request = RandomRequest(random, index);
  for (size_t member = 2; Pick(random, 3) == 0 && member > 0; --member)
    response.devices.push_back(static_cast<int64_t>(Pick(random, 2)));
  if (Find(response.request.operation)->reduces && Pick(random, 3) == 0)
    response.weights = {1, static_cast<int64_t>(Pick(random, 2))};
  return response;
}

// What two operations of one batch must share. Written down again here, not taken from CanFuse.
void CheckMayShare(const Response& one, const Response& other) {
  const Request &a = one.request, &b = other.request;
  RT_CHECK(Find(a.operation)->fuses);
  RT_CHECK_EQ(a.operation, b.operation);
  RT_CHECK_EQ(a.root, b.root);
  RT_CHECK(one.devices == other.devices);
  if (!Find(a.operation)->reduces) return;
  std::set<DType> dtypes;
  for (const Request* request : {&a, &b})
    for (const TensorSpec& tensor : request->tensors) dtypes.insert(tensor.dtype);
  RT_CHECK_EQ(dtypes.size(), size_t{1});
  RT_CHECK_EQ(a.reduction, b.reduction);
  RT_CHECK_EQ(a.prescale, b.prescale);
  RT_CHECK_EQ(a.postscale, b.postscale);
  RT_CHECK_EQ(a.compression, b.compression);
  RT_CHECK(one.weights == other.weights);
}

void CheckBatches(const std::vector<const Response*>& ready, const std::vector<std::vector<int>>& batches,
                  size_t threshold) {
  std::set<int> seen;
  int led_by = -1;
  for (const std::vector<int>& batch : batches) {
    RT_REQUIRE(!batch.empty());
    RT_CHECK(batch[0] > led_by);  // batches in the order of their earliest operations
    led_by = batch[0];
    size_t bytes = 0;
    for (size_t place = 0; place < batch.size(); ++place) {
      RT_CHECK(seen.insert(batch[place]).second);
      bytes += ready[batch[place]]->request.bytes();
      if (place == 0) continue;
      RT_CHECK(batch[place] > batch[place - 1]);
      for (size_t earlier = 0; earlier < place; ++earlier) CheckMayShare(*ready[batch[earlier]], *ready[batch[place]]);
    }
    RT_CHECK(batch.size() == 1 || bytes <= threshold);
  }
  RT_CHECK_EQ(seen.size(), ready.size());
}

RT_TEST(batches_keep_the_set_the_order_and_the_limit) {
  for (uint64_t seed = 1; seed <= 500; ++seed) {
    const int before = check::Failures();
    std::mt19937_64 random(seed);
    std::vector<Response> responses;
    for (size_t count = Pick(&random, 40); responses.size() < count;)
      responses.push_back(RandomResponse(&random, static_cast<int>(responses.size())));
    std::vector<const Response*> ready;
    for (const Response& response : responses) ready.push_back(&response);
    for (size_t threshold : {size_t{0}, size_t{100}, size_t{1000}, size_t{1} << 30}) {
      const auto batches = Fuse(ready, threshold);
      CheckBatches(ready, batches, threshold);
      RT_CHECK(Fuse(ready, threshold) == batches);
      if (threshold == 0) RT_CHECK_EQ(batches.size(), ready.size());
    }
    if (check::Failures() == before) continue;
    std::fprintf(stderr, "seed %d\n", static_cast<int>(seed));
    return;
  }
}

Request Floats(int64_t count) {
  Request request;
  request.tensors = {{DType::kFloat32, {count}}};
  return request;
}

std::vector<std::vector<int>> FuseAll(const std::vector<Request>& requests, size_t threshold) {
  std::vector<Response> responses(requests.size());
  std::vector<const Response*> ready;
  for (size_t index = 0; index < requests.size(); ++index) {
    responses[index].request = requests[index];
    ready.push_back(&responses[index]);
  }
  return Fuse(ready, threshold);
}

RT_TEST(everything_alike_shares_one_batch) {
  const std::vector<Request> requests(100, Floats(10));
  RT_CHECK_EQ(FuseAll(requests, 4000).size(), size_t{1});
  RT_CHECK_EQ(FuseAll(requests, 3999).size(), size_t{2});
}

RT_TEST(larger_than_the_limit_travels_alone_and_is_looked_past) {
  const auto batches = FuseAll({Floats(10), Floats(1000), Floats(10)}, 100);
  RT_CHECK(batches == (std::vector<std::vector<int>>{{0, 2}, {1}}));
}

RT_TEST(what_does_not_fit_is_looked_past) {
  std::vector<Request> requests(4, Floats(1));
  requests[1].reduction = Reduction::kMax;
  requests[3].reduction = Reduction::kMax;
  RT_CHECK(FuseAll(requests, 100) == (std::vector<std::vector<int>>{{0, 2}, {1, 3}}));
}

RT_TEST(gathers_of_different_types_share_a_batch) {
  std::vector<Request> requests(2, Floats(1));
  for (Request& request : requests) request.operation = Operation::kAllgather;
  requests[1].tensors[0].dtype = DType::kInt8;
  RT_CHECK_EQ(FuseAll(requests, 100).size(), size_t{1});
}

}  // namespace
}  // namespace ringtrain
