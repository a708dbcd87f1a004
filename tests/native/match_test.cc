// Matching: which requests fit together, and what follows from them. The words of each mismatch are in
// negotiator_test.cc, where all ranks hear them.
#include "agree/match.h"

#include "agree/check.h"
#include "check.h"

namespace ringtrain {
namespace {

const std::vector<int> kMembers = {2, 5, 7};

Request Tensor(Operation operation, std::vector<int64_t> shape) {
  Request request;
  request.name = "x";
  request.operation = operation;
  request.tensors = {{DType::kFloat32, std::move(shape)}};
  return request;
}

std::vector<const Request*> Pointers(const std::vector<Request>& requests) {
  std::vector<const Request*> pointers;
  for (const Request& request : requests) pointers.push_back(&request);
  return pointers;
}

std::string TextOf(const std::vector<Request>& requests) {
  Response response;
  return Match(Pointers(requests), kMembers, {}, &response).message();
}

RT_TEST(equal_requests_are_the_response) {
  const Request request = Tensor(Operation::kAllreduce, {2, 3});
  Response response;
  RT_CHECK_OK(Match(Pointers({request, request, request}), kMembers, {}, &response));
  RT_CHECK(response.request == request);
  RT_CHECK(response.rows.empty());
}

RT_TEST(rows_of_a_gather_may_differ) {
  std::vector<Request> requests = {Tensor(Operation::kAllgather, {4, 3}), Tensor(Operation::kAllgather, {0, 3}),
                                   Tensor(Operation::kAllgather, {9, 3})};
  for (Request& request : requests) request.tensors.push_back({DType::kInt8, {request.tensors[0].shape[0] + 1}});
  Response response;
  RT_CHECK_OK(Match(Pointers(requests), kMembers, {}, &response));
  RT_CHECK(response.rows == (std::vector<int64_t>{4, 5, 0, 1, 9, 10}));
  for (int member = 0; member < 3; ++member) RT_CHECK(response.RequestOf(member, 3) == requests[member]);
}

RT_TEST(joined_members_gather_no_rows) {
  const Request request = Tensor(Operation::kAllgather, {4, 3});
  Response response;
  RT_CHECK_OK(Match({nullptr, &request, nullptr}, kMembers, {}, &response));
  RT_CHECK(response.rows == (std::vector<int64_t>{0, 4, 0}));
}

RT_TEST(weights_may_differ_and_a_joined_member_has_none) {
  std::vector<Request> requests(3, Tensor(Operation::kAllreduce, {4}));
  for (size_t member = 0; member < 3; ++member) requests[member].weight = 7 - static_cast<int64_t>(member);
  Response response;
  RT_CHECK_OK(Match({&requests[0], nullptr, &requests[2]}, kMembers, {}, &response));
  RT_CHECK(response.weights == (std::vector<int64_t>{7, 0, 5}));
  RT_CHECK_OK(Match(Pointers(requests), kMembers, {}, &response));
  for (int member = 0; member < 3; ++member) RT_CHECK(response.RequestOf(member, 3) == requests[member]);
  requests[1].weight = Request::kNoCount;
  RT_CHECK_EQ(TextOf(requests),
              std::string("allreduce 'x': weighting must be the same on all ranks, but is by weights on ranks 2, 7 "
                          "and none on rank 5. Pass a weight on every rank, or on none."));
  for (Request& request : requests) request.weight = 0;
  RT_CHECK_EQ(TextOf(requests),
              std::string("allreduce 'x': some weight must be above 0, but those of all ranks that take part are 0. "
                          "Skip the operation on all ranks."));
}

RT_TEST(splits_of_an_alltoall_may_differ) {
  std::vector<Request> requests(3, Tensor(Operation::kAlltoall, {6}));
  requests[0].splits = {1, 2, 3};
  requests[1].splits = {6, 0, 0};
  requests[2].splits = {0, 0, 2};
  requests[2].tensors[0].shape = {2};
  Response response;
  RT_CHECK_OK(Match(Pointers(requests), kMembers, {}, &response));
  RT_CHECK(*response.exchanged == (std::vector<int64_t>{1, 2, 3, 6, 0, 0, 0, 0, 2}));
  RT_CHECK(response.rows == (std::vector<int64_t>{1, 6, 0, 6}));
  for (int member = 0; member < 3; ++member) {
    RT_CHECK(response.RequestOf(member, 3) == requests[member]);
    const Response told = response.For(member, 3);
    RT_CHECK(told.exchanged == nullptr);
    RT_CHECK(told.request == requests[member]);
    RT_CHECK(told.IsOf(member, 3, requests[member]));
    for (int from = 0; from < 3; ++from) RT_CHECK_EQ(told.rows[from], requests[from].splits[member]);
    RT_CHECK_EQ(told.rows.back(), 6);
  }
}

RT_TEST(the_most_of_an_alltoall_counts_within_hosts) {
  std::vector<Request> requests(3, Tensor(Operation::kAlltoall, {9}));
  requests[0].splits = {9, 0, 0};
  requests[1].splits = {7, 0, 2};
  requests[2].splits = {8, 1, 0};
  for (const auto& [hosts, most] : std::vector<std::pair<std::vector<int>, int64_t>>{
           {{}, 8}, {{0, 0, 1}, 7}, {{4, 3, 3}, 2}, {{1, 0, 1}, 8}, {{0, 1, 2}, 0}}) {
    Response response;
    RT_CHECK_OK(Match(Pointers(requests), kMembers, hosts, &response));
    RT_CHECK_EQ(response.rows.back(), most);
  }
}

RT_TEST(joined_members_exchange_no_rows) {
  Request request = Tensor(Operation::kAlltoall, {6});
  request.splits = {1, 2, 3};
  Response response;
  RT_CHECK_OK(Match({nullptr, &request, nullptr}, kMembers, {}, &response));
  RT_CHECK(response.For(1, 3).request == request);
  RT_CHECK(response.For(2, 3).request.splits == (std::vector<int64_t>{0, 0, 0}));
  RT_CHECK(response.For(2, 3).rows == (std::vector<int64_t>{0, 3, 0, 3}));
}

RT_TEST(many_values_are_not_told_one_by_one) {
  std::vector<Request> requests;
  std::vector<int> members;
  for (int member = 0; member < 64; ++member) {
    requests.push_back(Tensor(Operation::kAllreduce, {member < 60 ? member : 1}));
    members.push_back(member);
  }
  Response response;
  const std::string text = Match(Pointers(requests), members, {}, &response).message();
  RT_CHECK_EQ(text.substr(0, text.find(". ")),
              "allreduce 'x': shape must be the same on all ranks, but is [0] on rank 0, [1] on ranks 1, 60-63, [2] on "
              "rank 2, [3] on rank 3, [4] on rank 4, [5] on rank 5, [6] on rank 6, [7] on rank 7 and 52 more on ranks "
              "8-59");
}

RT_TEST(reduction_and_root_matter_only_where_they_are_used) {
  std::vector<Request> requests(3, Tensor(Operation::kAllgather, {1}));
  requests[1].reduction = Reduction::kMax;
  requests[2].root = 5;
  RT_CHECK_EQ(TextOf(requests), std::string());
  for (Request& request : requests) request.operation = Operation::kReducescatter;
  RT_CHECK(
      TextOf(requests).find(
          "reducescatter 'x': reduction must be the same on all ranks, but is sum on ranks 2, 7 and max on rank 5.") ==
      0);
}

RT_TEST(three_different_values_are_all_named) {
  RT_CHECK_EQ(
      TextOf(
          {Tensor(Operation::kAllreduce, {1}), Tensor(Operation::kAllreduce, {2}), Tensor(Operation::kAllreduce, {3})}),
      std::string(
          "allreduce 'x': shape must be the same on all ranks, but is [1] on rank 2, [2] on rank 5 and [3] on rank 7. "
          "Pad or slice to one shape; allgather and alltoall take rows of any number, but of one shape."));
}

RT_TEST(scalars_and_empty_groups_have_shapes_too) {
  RT_CHECK(
      TextOf({Tensor(Operation::kAllreduce, {}), Tensor(Operation::kAllreduce, {1}), Tensor(Operation::kAllreduce, {})})
          .find("shape must be the same on all ranks, but is [] on ranks 2, 7 and [1] on rank 5.") !=
      std::string::npos);
  std::vector<Request> requests(3, Tensor(Operation::kAllreduce, {1}));
  requests[0].tensors.clear();
  RT_CHECK(TextOf(requests).find(
               "number of tensors must be the same on all ranks, but is 0 on rank 2 and 1 on ranks 5, 7.") !=
           std::string::npos);
}

RT_TEST(cacheable_here_and_not_there_is_no_mismatch) {
  std::vector<Request> requests(3, Tensor(Operation::kAllreduce, {1}));
  requests[1].cacheable = false;
  RT_CHECK_EQ(TextOf(requests), std::string());
}

// ---- what one rank can see alone ----

std::string Refused(const Request& request) { return Check(request, kMembers).message(); }

RT_TEST(each_rank_refuses_what_it_sees_to_be_wrong) {
  RT_CHECK_EQ(Refused(Tensor(Operation::kAllreduce, {2})), std::string());
  RT_CHECK_EQ(
      Refused(Tensor(Operation::kAllgather, {})),
      std::string("allgather 'x': the tensor must have a first dimension, but is a scalar. Reshape it to (1,)."));
  RT_CHECK_EQ(Refused(Tensor(Operation::kAllreduce, {2, -1})),
              std::string("allreduce 'x': the shape must not be negative, but is float32[2, -1]."));
  Request request = Tensor(Operation::kBroadcast, {2});
  request.root = 3;
  RT_CHECK_EQ(Refused(request), std::string("broadcast 'x': root must be one of ranks 2, 5, 7, got 3."));
  request.root = 7;
  RT_CHECK_EQ(Refused(request), std::string());
  request = Tensor(Operation::kAllreduce, {2});
  request.reduction = static_cast<Reduction>(99);
  RT_CHECK_EQ(Refused(request), std::string("allreduce 'x': reduction 99 does not exist."));
  request.reduction = Reduction::kAverage;
  request.tensors[0].dtype = DType::kBool;
  RT_CHECK_EQ(
      Refused(request),
      std::string("allreduce 'x': the average of bool is not defined. Use sum (OR), product (AND), or cast first."));
  request.reduction = Reduction::kSum;
  request.postscale = 2;
  RT_CHECK_EQ(Refused(request), std::string("allreduce 'x': bool cannot be scaled. Cast first."));
  RT_CHECK_EQ(Refused(Tensor(Operation::kAllreduce, std::vector<int64_t>(64, 1))), std::string());
  RT_CHECK_EQ(Refused(Tensor(Operation::kAllreduce, std::vector<int64_t>(65, 1))),
              std::string("allreduce 'x': a tensor may have 64 dimensions at most, but has 65. Reshape it."));
  request = Tensor(Operation::kBroadcast, {2});
  request.root = 7;
  request.compression = Compression::kFloat16;
  RT_CHECK_EQ(
      Refused(request),
      std::string("broadcast 'x': only operations that reduce may be compressed, but found compression float16. "
                  "Leave it out, or cast the tensor."));
  request = Tensor(Operation::kAllreduce, {2});
  request.compression = static_cast<Compression>(9);
  RT_CHECK_EQ(Refused(request), std::string("allreduce 'x': compression 9 does not exist."));
}

RT_TEST(splits_must_fit_the_members_and_the_rows) {
  Request request = Tensor(Operation::kAlltoall, {6});
  request.splits = {1, 2};
  RT_CHECK_EQ(Refused(request),
              std::string("alltoall 'x': splits must have one entry for each of the 3 members, got 2."));
  request.splits = {1, 2, -1};
  RT_CHECK_EQ(Refused(request), std::string("alltoall 'x': splits must not be negative, but one is -1."));
  request.splits = {INT64_MAX, 2, 4};
  RT_CHECK_EQ(
      Refused(request),
      std::string("alltoall 'x': splits must add up to the 6 rows of the tensor, but add up to more than 2^63."));
  request.splits = {1, 2, 4};
  RT_CHECK_EQ(Refused(request),
              std::string("alltoall 'x': splits must add up to the 6 rows of the tensor, but add up to 7."));
  request.splits = {1, 2, 3};
  RT_CHECK_EQ(Refused(request), std::string());
  request.tensors.push_back(request.tensors[0]);
  RT_CHECK_EQ(Refused(request), std::string("alltoall 'x': takes one tensor, got 2."));
}

}  // namespace
}  // namespace ringtrain
