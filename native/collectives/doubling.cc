#include "collectives/doubling.h"

#include <algorithm>
#include <cstring>

namespace ringtrain {
namespace {

// Where nothing is copied there may be no memory.
void Copy(char* to, const char* from, size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

}  // namespace

int Doubling::steps() const {
  int steps = 0;
  while ((1 << steps) < hosts_) ++steps;
  return steps;
}

// ---- scatter ----

void Doubling::BeginScatter(const Image& image) {
  image_ = &image;
  stride_ = 0;
  for (int host = 0; host < hosts_; ++host) stride_ = std::max(stride_, image.bytes(host));
  blocks_.resize(std::max(blocks_.size(), stride_ * static_cast<size_t>(hosts_)));
  for (int distance = 0; distance < hosts_; ++distance)
    Copy(Came(distance), image.at(Behind(distance)), image.bytes(Behind(distance)));
}

template <typename What>
void Doubling::ForEachOnTheWay(int step, What what) const {
  for (int block = 1 << step; block < hosts_; ++block)
    if ((block >> step & 1) != 0) what(block);
}

Status Doubling::StartScatter(int step) {
  const int bit = 1 << step, from = Before(bit);
  size_t leaving = 0, coming = 0;
  ForEachOnTheWay(step, [&](int block) {
    leaving += Bytes(me_, block, step);
    coming += Bytes(from, block, step);
  });
  leaving_.resize(std::max(leaving_.size(), leaving));
  coming_.resize(std::max(coming_.size(), coming));
  char* to = leaving_.data();
  ForEachOnTheWay(step, [&](int block) {
    Copy(to, Came(block), Bytes(me_, block, step));
    to += Bytes(me_, block, step);
  });
  RT_TRY(messages_->Receive(from, coming_.data(), coming));
  return messages_->Send(Behind(bit), leaving_.data(), leaving);
}

void Doubling::FinishScatter(int step) {
  const int from = Before(1 << step);
  const char* came = coming_.data();
  ForEachOnTheWay(step, [&](int block) {
    Copy(Came(block), came, Bytes(from, block, step));
    came += Bytes(from, block, step);
  });
}

size_t Doubling::Bytes(int from, int block, int steps_done) const {
  const int rest = block >> steps_done << steps_done;
  return image_->bytes((from + rest) % hosts_);
}

// ---- gather ----

int Doubling::Carried(int step) const { return std::min(1 << step, hosts_ - (1 << step)); }

Status Doubling::StartGather(int step, const Image& image) {
  const int bit = 1 << step, carried = Carried(step);
  // What a host has are the parts up to its own, which follow each other in the image but for one place.
  const auto runs = [&](int last, const auto& message) -> Status {
    const int first = last - carried + 1;
    if (first < 0) RT_TRY(message(hosts_ + first, hosts_ - 1));
    return message(std::max(first, 0), last);
  };
  const auto bytes = [&](int first, int last) {
    return static_cast<size_t>(image.at(last) - image.at(first)) + image.bytes(last);
  };
  RT_TRY(runs(Before(bit), [&](int first, int last) {
    return messages_->Receive(Before(bit), image.at(first), bytes(first, last));
  }));
  return runs(me_,
              [&](int first, int last) { return messages_->Send(Behind(bit), image.at(first), bytes(first, last)); });
}

Status Doubling::StartGatherOfEqual(int step, const char* own, char* others, size_t bytes) {
  const int bit = 1 << step;
  const size_t further = bytes * static_cast<size_t>(Carried(step) - 1);
  char* const into = others + bytes * static_cast<size_t>(bit - 1);
  RT_TRY(messages_->Receive(Before(bit), into, bytes));
  RT_TRY(messages_->Receive(Before(bit), into + bytes, further));
  RT_TRY(messages_->Send(Behind(bit), own, bytes));
  return messages_->Send(Behind(bit), others, further);
}

}  // namespace ringtrain
