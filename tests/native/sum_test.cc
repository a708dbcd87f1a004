// The bodies of the summing kernels, run on the processor: the bits of the host's own reduction, wherever the elements
// lie.
#include "device/sum.h"

#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "check.h"
#include "device/sum_kernels.h"
#include "kernels/reduce.h"

namespace ringtrain {
namespace {

constexpr size_t kMargin = 16;  // elements around the sum, of which none may change

template <typename Element>
Element ElementOf(double value) {
  if constexpr (std::is_same_v<Element, double>)
    return value;
  else {
    Element element;
    FromFloat(static_cast<float>(value), &element);
    return element;
  }
}

// Large and small ones in turn, so that another order rounds otherwise; infinities and the largest now and then.
double ValueAt(size_t member, size_t i) {
  const double value = static_cast<double>(static_cast<int>((i * 7919 + member * 104729) % 2003) - 1001) / 7;
  if (i % 501 == 500) return std::numeric_limits<double>::infinity();
  return i % 3 == member % 3 ? value * 64 : value;
}

struct Shape {
  uint32_t members, me;
  size_t elements, shift;  // shift: elements behind an aligned address
  uint32_t threads;
};

// Whether the kernel leaves what Reduce leaves, and nothing else.
template <typename Element, typename Value>
bool IsTheHosts(DType dtype, const Shape& shape) {
  Scaling scaling;
  std::vector<double> weights;
  for (uint32_t member = 0; member < shape.members; ++member) weights.push_back(1.0 / (member + 1.5));
  if (dtype != DType::kFloat64) {  // whose factors are doubles on the host; there it is summed without any
    scaling.prescale = 0.7;
    scaling.divisor = shape.members;
    scaling.postscale = 1.3;
    scaling.weights = weights.data();
  }
  std::vector<std::vector<Element>> inputs(shape.members);
  std::vector<Element> own(shape.elements + shape.shift), received(shape.members * shape.elements + shape.shift);
  std::vector<const void*> sources;
  SumLaunch launch{};
  for (uint32_t member = 0; member < shape.members; ++member) {
    for (size_t i = 0; i < shape.elements; ++i) inputs[member].push_back(ElementOf<Element>(ValueAt(member, i)));
    sources.push_back(inputs[member].data());
    Element* place = received.data() + shape.shift + (member - (member > shape.me ? 1 : 0)) * shape.elements;
    if (member == shape.me) place = own.data() + shape.shift;
    std::copy(inputs[member].begin(), inputs[member].end(), place);
    launch.factors[member] = static_cast<float>(scaling.factor(static_cast<int>(member)));
  }
  std::vector<Element> expected(shape.elements), sum(shape.elements + shape.shift + kMargin, ElementOf<Element>(77));
  Reduce(dtype, Reduction::kSum, expected.data(), sources.data(), static_cast<int>(shape.members), shape.elements,
         scaling);
  launch.to = reinterpret_cast<uint64_t>(sum.data() + shape.shift);
  launch.own = reinterpret_cast<uint64_t>(own.data() + shape.shift);
  launch.received = reinterpret_cast<uint64_t>(received.data() + shape.shift);
  launch.stride = launch.elements = shape.elements;
  launch.members = shape.members;
  launch.me = shape.me;
  launch.divisor = static_cast<float>(scaling.divisor);
  launch.postscale = static_cast<float>(scaling.postscale);
  for (uint32_t chunk = 0; chunk * kPackChunk < shape.elements; ++chunk)
    for (uint32_t thread = 0; thread < shape.threads; ++thread)
      SumShare<Element, Value>(launch, chunk, thread, shape.threads);
  const Element margin = ElementOf<Element>(77);
  for (size_t i = 0; i < kMargin; ++i)
    if (std::memcmp(&sum[shape.shift + shape.elements + i], &margin, sizeof margin) != 0) return false;
  return std::memcmp(sum.data() + shape.shift, expected.data(), shape.elements * sizeof(Element)) == 0;
}

RT_TEST(sums_have_the_bits_of_the_host) {
  for (const Shape& shape :
       {Shape{2, 0, 1, 0, 1}, Shape{3, 1, 1000, 0, 7}, Shape{3, 2, 1003, 1, 7}, Shape{5, 0, kPackChunk + 3, 0, 64},
        Shape{7, 3, 2 * kPackChunk, 0, 512}, Shape{4, 3, kPackChunk, 3, 32}}) {
    RT_CHECK((IsTheHosts<float, float>(DType::kFloat32, shape)));
    RT_CHECK((IsTheHosts<double, double>(DType::kFloat64, shape)));
    RT_CHECK((IsTheHosts<Float16Element, float>(DType::kFloat16, shape)));
    RT_CHECK((IsTheHosts<BFloat16Element, float>(DType::kBFloat16, shape)));
  }
}

RT_TEST(there_is_a_kernel_for_each_float) {
  RT_CHECK(SumKernels::Can(DType::kFloat32, 2) && SumKernels::Can(DType::kFloat64, 2));
  RT_CHECK(SumKernels::Can(DType::kFloat16, 2) && SumKernels::Can(DType::kBFloat16, static_cast<int>(kMaxSummed)));
  RT_CHECK(!SumKernels::Can(DType::kBFloat16, static_cast<int>(kMaxSummed) + 1) && !SumKernels::Can(DType::kInt32, 2));
}

}  // namespace
}  // namespace ringtrain
