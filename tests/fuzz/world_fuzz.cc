// What ranks tell each other while a world opens: rank 0's answers, as another rank reads them. An input is four
// answers, each with its length in two bytes before it: the hellos, the keys of the hosts, the names of the shared
// memory, and what failed.
#include "base/bytes.h"
#include "fuzz.h"
#include "transport/in_process.h"
#include "transport/rendezvous.h"

namespace ringtrain {
namespace {

constexpr int kAnswers = 4;

std::string Answer(const std::vector<std::string>& texts) {
  Encoder encoder;
  for (const std::string& text : texts) encoder.Text(text);
  const std::string bytes = encoder.Take();
  return std::string{static_cast<char>(bytes.size() / 256), static_cast<char>(bytes.size() % 256)} + bytes;
}

std::string Announcement(const std::string& name, uint64_t nonce) {
  Encoder encoder;
  encoder.Text(name);
  encoder.Unsigned(nonce);
  return encoder.Take();
}

// The next answer of the input; what is left of it if it is shorter than announced.
std::string TakeAnswer(std::string* input) {
  if (input->size() < 2) return std::exchange(*input, "");
  const size_t length = static_cast<uint8_t>((*input)[0]) * 256u + static_cast<uint8_t>((*input)[1]);
  const std::string answer = input->substr(2, length);
  input->erase(0, 2 + answer.size());
  return answer;
}

}  // namespace

std::vector<std::string> Seeds() {
  const std::string announced = Announcement("/ringtrain-0123456789abcdef", 7);
  return {Answer({"hello", "hello"}) + Answer({"key", "key"}) + Answer({announced, Announcement("", 0)}) +
              Answer({"", "cannot be opened"}),
          Answer({"hello", "hello"}) + Answer({"one key", "another"}) + Answer({Announcement("", 0), ""}) +
              Answer({"", ""})};
}

}  // namespace ringtrain

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace ringtrain;
  std::string input(reinterpret_cast<const char*>(data), size);
  auto hub = std::make_shared<Hub>(std::vector<int>{2});
  const std::unique_ptr<Transport> root = Hub::TransportOf(hub, 0);
  for (int answer = 0; answer < kAnswers; ++answer)
    Expect(root->SendFrame(1, TakeAnswer(&input)).ok(), "an answer that leaves");

  const std::unique_ptr<Rendezvous> rendezvous = MeetByFrames(Hub::TransportOf(hub, 1), {});
  const Nanoseconds deadline = DeadlineAfter(60);  // nothing is waited for
  std::vector<std::string> hellos;
  const Status heard = rendezvous->Allgather("hello", deadline, &hellos);
  Expect(!heard.ok() || hellos.size() == 2, "a text for each rank");
  if (!heard.ok()) return 0;
  Meeting meeting;
  World& world = meeting.world;
  world.rank = 1;
  world.size = 2;
  const Status status = rendezvous->Meet([](const World&) { return size_t{1} << 16; }, deadline, &meeting);
  if (!status.ok()) return 0;
  Expect(meeting.memory != nullptr && world.host_of.size() == 2 && world.local_rank_of.size() == 2,
         "a place for each rank");
  Expect(world.my_host()[static_cast<size_t>(world.local_rank())] == 1, "this rank on its host");
  return 0;
}
