// The row arithmetic against an account of it: every row of every member is written down by where it comes from and who
// receives it, and the functions must say the same.
#include "collectives/rows.h"

#include <numeric>

#include "check.h"

namespace ringtrain {
namespace {

using Rows = std::vector<int64_t>;

Topology Members(int members, int me) {
  std::vector<int> ranks(members);
  std::iota(ranks.begin(), ranks.end(), 0);
  return MakeTopology(ranks, me, std::vector<int>(members, 0));
}

Batch BatchOf(Operation operation, Rows rows, size_t row_bytes) {
  BatchTensor tensor;
  tensor.row_bytes = row_bytes;
  tensor.bytes = std::accumulate(rows.begin(), rows.end(), int64_t{0}) * row_bytes;
  tensor.rows = std::move(rows);
  Batch batch;
  batch.operation = operation;
  batch.tensors.push_back(std::move(tensor));
  return batch;
}

size_t Input(const Batch& batch, int members, int me) {
  return InputBytes(batch, batch.tensors[0], Members(members, me));
}
size_t Output(const Batch& batch, int members, int me) {
  return OutputBytes(batch, batch.tensors[0], Members(members, me));
}

RT_TEST(members_say_their_rows_where_they_may_differ) {
  RT_CHECK(Ragged(Layout::kGather) && Ragged(Layout::kExchange));
  RT_CHECK(!Ragged(Layout::kWhole) && !Ragged(Layout::kScatter) && !Ragged(Layout::kNone));
  RT_CHECK(ReceivesAll(Layout::kWhole) && ReceivesAll(Layout::kGather));
  RT_CHECK(!ReceivesAll(Layout::kScatter) && !ReceivesAll(Layout::kExchange));
}

RT_TEST(rows_of_a_tensor) {
  const Rows said = {4, 5, 0, 1, 9, 10};  // three members, two tensors
  RT_CHECK(RowsOfTensor(Layout::kGather, said, 0, 2, 4, 3) == (Rows{4, 0, 9}));
  RT_CHECK(RowsOfTensor(Layout::kGather, said, 1, 2, 5, 3) == (Rows{5, 1, 10}));
  RT_CHECK(RowsOfTensor(Layout::kWhole, {}, 0, 1, 7, 3).empty());
}

RT_TEST(shares_of_a_scatter_differ_by_one_at_most_and_the_first_are_the_larger) {
  RT_CHECK(RowsOfTensor(Layout::kScatter, {}, 0, 1, 7, 3) == (Rows{3, 2, 2}));
  RT_CHECK(RowsOfTensor(Layout::kScatter, {}, 0, 1, 2, 4) == (Rows{1, 1, 0, 0}));
  for (int members = 1; members < 9; ++members)
    for (int64_t extent = 0; extent < 30; ++extent) {
      const Rows rows = RowsOfTensor(Layout::kScatter, {}, 0, 1, extent, members);
      RT_CHECK_EQ(static_cast<int>(rows.size()), members);
      RT_CHECK_EQ(std::accumulate(rows.begin(), rows.end(), int64_t{0}), extent);
      for (int member = 1; member < members; ++member)
        RT_CHECK(rows[member - 1] - rows[member] == 0 || rows[member - 1] - rows[member] == 1);
      RT_CHECK(rows.front() - rows.back() <= 1);
    }
}

RT_TEST(an_exchange_adds_up_on_both_sides) {
  const Rows rows = {1, 0, 4, 7, 0, 2};  // to each of three members, and from each
  for (int member = 0; member < 3; ++member) {
    RT_CHECK_EQ(RowsTo(rows, member), rows[member]);
    RT_CHECK_EQ(RowsFrom(rows, 3, member), rows[3 + member]);
    RT_CHECK_EQ(ContributedRows(Layout::kExchange, rows, 3, member), 5);
    RT_CHECK_EQ(ReceivedRows(Layout::kExchange, rows, 3, member), 9);
  }
  const Batch batch = BatchOf(Operation::kAlltoall, rows, 12);
  RT_CHECK_EQ(Input(batch, 3, 1), size_t{5 * 12});
  RT_CHECK_EQ(Output(batch, 3, 1), size_t{9 * 12});
}

RT_TEST(gathers_and_scatters_mirror_each_other) {
  const Rows rows = {2, 0, 3};
  RT_CHECK_EQ(ContributedRows(Layout::kGather, rows, 3, 2), int64_t{3});
  RT_CHECK_EQ(ReceivedRows(Layout::kGather, rows, 3, 2), int64_t{5});
  RT_CHECK_EQ(ContributedRows(Layout::kScatter, rows, 3, 2), int64_t{5});
  RT_CHECK_EQ(ReceivedRows(Layout::kScatter, rows, 3, 2), int64_t{3});
  const Batch gather = BatchOf(Operation::kAllgather, rows, 8), scatter = BatchOf(Operation::kReducescatter, rows, 8);
  const std::vector<Share> gathered = SharesOf(gather, gather.tensors[0], 3);
  const std::vector<Share> scattered = SharesOf(scatter, scatter.tensors[0], 3);
  const size_t offsets[] = {0, 16, 16};
  for (int member = 0; member < 3; ++member) {
    RT_CHECK_EQ(Input(gather, 3, member), size_t(rows[member]) * 8);
    RT_CHECK_EQ(Output(gather, 3, member), size_t{40});
    RT_CHECK_EQ(Input(scatter, 3, member), size_t{40});
    RT_CHECK_EQ(Output(scatter, 3, member), size_t(rows[member]) * 8);
    RT_CHECK_EQ(gathered[member].input_offset, size_t{0});
    RT_CHECK_EQ(gathered[member].output_offset, offsets[member]);
    RT_CHECK_EQ(scattered[member].input_offset, offsets[member]);
    RT_CHECK_EQ(scattered[member].output_offset, size_t{0});
    RT_CHECK_EQ(gathered[member].bytes, size_t(rows[member]) * 8);
    RT_CHECK_EQ(scattered[member].bytes, size_t(rows[member]) * 8);
  }
}

RT_TEST(whole_tensors_are_everyones_or_the_roots) {
  Batch batch = BatchOf(Operation::kBroadcast, {}, 0);
  batch.tensors[0].bytes = 24;
  batch.root = 1;
  const std::vector<Share> shares = SharesOf(batch, batch.tensors[0], 3);
  for (int member = 0; member < 3; ++member) {
    RT_CHECK_EQ(shares[member].bytes, size_t{member == 1 ? 24u : 0u});
    RT_CHECK_EQ(Input(batch, 3, member), size_t{24});
    RT_CHECK_EQ(Output(batch, 3, member), size_t{24});
  }
}

}  // namespace
}  // namespace ringtrain
