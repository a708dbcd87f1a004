// Summing: what all members have sent of one run of elements, added in the order of the ranks, by one kernel.
//
// Compiled twice, as pack.h is: by nvcc as the body of the kernels (sum.cu), and by the C++ compiler for machines
// without a GPU. The operations are those of kernels/reduce.cc, one by one and each rounded: values are widened,
// multiplied by their factor, added from the first rank to the last, divided, multiplied, and rounded to the element's
// type once. So the bits are the host's.
#ifndef RINGTRAIN_DEVICE_SUM_H_
#define RINGTRAIN_DEVICE_SUM_H_

#include <cstdint>

#include "device/pack.h"

namespace ringtrain {

constexpr uint32_t kMaxSummed = 1024;  // members

// The parameter of every kernel. A block sums kPackChunk elements.
struct SumLaunch {
  uint64_t to;        // address of the sum
  uint64_t own;       // address of this member's elements; may be `to`
  uint64_t received;  // address of the others', one member's after the other's in the order of ranks
  uint64_t stride;    // elements from one of the others to the next
  uint64_t elements;
  uint32_t members;
  uint32_t me;  // place of this member's in the order
  float divisor, postscale;
  float factors[kMaxSummed];  // by member
};
static_assert(sizeof(SumLaunch) == 4152, "the PTX is generated for this layout");

// Each is rounded for itself: a fused multiply-add would not be what the host does.
#ifdef __CUDACC__
RT_ON_DEVICE float Times(float a, float b) { return __fmul_rn(a, b); }
RT_ON_DEVICE float Plus(float a, float b) { return __fadd_rn(a, b); }
RT_ON_DEVICE float Over(float a, float b) { return __fdiv_rn(a, b); }
RT_ON_DEVICE double Times(double a, double b) { return __dmul_rn(a, b); }
RT_ON_DEVICE double Plus(double a, double b) { return __dadd_rn(a, b); }
RT_ON_DEVICE double Over(double a, double b) { return __ddiv_rn(a, b); }
#else
template <typename T>
T Times(T a, T b) {
  return a * b;
}
template <typename T>
T Plus(T a, T b) {
  return a + b;
}
template <typename T>
T Over(T a, T b) {
  return a / b;
}
#endif

template <typename Value, typename Element>
RT_ON_DEVICE Value Widened(Element element) {
  return static_cast<Value>(ToFloat(element));
}
template <>
RT_ON_DEVICE double Widened<double, double>(double element) {
  return element;
}

RT_ON_DEVICE void Round(double value, double* to) { *to = value; }
template <typename Element>
RT_ON_DEVICE void Round(float value, Element* to) {
  FromFloat(value, to);
}

// The elements of a member.
template <typename Element>
RT_ON_DEVICE const Element* ElementsOf(const SumLaunch& launch, uint32_t member) {
  if (member == launch.me) return reinterpret_cast<const Element*>(launch.own);
  return reinterpret_cast<const Element*>(launch.received) + (member - (member > launch.me ? 1 : 0)) * launch.stride;
}

// The sums of kCount neighbours from `at` on.
template <typename Element, typename Value, uint32_t kCount>
RT_ON_DEVICE void SumGroup(const SumLaunch& launch, uint64_t at) {
  using Neighbours = PackGroup<Element, kCount>;
  const Neighbours first = *reinterpret_cast<const Neighbours*>(ElementsOf<Element>(launch, 0) + at);
  Value total[kCount];
  RT_UNROLL
  for (uint32_t i = 0; i < kCount; ++i)
    total[i] = Times(Widened<Value>(first.element[i]), static_cast<Value>(launch.factors[0]));
  for (uint32_t member = 1; member < launch.members; ++member) {
    const Neighbours next = *reinterpret_cast<const Neighbours*>(ElementsOf<Element>(launch, member) + at);
    const Value factor = static_cast<Value>(launch.factors[member]);
    RT_UNROLL
    for (uint32_t i = 0; i < kCount; ++i) total[i] = Plus(total[i], Times(Widened<Value>(next.element[i]), factor));
  }
  Neighbours rounded;
  RT_UNROLL
  for (uint32_t i = 0; i < kCount; ++i)
    Round(Times(Over(total[i], static_cast<Value>(launch.divisor)), static_cast<Value>(launch.postscale)),
          &rounded.element[i]);
  *reinterpret_cast<Neighbours*>(reinterpret_cast<Element*>(launch.to) + at) = rounded;
}

// The same for one element, wherever it lies.
template <typename Element, typename Value>
RT_ON_DEVICE void SumElement(const SumLaunch& launch, uint64_t at) {
  Value total = Times(Widened<Value>(ElementsOf<Element>(launch, 0)[at]), static_cast<Value>(launch.factors[0]));
  for (uint32_t member = 1; member < launch.members; ++member)
    total = Plus(total, Times(Widened<Value>(ElementsOf<Element>(launch, member)[at]),
                              static_cast<Value>(launch.factors[member])));
  Round(Times(Over(total, static_cast<Value>(launch.divisor)), static_cast<Value>(launch.postscale)),
        reinterpret_cast<Element*>(launch.to) + at);
}

// The kernels: what thread `thread` of `threads` does of a chunk.
template <typename Element, typename Value>
RT_ON_DEVICE void SumShare(const SumLaunch& launch, uint32_t chunk, uint32_t thread, uint32_t threads) {
  constexpr uint32_t kCount = 16 / sizeof(Element);
  const uint64_t begin = uint64_t{chunk} * kPackChunk;
  const uint64_t left = launch.elements - begin;
  const uint32_t elements = left < kPackChunk ? static_cast<uint32_t>(left) : kPackChunk;
  const bool aligned = (launch.to | launch.own | launch.received | launch.stride * sizeof(Element)) % 16 == 0;
  const uint32_t groups = aligned ? elements / kCount : 0;
  for (uint32_t at = thread; at < groups; at += threads) SumGroup<Element, Value, kCount>(launch, begin + at * kCount);
  for (uint32_t at = groups * kCount + thread; at < elements; at += threads)
    SumElement<Element, Value>(launch, begin + at);
}

}  // namespace ringtrain
#endif  // RINGTRAIN_DEVICE_SUM_H_
