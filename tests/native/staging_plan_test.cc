// How batches on GPUs are cut for pinned memory: every byte once, at multiples of a block, alike on all members.
#include "gpu/staging_plan.h"

#include <map>
#include <random>

#include "check.h"
#include "collectives/rows.h"

namespace ringtrain {
namespace {

Topology Members(int count, int me) {
  std::vector<int> members, hosts;
  for (int member = 0; member < count; ++member) {
    members.push_back(member);
    hosts.push_back(0);
  }
  return MakeTopology(members, me, hosts);
}

BatchTensor Tensor(size_t bytes) {
  BatchTensor tensor;
  tensor.bytes = bytes;
  return tensor;
}

void CheckCut(const std::vector<size_t>& sizes, size_t piece_bytes, size_t block_bytes) {
  Batch batch;
  for (size_t bytes : sizes) batch.tensors.push_back(Tensor(bytes));
  const std::vector<StagedPiece> pieces = CutIntoPieces(batch, Members(2, 0), piece_bytes, block_bytes);
  RT_CHECK(!pieces.empty());
  std::map<int, size_t> covered;
  for (const StagedPiece& piece : pieces) {
    size_t end = 0;
    for (const StagedRun& run : piece.runs) {
      RT_CHECK_EQ(run.offset, covered[run.tensor]);
      RT_CHECK_EQ(run.offset % block_bytes, size_t{0});
      RT_CHECK(run.input_bytes > 0 && run.input_bytes == run.output_bytes && run.input_at == run.output_at);
      RT_CHECK(run.input_at >= end);
      covered[run.tensor] += run.input_bytes;
      end = run.input_at + run.input_bytes;
    }
    RT_CHECK(end <= piece.bytes);
    RT_CHECK(piece.bytes <= std::max(piece_bytes, block_bytes) + 64);
  }
  for (size_t tensor = 0; tensor < sizes.size(); ++tensor)
    RT_CHECK_EQ(covered[static_cast<int>(tensor)], sizes[tensor]);
}

RT_TEST(every_byte_is_in_one_piece_and_cut_at_blocks) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 300; ++round) {
    const size_t block = size_t{8} << random() % 8, piece = block * (1 + random() % 9) + random() % 8;
    std::vector<size_t> sizes;
    for (size_t count = random() % 6; count > 0; --count) sizes.push_back(random() % 5 == 0 ? 0 : random() % 20000);
    CheckCut(sizes, piece, block);
  }
  CheckCut({}, 4096, 4);
}

RT_TEST(several_small_tensors_share_a_piece) {
  Batch batch;
  for (int tensor = 0; tensor < 10; ++tensor) batch.tensors.push_back(Tensor(100));
  RT_CHECK_EQ(CutIntoPieces(batch, Members(2, 0), 4096, 4).size(), size_t{1});
}

RT_TEST(operations_with_rows_are_one_piece_with_room_for_both) {
  Batch batch;
  batch.operation = Operation::kAlltoall;
  BatchTensor tensor;
  tensor.row_bytes = 8;
  tensor.rows = {3, 4, 5, 2, 4, 7};  // to each, and from each
  batch.tensors.push_back(tensor);
  const Topology topology = Members(3, 1);
  RT_CHECK_EQ(InputBytes(batch, tensor, topology), size_t{(3 + 4 + 5) * 8});
  RT_CHECK_EQ(OutputBytes(batch, tensor, topology), size_t{(2 + 4 + 7) * 8});
  const std::vector<StagedPiece> pieces = CutIntoPieces(batch, topology, 16, 4);
  RT_CHECK_EQ(pieces.size(), size_t{1});
  RT_CHECK(pieces[0].runs[0].output_at >= InputBytes(batch, tensor, topology));
  RT_CHECK(pieces[0].bytes >= pieces[0].runs[0].output_at + OutputBytes(batch, tensor, topology));
  batch.operation = Operation::kAllgather;
  batch.tensors[0].rows = {1, 2, 3};
  RT_CHECK_EQ(InputBytes(batch, batch.tensors[0], topology), size_t{16});
  RT_CHECK_EQ(OutputBytes(batch, batch.tensors[0], topology), size_t{48});
  batch.operation = Operation::kReducescatter;
  batch.tensors[0].bytes = 48;
  RT_CHECK_EQ(InputBytes(batch, batch.tensors[0], topology), size_t{48});
  RT_CHECK_EQ(OutputBytes(batch, batch.tensors[0], topology), size_t{16});
}

}  // namespace
}  // namespace ringtrain
