// Copies for other processors: the same bytes by either kind of stores, and the kind that the machine does faster.
#include "kernels/handover.h"

#include <string>

#include "check.h"

namespace ringtrain {
namespace {

// How many of a period's copies stream if they take so many nanoseconds a byte; each third one is interrupted.
int Streamed(StoreChoice* choice, double plain, double streaming) {
  int streamed = 0;
  for (int i = 0; i < StoreChoice::kPeriod; ++i) {
    const double interrupted = i % 3 == 0 ? 50.0 : 0.0;
    const size_t bytes = 64 << 10;
    if (choice->timed())
      choice->Took(bytes, static_cast<Nanoseconds>(((choice->streams() ? streaming : plain) + interrupted) * bytes));
    streamed += int{choice->streams()};
    choice->Next();
  }
  return streamed;
}

RT_TEST(the_first_copies_are_plain_and_no_trials) {
  StoreChoice choice;
  for (int i = 0; i < StoreChoice::kFirst; ++i, choice.Next()) RT_CHECK(!choice.timed() && !choice.streams());
  RT_CHECK(choice.timed());
}

RT_TEST(stores_stream_where_plain_ones_are_slow_and_only_there) {
  StoreChoice choice;
  for (int i = 0; i < StoreChoice::kFirst; ++i) choice.Next();
  const int trials = StoreChoice::kTrials;
  RT_CHECK(Streamed(&choice, 0.11, 0.035) == trials);                         // cores that share a cache
  RT_CHECK(Streamed(&choice, 0.44, 0.035) == StoreChoice::kPeriod - trials);  // others
  RT_CHECK(Streamed(&choice, 0.64, 0.5) == trials);                           // the source is what is slow
  RT_CHECK(Streamed(&choice, 0.11, 0.035) == trials);                         // they have moved
}

// Of copies that take so long, how many are plain before they stream.
int PlainBeforeStreaming(StoreChoice* choice, double plain) {
  for (int i = 0;; ++i, choice->Next()) {
    if (choice->streams() || i == StoreChoice::kPeriod) return i;
    if (choice->timed()) choice->Took(1000, static_cast<Nanoseconds>(plain * 1000));
  }
}

RT_TEST(plain_stores_that_become_slow_are_given_up_at_once) {
  StoreChoice choice;
  for (int i = 0; i < StoreChoice::kFirst; ++i) choice.Next();
  Streamed(&choice, 0.03, 0.035);
  for (int i = 0; i < 2 * StoreChoice::kTrials; ++i, choice.Next())
    choice.Took(1000, static_cast<Nanoseconds>(choice.streams() ? 35 : 30));
  const int most = 2 * StoreChoice::kTrials * StoreChoice::kWatched;
  RT_CHECK(PlainBeforeStreaming(&choice, 0.4) <= most);  // they are far from each other now
  RT_CHECK(PlainBeforeStreaming(&choice, 0.4) == 0);     // and stay so
}

RT_TEST(fresh_pages_are_not_taken_for_slow_stores) {
  StoreChoice choice;
  RT_CHECK(PlainBeforeStreaming(&choice, 0.5) == StoreChoice::kFirst + StoreChoice::kTrials);  // the first trial
}

RT_TEST(streaming_copies_every_byte_and_no_other) {
  std::string from(70000, ' '), to;
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<char>(i * 131 + i / 251);
  for (size_t bytes : {0, 1, 63, 64, 65, 127, 128, 4096, 65536})
    for (size_t at : {0, 1, 15, 16, 63}) {
      to.assign(from.size(), '\x5a');
      StreamingCopy(&to[64 + at], from.data() + at * 7, bytes);
      std::string expected(from.size(), '\x5a');
      expected.replace(64 + at, bytes, from, at * 7, bytes);
      RT_CHECK(to == expected);
    }
}

RT_TEST(a_handover_copies_whatever_its_turn) {
  Handover handover;
  std::string from(Handover::kLeast + 1, ' '), to(from.size(), ' ');
  for (int i = 0; i < StoreChoice::kFirst + 3 * StoreChoice::kTrials; ++i) {
    for (size_t k = 0; k < from.size(); ++k) from[k] = static_cast<char>(k + static_cast<size_t>(i));
    handover.Copy(&to[0], from.data(), from.size());
    RT_CHECK(to == from);
    handover.Copy(&to[0], from.data() + 1, 100);
    RT_CHECK(to.compare(0, 100, from, 1, 100) == 0);
  }
}

}  // namespace
}  // namespace ringtrain
