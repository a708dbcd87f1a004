// What may block is done by another thread, in order, and whoever asks for it goes on.
#include "base/writer.h"

#include <future>
#include <vector>

#include "check.h"

using namespace ringtrain;

namespace {

constexpr double kPatienceSeconds = 60;

const auto kNobody = [](const std::string&) {};

// Work that waits until it is let go.
class Gate {
 public:
  Writer::Work work() {
    return [open = open_.get_future().share(), begun = begun_] {
      begun->set_value();
      open.wait();
      return std::string();
    };
  }
  void AwaitBegun() { begun_->get_future().wait(); }
  void Open() { open_.set_value(); }

 private:
  std::promise<void> open_;
  const std::shared_ptr<std::promise<void>> begun_ = std::make_shared<std::promise<void>>();
};

}  // namespace

RT_TEST(what_is_asked_for_is_done_in_order) {
  Writer writer;
  RT_CHECK_EQ(writer.Await(0), std::string());
  std::vector<int> done;
  for (int number = 0; number < 100; ++number)
    writer.Do(std::to_string(number), [&done, number] { return done.push_back(number), std::string(); }, kNobody);
  RT_CHECK_EQ(writer.Await(kPatienceSeconds), std::string());
  RT_REQUIRE_EQ(done.size(), size_t{100});
  for (int number = 0; number < 100; ++number) RT_CHECK_EQ(done[static_cast<size_t>(number)], number);
}

RT_TEST(what_waits_under_the_same_name_is_replaced) {
  Writer writer;
  Gate gate;
  writer.Do("slow", gate.work(), kNobody);
  gate.AwaitBegun();
  std::string done;
  for (const char* text : {"a1", "b1", "a2", "a3"})
    writer.Do(std::string(text, 1), [&done, text] { return done += text, std::string(); }, kNobody);
  RT_CHECK_EQ(writer.Await(0), std::string("slow"));
  gate.Open();
  RT_CHECK_EQ(writer.Await(kPatienceSeconds), std::string());
  RT_CHECK_EQ(done, std::string("a3b1"));
}

RT_TEST(a_failure_is_told) {
  Writer writer;
  std::vector<std::string> told;
  const auto tell = [&](const std::string& why) { told.push_back(why); };
  writer.Do("well", [] { return std::string(); }, tell);
  writer.Do("ill", [] { return std::string("no room"); }, tell);
  writer.Do("throws", []() -> std::string { throw std::bad_alloc(); }, tell);
  RT_CHECK_EQ(writer.Await(kPatienceSeconds), std::string());
  RT_REQUIRE_EQ(told.size(), size_t{2});
  RT_CHECK_EQ(told[0], std::string("no room"));
}

// It tells nobody any more, who may have gone.
RT_TEST(what_hangs_is_left_behind) {
  Gate gate;
  std::promise<void> over;
  bool told = false;
  {
    Writer writer;
    const auto work = gate.work();
    writer.Do(
        "hangs",
        [work, &over] {
          work();
          over.set_value();
          return std::string("too late");
        },
        [&](const std::string&) { told = true; });
    gate.AwaitBegun();
  }
  gate.Open();
  over.get_future().wait();
  RT_CHECK(!told);
}
