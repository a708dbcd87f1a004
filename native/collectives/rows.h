// Rows: which rows of a tensor's first dimension each member contributes and receives, for every layout of
// tables/operations.def. Pure; all other files ask here.
//
//     layout     a member contributes     a member receives            rows, of a tensor
//     kWhole     all of it; rooted: the   all of it                    none: the tensor has one shape
//                root alone
//     kGather    rows of its own          all rows, in member order    [member]: what it contributes
//     kScatter   all rows                 its share of them            [member]: what it receives
//     kExchange  rows for each member     what each has for it, in     this member's alone: [member] what it
//                                         member order                 contributes, [members + member] receives
//
// The rows of kScatter follow from the shape; those of kGather and kExchange each member says for itself (`Ragged`),
// and the coordinator puts them together (agree/match.cc).
#ifndef RINGTRAIN_COLLECTIVES_ROWS_H_
#define RINGTRAIN_COLLECTIVES_ROWS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "collectives/batch.h"
#include "collectives/topology.h"

namespace ringtrain {

// Whether members say how many rows they contribute, so that the first dimension may differ between them.
bool Ragged(Layout layout);
// Whether every member receives the same; else each something of its own.
bool ReceivesAll(Layout layout);

// The rows of tensor `index` of a group, but for kExchange. said: for kGather, by member and tensor, [member * tensors
// + index]. extent: the tensor's first dimension, on any member.
std::vector<int64_t> RowsOfTensor(Layout layout, const std::vector<int64_t>& said, size_t index, size_t tensors,
                                  int64_t extent, int members);

// Of a tensor whose layout has rows. kExchange: `member` is this one.
int64_t ContributedRows(Layout layout, const std::vector<int64_t>& rows, int members, int member);
int64_t ReceivedRows(Layout layout, const std::vector<int64_t>& rows, int members, int member);
// kExchange: what this member sends to that one, and receives from it.
inline int64_t RowsTo(const std::vector<int64_t>& rows, int to) { return rows[to]; }
inline int64_t RowsFrom(const std::vector<int64_t>& rows, int members, int from) { return rows[members + from]; }

// Bytes of this member's input and output of a tensor of the batch.
size_t InputBytes(const Batch& batch, const BatchTensor& tensor, const Topology& topology);
size_t OutputBytes(const Batch& batch, const BatchTensor& tensor, const Topology& topology);

// The bytes of a tensor that only one member contributes, or only one receives, and where they lie in those members'
// memory.
struct Share {
  size_t input_offset = 0, output_offset = 0, bytes = 0;
};
// By member, for kGather what it contributes, for kScatter what it receives, of a rooted operation what the root
// contributes.
std::vector<Share> SharesOf(const Batch& batch, const BatchTensor& tensor, int members);

}  // namespace ringtrain
#endif  // RINGTRAIN_COLLECTIVES_ROWS_H_
