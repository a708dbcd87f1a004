#include "collectives/adasum_plan.h"

#include <algorithm>

namespace ringtrain {

AdasumPlan::AdasumPlan(int members) {
  using Kind = AdasumRound::Kind;
  while (places_ * 2 <= members) {
    places_ *= 2;
    ++levels_;
  }
  folded_ = members - places_;
  if (folds()) {
    rounds_.push_back({Kind::kHalves, -1, 0});
    rounds_.push_back({Kind::kFoldDots, -1, 0});
    rounds_.push_back({Kind::kFold, -1, 0});
  }
  for (int level = 0; level < levels_; ++level) {
    rounds_.push_back({Kind::kHalves, level, 0});
    for (int step = 0; step <= level; ++step) rounds_.push_back({Kind::kDots, level, step});
  }
  for (int level = levels_ - 1; level >= 0; --level) rounds_.push_back({Kind::kGather, level, 0});
  if (folds()) rounds_.push_back({Kind::kUnfold, -1, 0});
}

int AdasumPlan::PlaceOf(int member) const {
  if (!Folds(member)) return member - folded_;
  return member % 2 == 0 ? member / 2 : -1;
}

// The halves that are left of all slices; bit k of the place chooses at level k.
Slices AdasumPlan::After(int levels, int place) const {
  Slices held{0, places_};
  for (int level = 0; level < levels; ++level) {
    const int middle = (held.first + held.end) / 2;
    if ((place >> level & 1) != 0)
      held.first = middle;
    else
      held.end = middle;
  }
  return held;
}

bool AdasumPlan::First(int level, int member) const {
  return level < 0 ? member % 2 == 0 : (PlaceOf(member) >> level & 1) == 0;
}

int AdasumPlan::MembersOf(int first_place, int end_place) const {
  const auto before = [&](int place) { return place + std::min(place, folded_); };
  return before(end_place) - before(first_place);
}

double AdasumPlan::ShareOfFirst(int level, int member) const {
  if (level < 0) return 0.5;
  const int half = 1 << level, begin = PlaceOf(member) / (2 * half) * (2 * half);
  return static_cast<double>(MembersOf(begin, begin + half)) / MembersOf(begin, begin + 2 * half);
}

Slices AdasumPlan::Holds(int level, int member) const {
  if (level < 0)
    return !Folds(member) ? Slices{} : First(level, member) ? Slices{0, places_ / 2} : Slices{places_ / 2, places_};
  return PlaceOf(member) < 0 ? Slices{} : After(level + 1, PlaceOf(member));
}

int AdasumPlan::Width(const AdasumRound& round) const {
  switch (round.kind) {
    case AdasumRound::Kind::kDots:
    case AdasumRound::Kind::kFoldDots:
      return 0;
    case AdasumRound::Kind::kUnfold:
      return places_;
    default:
      return round.level < 0 ? places_ / 2 : places_ >> (round.level + 1);
  }
}

AdasumPart AdasumPlan::PartOf(const AdasumRound& round, int member) const {
  using Kind = AdasumRound::Kind;
  AdasumPart part;
  if (round.level < 0) {
    if (!Folds(member)) return part;
    const int partner = member ^ 1;
    const bool first = member % 2 == 0;
    part.peer = partner;
    if (round.kind == Kind::kHalves) part.sends = Holds(-1, partner), part.receives = Holds(-1, member);
    if (round.kind == Kind::kFold) (first ? part.receives : part.sends) = {places_ / 2, places_};
    if (round.kind == Kind::kUnfold) (first ? part.sends : part.receives) = {0, places_};
    return part;
  }
  const int place = PlaceOf(member);
  if (place < 0) return part;
  part.peer = MemberAt(place ^ 1 << (round.kind == Kind::kDots ? round.step : round.level));
  if (round.kind == Kind::kHalves)
    part.sends = Holds(round.level, part.peer), part.receives = Holds(round.level, member);
  if (round.kind == Kind::kGather)
    part.sends = Holds(round.level, member), part.receives = Holds(round.level, part.peer);
  return part;
}

}  // namespace ringtrain
