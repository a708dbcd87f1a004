// The rounds of an Adasum, carried out on sums of powers of two: for any number of members everybody ends with
// everybody's, and no element is added twice. Peers expect each other's slices.
#include "collectives/adasum_plan.h"

#include <algorithm>
#include <string>

#include "check.h"

namespace ringtrain {
namespace {

using Kind = AdasumRound::Kind;

// What a member has: for each slice the members whose vectors are in it, as they stand in the tree.
struct Held {
  std::vector<std::string> mine, theirs;
};

void Exchange(const AdasumPlan& plan, const AdasumRound& round, std::vector<Held>* members) {
  const std::vector<Held> before = *members;
  for (int member = 0; member < static_cast<int>(members->size()); ++member) {
    const AdasumPart part = plan.PartOf(round, member);
    if (part.peer < 0) continue;
    const AdasumPart other = plan.PartOf(round, part.peer);
    RT_CHECK_EQ(other.peer, member);
    RT_CHECK_EQ(other.sends.first, part.receives.first);
    RT_CHECK_EQ(other.sends.end, part.receives.end);
    RT_CHECK(part.sends.end - part.sends.first <= plan.Width(round));
    Held& held = (*members)[static_cast<size_t>(member)];
    std::vector<std::string>& into = round.kind == Kind::kHalves ? held.theirs : held.mine;
    for (int slice = part.receives.first; slice < part.receives.end; ++slice) {
      const auto at = static_cast<size_t>(slice);
      into[at] = before[static_cast<size_t>(part.peer)].mine[at];
      RT_CHECK(!into[at].empty());
    }
  }
}

void Combine(const AdasumPlan& plan, int level, std::vector<Held>* members) {
  for (int member = 0; member < static_cast<int>(members->size()); ++member) {
    const Slices keeps = plan.Holds(level, member);
    if (keeps.empty()) continue;
    Held& held = (*members)[static_cast<size_t>(member)];
    std::vector<std::string> sums(held.mine.size());
    for (auto slice = static_cast<size_t>(keeps.first); slice < static_cast<size_t>(keeps.end); ++slice) {
      const std::string &mine = held.mine[slice], &theirs = held.theirs[slice];
      sums[slice] = plan.First(level, member) ? "(" + mine + theirs + ")" : "(" + theirs + mine + ")";
    }
    held = {sums, std::vector<std::string>(sums.size())};
  }
}

std::string ResultOf(int count) {
  const AdasumPlan plan(count);
  std::vector<Held> members;
  for (int member = 0; member < count; ++member) {
    const std::string name(1, static_cast<char>('a' + member));
    members.push_back({std::vector<std::string>(static_cast<size_t>(plan.places()), name),
                       std::vector<std::string>(static_cast<size_t>(plan.places()))});
  }
  for (const AdasumRound& round : plan.rounds()) {
    const bool dots = round.kind == Kind::kDots || round.kind == Kind::kFoldDots;
    if (!dots) Exchange(plan, round, &members);
    if (dots && (round.kind == Kind::kFoldDots || round.step == round.level)) Combine(plan, round.level, &members);
  }
  for (const Held& held : members)
    for (const std::string& slice : held.mine) RT_CHECK_EQ(slice, members[0].mine[0]);
  return members[0].mine[0];
}

RT_TEST(the_tree_is_one_of_members_in_their_order) {
  RT_CHECK_EQ(ResultOf(1), std::string("a"));
  RT_CHECK_EQ(ResultOf(2), std::string("(ab)"));
  RT_CHECK_EQ(ResultOf(3), std::string("((ab)c)"));
  RT_CHECK_EQ(ResultOf(4), std::string("((ab)(cd))"));
  RT_CHECK_EQ(ResultOf(5), std::string("(((ab)c)(de))"));
  RT_CHECK_EQ(ResultOf(6), std::string("(((ab)(cd))(ef))"));
  RT_CHECK_EQ(ResultOf(7), std::string("(((ab)(cd))((ef)g))"));
  RT_CHECK_EQ(ResultOf(8), std::string("(((ab)(cd))((ef)(gh)))"));
}

RT_TEST(every_member_ends_with_the_sum_of_all) {
  for (int count = 9; count <= 20; ++count) {
    const std::string result = ResultOf(count);
    for (int member = 0; member < count; ++member)
      RT_CHECK_EQ(std::count(result.begin(), result.end(), static_cast<char>('a' + member)), 1);
  }
}

RT_TEST(vectors_count_by_the_members_for_which_they_stand) {
  for (int count : {2, 4, 8, 16})
    for (int level = 0; level < AdasumPlan(count).levels(); ++level)
      RT_CHECK_EQ(AdasumPlan(count).ShareOfFirst(level, count - 1), 0.5);
  RT_CHECK_EQ(AdasumPlan(3).ShareOfFirst(-1, 0), 0.5);
  RT_CHECK_EQ(AdasumPlan(3).ShareOfFirst(0, 0), 2.0 / 3);
  RT_CHECK_EQ(AdasumPlan(3).ShareOfFirst(0, 2), 2.0 / 3);
  RT_CHECK_EQ(AdasumPlan(7).ShareOfFirst(0, 4), 2.0 / 3);
  RT_CHECK_EQ(AdasumPlan(7).ShareOfFirst(0, 6), 2.0 / 3);
  RT_CHECK_EQ(AdasumPlan(7).ShareOfFirst(1, 6), 4.0 / 7);
  RT_CHECK_EQ(AdasumPlan(5).ShareOfFirst(0, 4), 0.5);
  RT_CHECK_EQ(AdasumPlan(5).ShareOfFirst(1, 4), 3.0 / 5);
}

// Partial dot products are added over exactly those that hold parts of the same two vectors.
RT_TEST(dot_products_of_a_level_are_summed_over_all_that_share_its_vectors) {
  for (int count = 2; count <= 20; ++count) {
    const AdasumPlan plan(count);
    for (int level = plan.folds() ? -1 : 0; level < plan.levels(); ++level) {
      std::vector<int> slices(static_cast<size_t>(count));  // that each one's products are of
      for (int member = 0; member < count; ++member) {
        const Slices keeps = plan.Holds(level, member);
        slices[static_cast<size_t>(member)] = keeps.end - keeps.first;
      }
      for (const AdasumRound& round : plan.rounds()) {
        if (round.level != level || (round.kind != Kind::kDots && round.kind != Kind::kFoldDots)) continue;
        const std::vector<int> before = slices;
        for (int member = 0; member < count; ++member) {
          const int peer = plan.PartOf(round, member).peer;
          if (peer >= 0) slices[static_cast<size_t>(member)] += before[static_cast<size_t>(peer)];
        }
      }
      for (int member = 0; member < count; ++member)
        if (!plan.Holds(level, member).empty()) RT_CHECK_EQ(slices[static_cast<size_t>(member)], plan.places());
    }
  }
}

}  // namespace
}  // namespace ringtrain
