// Shapes are what a list of extents is, however many there are.
#include "agree/shape.h"

#include <vector>

#include "check.h"

namespace ringtrain {
namespace {

std::vector<int64_t> Extents(size_t count) {
  std::vector<int64_t> extents;
  for (size_t dimension = 0; dimension < count; ++dimension) extents.push_back(static_cast<int64_t>(dimension * 3 + 2));
  return extents;
}

RT_TEST(a_shape_is_its_extents) {
  for (size_t count = 0; count < 10; ++count) {
    const std::vector<int64_t> extents = Extents(count);
    const Shape shape(extents);
    RT_CHECK_EQ(shape.size(), count);
    RT_CHECK_EQ(shape.empty(), count == 0);
    RT_CHECK(std::vector<int64_t>(shape.begin(), shape.end()) == extents);
    for (size_t dimension = 0; dimension < count; ++dimension) RT_CHECK_EQ(shape[dimension], extents[dimension]);
    Shape grown;
    for (int64_t extent : extents) grown.push_back(extent);
    RT_CHECK(grown == shape);
  }
}

RT_TEST(copies_are_apart_and_differ_where_an_extent_does) {
  for (size_t count = 1; count < 10; ++count) {
    const Shape shape(Extents(count));
    for (size_t dimension = 0; dimension < count; ++dimension) {
      Shape other = shape;
      RT_CHECK(other == shape);
      other[dimension] += 1;
      RT_CHECK(!(other == shape));
      RT_CHECK_EQ(shape[dimension], Extents(count)[dimension]);
      Shape assigned(Extents(9 - count));
      assigned = other;
      RT_CHECK(assigned == other);
    }
    RT_CHECK(!(Shape(Extents(count - 1)) == shape));
  }
}

}  // namespace
}  // namespace ringtrain
