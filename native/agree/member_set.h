// MemberSet: some of the members of a process set. Knows its size; a bit for each member.
#ifndef RINGTRAIN_AGREE_MEMBER_SET_H_
#define RINGTRAIN_AGREE_MEMBER_SET_H_

#include <cstdint>
#include <vector>

namespace ringtrain {

class MemberSet {
 public:
  explicit MemberSet(int members = 0) : words_((static_cast<size_t>(members) + 63) / 64, 0) {}

  bool has(int member) const { return (words_[Word(member)] & Bit(member)) != 0; }
  int size() const { return size_; }
  void Add(int member) {
    size_ += has(member) ? 0 : 1;
    words_[Word(member)] |= Bit(member);
  }
  void Remove(int member) {
    size_ -= has(member) ? 1 : 0;
    words_[Word(member)] &= ~Bit(member);
  }
  void Clear() {
    words_.assign(words_.size(), 0);
    size_ = 0;
  }

  // Calls what(member) for each, ascending.
  template <typename What>
  void ForEach(What what) const {
    for (size_t word = 0; word < words_.size(); ++word)
      for (uint64_t bits = words_[word]; bits != 0; bits &= bits - 1)
        what(static_cast<int>(word * 64) + __builtin_ctzll(bits));
  }

 private:
  static size_t Word(int member) { return static_cast<size_t>(member) / 64; }
  static uint64_t Bit(int member) { return uint64_t{1} << (member % 64); }

  std::vector<uint64_t> words_;
  int size_ = 0;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_AGREE_MEMBER_SET_H_
