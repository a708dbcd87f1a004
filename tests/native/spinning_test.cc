// Whether a waiting driver looks again before it sleeps.
#include "run/spinning.h"

#include "check.h"

namespace ringtrain {
namespace {

// How many of 160 waits begin with a look, where so many of ten looks are good for something.
int Looks(Spinning* spinning, int good) {
  int looks = 0;
  for (int wait = 0; wait < 160; ++wait) {
    if (spinning->Begin() == 0) continue;
    spinning->Ended(looks++ % 10 < good);
  }
  return looks;
}

RT_TEST(looks_go_on_while_they_are_good_for_something) {
  Spinning spinning(20000, false);
  RT_CHECK_EQ(spinning.Begin(), Nanoseconds{20000});
  RT_CHECK_EQ(Looks(&spinning, 10), 160);
  RT_CHECK_EQ(Looks(&spinning, 9), 160);
}

RT_TEST(looks_in_vain_stop_but_for_a_few_and_come_back) {
  Spinning spinning(20000, false);
  RT_CHECK(Looks(&spinning, 0) <= 160 / 16 + 3);
  RT_CHECK_EQ(Looks(&spinning, 0), 160 / 16);
  RT_CHECK(Looks(&spinning, 5) < 60);
  RT_CHECK(Looks(&spinning, 10) > 130);
}

RT_TEST(a_length_that_the_user_has_chosen_stays) {
  Spinning always(50000, true), never(0, true);
  RT_CHECK_EQ(Looks(&always, 0), 160);
  RT_CHECK_EQ(Looks(&never, 0), 0);
}

}  // namespace
}  // namespace ringtrain
