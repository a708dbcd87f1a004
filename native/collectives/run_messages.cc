#include "collectives/run_messages.h"

#include <algorithm>

#include "collectives/move.h"

namespace ringtrain {
namespace {

constexpr size_t kMessageBytes = size_t{2} << 20;
constexpr size_t kMaxMessages = 4;  // under way at once, each way

std::vector<Run> TakeRuns(Runs* runs, size_t count) {
  std::vector<Run> taken;
  for (; count > 0; count -= taken.back().count) taken.push_back(runs->Take(count));
  return taken;
}

}  // namespace

// The next message of some elements, as many as fit; it has a copy of its own unless they lie in one place as they
// travel.
RunMessages::Message& RunMessages::Begin(DType travels, std::deque<Message>* messages, Runs* runs) {
  Message& message = messages->emplace_back();
  const size_t count = std::min(kMessageBytes / Bytes(travels), runs->left());
  message.runs = TakeRuns(runs, count);
  message.bytes = count * Bytes(travels);
  if (message.runs.size() > 1 || runs->dtype() != travels) message.copy.resize(message.bytes);
  return message;
}

Status RunMessages::Start(int peer, DType travels, Runs* sends, Runs* receives, bool* moved) {
  const int rank = group_->RankOf(peer), tag = group_->OrderedTag();
  while (receives->left() > 0 && receiving_.size() < kMaxMessages) {
    Message& message = Begin(travels, &receiving_, receives);
    RT_TRY(group_->wire->StartReceive(rank, tag, message.memory(), message.bytes, &message.ticket));
    *moved = true;
  }
  while (sends->left() > 0 && sending_.size() < kMaxMessages) {
    Message& message = Begin(travels, &sending_, sends);
    char* to = message.copy.data();
    if (!message.copy.empty())
      for (const Run& run : message.runs) {
        Move(to, travels, run.at, sends->dtype(), run.count);
        to += run.count * Bytes(travels);
      }
    RT_TRY(group_->wire->StartSend(rank, tag, message.memory(), message.bytes, &message.ticket));
    group_->counters->Add(Counter::kWireBytesSent, static_cast<int64_t>(message.bytes));
    *moved = true;
  }
  return {};
}

Status RunMessages::End(DType travels, DType into, size_t* arrived, bool* moved) {
  bool complete = true;
  while (!sending_.empty()) {
    RT_TRY(group_->wire->Test(sending_.front().ticket, &complete));
    if (!complete) break;
    sending_.pop_front();
    *moved = true;
  }
  while (!receiving_.empty()) {
    const Message& message = receiving_.front();
    RT_TRY(group_->wire->Test(message.ticket, &complete));
    if (!complete) break;
    const char* from = message.copy.data();
    for (const Run& run : message.runs) {
      if (!message.copy.empty()) Move(run.at, into, from, travels, run.count);
      from += message.copy.empty() ? 0 : run.count * Bytes(travels);
      *arrived += run.count;
    }
    receiving_.pop_front();
    *moved = true;
  }
  return {};
}

}  // namespace ringtrain
