// Shape: the extents of a tensor. Most have four or fewer, which lie in the object itself: a group of a thousand small
// tensors is described, compared and passed on without an allocation for each.
#ifndef RINGTRAIN_AGREE_SHAPE_H_
#define RINGTRAIN_AGREE_SHAPE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <vector>

namespace ringtrain {

class Shape {
 public:
  Shape() = default;
  Shape(std::initializer_list<int64_t> extents) : Shape(extents.begin(), extents.end()) {}
  // NOLINTNEXTLINE(google-explicit-constructor): a list of extents is a shape.
  Shape(const std::vector<int64_t>& extents) : Shape(extents.begin(), extents.end()) {}
  template <typename Iterator>
  Shape(Iterator begin, Iterator end) : size_(static_cast<size_t>(end - begin)) {
    if (size_ > kHere)
      more_.assign(begin, end);
    else
      std::copy(begin, end, here_);
  }

  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  const int64_t* data() const { return size_ > kHere ? more_.data() : here_; }
  int64_t* data() { return size_ > kHere ? more_.data() : here_; }
  const int64_t* begin() const { return data(); }
  const int64_t* end() const { return data() + size_; }
  int64_t operator[](size_t dimension) const { return data()[dimension]; }
  int64_t& operator[](size_t dimension) { return data()[dimension]; }
  void push_back(int64_t extent) {
    std::vector<int64_t> longer(begin(), end());
    longer.push_back(extent);
    *this = Shape(longer);
  }
  bool operator==(const Shape& other) const { return std::equal(begin(), end(), other.begin(), other.end()); }

 private:
  static constexpr size_t kHere = 4;

  size_t size_ = 0;
  int64_t here_[kHere] = {};
  std::vector<int64_t> more_;  // all of them, where there are more than kHere
};

}  // namespace ringtrain
#endif  // RINGTRAIN_AGREE_SHAPE_H_
