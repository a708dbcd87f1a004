// Throws random and mutated bytes at Frame::Decode, with bounded memory, and ends by itself.
//
//   frame_fuzz [SECONDS] [SEED]
//
// To be run with the sanitizers. Prints its seed, so that a crash can be repeated.
#include <cstdio>
#include <cstdlib>
#include <random>

#include "base/clock.h"
#include "core/frame.h"

namespace ringtrain {
namespace {

constexpr size_t kMostIds = size_t{1} << 20;  // what a decoder may make of a few bytes

std::string RandomBytes(std::mt19937_64* random) {
  std::string bytes((*random)() % 200, ' ');
  for (char& byte : bytes) byte = static_cast<char>((*random)() % 4 == 0 ? (*random)() : (*random)() % 8);
  return bytes;
}

std::string Mutated(std::string bytes, std::mt19937_64* random) {
  for (uint64_t changes = 1 + (*random)() % 5; changes > 0 && !bytes.empty(); --changes) {
    const size_t place = (*random)() % bytes.size();
    switch ((*random)() % 4) {
      case 0:
        bytes[place] = static_cast<char>((*random)());
        break;
      case 1:
        bytes.erase(place, 1 + (*random)() % 4);
        break;
      case 2:
        bytes.insert(place, RandomBytes(random).substr(0, 9));
        break;
      default:
        bytes += bytes.substr(place);
    }
  }
  return bytes.substr(0, 5000);
}

Frame Seed(FrameType type) {
  Frame frame;
  frame.type = type;
  Request request;
  request.name = "layer.weight";
  request.tensors = {{DType::kFloat32, {128, 10}}, {DType::kFloat16, {}}};
  request.splits = {1, 2, 3};
  frame.ids = {1, 2, 3, 7, 8, 1000};
  frame.requests = {request, request};
  frame.refusals = {{"x", StatusCode::kInvalidArgument, "no"}};
  frame.verdicts.resize(2);
  frame.verdicts[0].batch = {{7, true, {}}, {8, false, {request, {4, 5, 6}, 1, {9, 0}, {}}}};
  frame.verdicts[0].joined = {1, 3};
  frame.verdicts[1].failure = frame.refusals[0];
  frame.text = "rank 3 failed";
  return frame;
}

bool Survives(const std::string& bytes) {
  Frame frame, again;
  if (!Frame::Decode(bytes, &frame)) return true;
  if (frame.ids.size() > kMostIds || frame.requests.size() > bytes.size() || frame.verdicts.size() > bytes.size()) return false;
  return frame.ids.size() > 100000 || Frame::Decode(frame.Encode(), &again);
}

}  // namespace
}  // namespace ringtrain

int main(int argc, char** argv) {
  using namespace ringtrain;
  const double seconds = argc > 1 ? std::atof(argv[1]) : 2;
  const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : std::random_device()();
  std::printf("frame_fuzz: seed %llu\n", static_cast<unsigned long long>(seed));
  std::fflush(stdout);
  std::mt19937_64 random(seed);
  const Nanoseconds end = DeadlineAfter(seconds);
  long frames = 0;
  for (; Now() < end; ++frames) {
    const bool mutate = random() % 4 != 0;
    const std::string bytes = mutate ? Mutated(Seed(static_cast<FrameType>(1 + random() % 6)).Encode(), &random) : RandomBytes(&random);
    if (Survives(bytes)) continue;
    std::printf("frame %ld is decoded wrongly\n", frames);
    return 1;
  }
  std::printf("%ld frames\n", frames);
  return 0;
}
