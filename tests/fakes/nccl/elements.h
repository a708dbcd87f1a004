// Elements of NCCL's types and how NCCL reduces them, on the processor.
#ifndef RINGTRAIN_TESTS_FAKES_NCCL_ELEMENTS_H_
#define RINGTRAIN_TESTS_FAKES_NCCL_ELEMENTS_H_

#include <cstddef>
#include <vector>

namespace fakes {

// ncclRedOp_t
enum Reduction { kSum, kProd, kMax, kMin, kAvg, kFirstUserOp };

// Bytes of an ncclDataType_t; 0 if the fake has no such type (the 8-bit floats).
size_t SizeOf(int dtype);
bool IsFloat(int dtype);
// The number behind a user's scalar of this type.
double ReadScalar(int dtype, const void* scalar);
// values[i] *= factor, in the type.
void Scale(int dtype, double factor, void* values, size_t count);
// into[i] = into[i] op values[i], rounded to the type, as one step of a ring does.
void Accumulate(int dtype, int op, const void* values, void* into, size_t count);
// into[i] /= divisor, of an integer type.
void Divide(int dtype, int divisor, void* into, size_t count);

}  // namespace fakes
#endif  // RINGTRAIN_TESTS_FAKES_NCCL_ELEMENTS_H_
