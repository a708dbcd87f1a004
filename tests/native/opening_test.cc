// What is compared before a world begins.
#include "world/opening.h"

#include "base/bytes.h"
#include "check.h"

namespace ringtrain {
namespace {

// Two ranks, of which the other has the same facts but for one text, counted from the version.
class AlmostAlike : public Rendezvous {
 public:
  explicit AlmostAlike(int other) : other_(other) {}
  int rank() const override { return 0; }
  int size() const override { return 2; }
  Status Allgather(const std::string& mine, Nanoseconds, std::vector<std::string>* all) override {
    Decoder decoder(mine);
    Encoder theirs;
    theirs.Unsigned(decoder.Unsigned());
    theirs.Text(decoder.Text());  // the host
    theirs.Text(decoder.Text());  // its site
    for (int fact = 0; !decoder.AtEnd(); ++fact) theirs.Text(decoder.Text() + (fact == other_ ? " or other" : ""));
    *all = {mine, theirs.Take()};
    return {};
  }
  Status Meet(const WindowSize&, Nanoseconds, Meeting*) override { return Status::Closed("they meet"); }

 private:
  const int other_;
};

std::string TextFor(int other) {
  Options options;
  RT_REQUIRE_OK(Options::Parse("", &options));
  AlmostAlike rendezvous(other);
  Meeting meeting;
  return OpenWorld(rendezvous, options, &meeting).message();
}

bool Has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

RT_TEST(builds_are_compared_before_options) {
  RT_CHECK_EQ(TextFor(-1), std::string("they meet"));
  const std::string version = TextFor(0), tables = TextFor(1), option = TextFor(2);
  RT_CHECK(Has(version, "init: ringtrain version must be the same on all ranks, but is '"));
  RT_CHECK(Has(version, " or other' on rank 1. Install the same ringtrain everywhere."));
  RT_CHECK(Has(tables, "init: digest of ringtrain's tables must be the same on all ranks, but is '"));
  RT_CHECK(Has(tables, " or other' on rank 1. Install the same ringtrain everywhere."));
  RT_CHECK(Has(option, " or other' on rank 1. Set it alike everywhere."));
}

}  // namespace ringtrain
