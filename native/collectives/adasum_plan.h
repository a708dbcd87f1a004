// The rounds of an Adasum over the members of a process set. Pure, and the same on every member.
//
// Vector halving, distance doubling (Thakur, Rabenseifner and Gropp, 2005; for Adasum Maleki et al., arXiv:2006.02924).
// Each tensor is cut into as many slices as there are places. Four members, slices a b c d; what each holds of its
// vector:
//
//     start             level 0: 0+1, 2+3     level 1: (0+1)+(2+3)     gather, levels 1 and 0
//     0: a b c d        0: a b                0: a                     0: a b     0: a b c d
//     1: a b c d        1:     c d            1:     c                 1:     c d ...
//     2: a b c d        2: a b                2:   b                   2: a b
//     3: a b c d        3:     c d            3:       d               3:     c d
//
// At level k places that differ in bit k exchange halves of what they hold, and each has its half of both vectors. The
// dot products are then summed over the 2^(k+1) places that share the two vectors, k + 1 rounds, and each combines its
// half.
//
// Where the members are no power of two, the first ones fold before level 0: member 2i adds member 2i + 1 in the same
// way, and its place stands for both. The tree is one of members in rank order; which of them share a host does not
// change it.
#ifndef RINGTRAIN_COLLECTIVES_ADASUM_PLAN_H_
#define RINGTRAIN_COLLECTIVES_ADASUM_PLAN_H_

#include <cstddef>
#include <vector>

namespace ringtrain {

// Slices [first, end) of every tensor.
struct Slices {
  int first = 0, end = 0;
  bool empty() const { return first == end; }
};

struct AdasumRound {
  enum class Kind {
    kHalves,    // of two vectors are exchanged
    kDots,      // partial dot products are exchanged and added
    kFoldDots,  // the same between the two members of a fold
    kFold,      // the second member of a fold hands its half of the sum to the first
    kGather,    // halves of the result are exchanged
    kUnfold,    // the first member of a fold hands the result to the second
  };
  Kind kind;
  int level;  // -1: of the fold
  int step;   // of the dot products
};

// What a member does in a round; a peer of -1: nothing.
struct AdasumPart {
  int peer = -1;
  Slices sends, receives;  // of vectors; the dot products travel whole
};

class AdasumPlan {
 public:
  explicit AdasumPlan(int members);

  int places() const { return places_; }
  int levels() const { return levels_; }
  bool folds() const { return folded_ > 0; }
  const std::vector<AdasumRound>& rounds() const { return rounds_; }
  AdasumPart PartOf(const AdasumRound& round, int member) const;
  // Slices that a member sends in a round, at most.
  int Width(const AdasumRound& round) const;
  // Whether the member's vector is the first of the two that meet at a level.
  bool First(int level, int member) const;
  // Of the members that the two vectors stand for, which meet at a level, the part that the first one does.
  double ShareOfFirst(int level, int member) const;
  // What the member holds of the sum that a level makes; empty if it has no part in it.
  Slices Holds(int level, int member) const;

 private:
  bool Folds(int member) const { return member < 2 * folded_; }
  int MembersOf(int first_place, int end_place) const;
  int PlaceOf(int member) const;  // -1: stood for by another
  int MemberAt(int place) const { return place < folded_ ? 2 * place : place + folded_; }
  Slices After(int levels, int place) const;

  int places_ = 1, levels_ = 0;
  int folded_;  // pairs
  std::vector<AdasumRound> rounds_;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_COLLECTIVES_ADASUM_PLAN_H_
