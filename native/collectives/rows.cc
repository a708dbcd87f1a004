#include "collectives/rows.h"

#include <numeric>

namespace ringtrain {
namespace {

int64_t Sum(const std::vector<int64_t>& rows) { return std::accumulate(rows.begin(), rows.end(), int64_t{0}); }

// Of n rows each of k members gets n / k, the first n % k of them one more.
std::vector<int64_t> EvenShares(int64_t extent, int members) {
  std::vector<int64_t> rows;
  for (int member = 0; member < members; ++member)
    rows.push_back(extent / members + (member < extent % members ? 1 : 0));
  return rows;
}

}  // namespace

bool Ragged(Layout layout) { return layout == Layout::kGather || layout == Layout::kExchange; }

bool ReceivesAll(Layout layout) { return layout == Layout::kWhole || layout == Layout::kGather; }

std::vector<int64_t> RowsOfTensor(Layout layout, const std::vector<int64_t>& said, size_t index, size_t tensors,
                                  int64_t extent, int members) {
  if (layout == Layout::kScatter) return EvenShares(extent, members);
  std::vector<int64_t> rows;
  if (layout == Layout::kGather)
    for (int member = 0; member < members; ++member) rows.push_back(said[member * tensors + index]);
  return rows;
}

int64_t ContributedRows(Layout layout, const std::vector<int64_t>& rows, int members, int member) {
  if (layout == Layout::kGather) return rows[member];
  return layout == Layout::kExchange ? std::accumulate(rows.begin(), rows.begin() + members, int64_t{0}) : Sum(rows);
}

int64_t ReceivedRows(Layout layout, const std::vector<int64_t>& rows, int members, int member) {
  if (layout == Layout::kScatter) return rows[member];
  return layout == Layout::kExchange ? std::accumulate(rows.begin() + members, rows.end(), int64_t{0}) : Sum(rows);
}

size_t InputBytes(const Batch& batch, const BatchTensor& tensor, const Topology& topology) {
  const Layout layout = Find(batch.operation)->layout;
  if (!Ragged(layout)) return tensor.bytes;
  return ContributedRows(layout, tensor.rows, topology.member_count(), topology.me) * tensor.row_bytes;
}

size_t OutputBytes(const Batch& batch, const BatchTensor& tensor, const Topology& topology) {
  const Layout layout = Find(batch.operation)->layout;
  if (OutputOf(layout) != Output::kRows) return tensor.bytes;
  return ReceivedRows(layout, tensor.rows, topology.member_count(), topology.me) * tensor.row_bytes;
}

std::vector<Share> SharesOf(const Batch& batch, const BatchTensor& tensor, int members) {
  const OperationRow& operation = *Find(batch.operation);
  std::vector<Share> shares(members);
  if (operation.rooted) {
    shares[batch.root].bytes = tensor.bytes;
    return shares;
  }
  size_t offset = 0;  // in the memory of those that have all rows
  for (int member = 0; member < members; ++member) {
    Share& share = shares[member];
    share.bytes = tensor.rows[member] * tensor.row_bytes;
    (operation.layout == Layout::kGather ? share.output_offset : share.input_offset) = offset;
    offset += share.bytes;
  }
  return shares;
}

}  // namespace ringtrain
