#include "transport/mail.h"

#include <algorithm>
#include <cstring>

namespace ringtrain {
namespace {

bool PutCell(Mailbox& box, int from, const char* data, size_t bytes, bool last) {
  uint64_t position = box.tail.load(std::memory_order_relaxed);
  MailCell* cell;
  for (;;) {
    cell = &box.cells[position % Mailbox::kCells];
    uint32_t free = static_cast<uint32_t>(position / Mailbox::kCells * 2);
    uint32_t sequence = cell->sequence.load(std::memory_order_acquire);
    if (sequence == free) {
      if (box.tail.compare_exchange_weak(position, position + 1, std::memory_order_relaxed)) break;
    } else if (static_cast<int32_t>(sequence - free) < 0) {
      return false;  // still full from the round before
    } else {
      position = box.tail.load(std::memory_order_relaxed);
    }
  }
  cell->from = static_cast<uint16_t>(from);
  cell->bytes = static_cast<uint8_t>(bytes);
  cell->last = last;
  std::memcpy(cell->data, data, bytes);
  cell->sequence.store(static_cast<uint32_t>(position / Mailbox::kCells * 2 + 1), std::memory_order_release);
  return true;
}

}  // namespace

Mail::Mail(Wire& wire, HostMemory* memory, std::vector<int> local_ranks)
    : wire_(wire),
      memory_(memory),
      local_ranks_(std::move(local_ranks)),
      local_rank_of_(wire.size(), -1),
      outgoing_(local_ranks_.size()),
      partial_(local_ranks_.size()) {
  for (size_t local = 0; local < local_ranks_.size(); ++local)
    local_rank_of_[local_ranks_[local]] = static_cast<int>(local);
}

Status Mail::Send(int to, std::string frame) {
  if (to == wire_.rank()) {
    to_self_.push_back(std::move(frame));
    return {};
  }
  int local = local_rank_of_[to];
  if (local < 0) return wire_.SendFrame(to, frame);
  outgoing_[local].frames.push_back(std::move(frame));
  Flush(local);
  return {};
}

void Mail::Flush(int local_rank) {
  Outgoing& outgoing = outgoing_[local_rank];
  if (outgoing.frames.empty()) return;
  Mailbox& box = memory_->control().place(local_rank).mailbox;
  bool put = false;
  while (!outgoing.frames.empty()) {
    const std::string& frame = outgoing.frames.front();
    size_t bytes = std::min<size_t>(MailCell::kCapacity, frame.size() - outgoing.sent);
    bool last = outgoing.sent + bytes == frame.size();
    if (!PutCell(box, memory_->local_rank(), frame.data() + outgoing.sent, bytes, last)) break;
    put = true;
    outgoing.sent += bytes;
    if (last) {
      outgoing.frames.pop_front();
      outgoing.sent = 0;
    }
  }
  if (put) memory_->doorbell(local_rank).Ring();
}

Status Mail::Receive(int* from, std::string* frame, bool* arrived) {
  for (size_t local = 0; local < outgoing_.size(); ++local) Flush(static_cast<int>(local));
  *arrived = true;
  if (!to_self_.empty()) {
    *from = wire_.rank();
    *frame = std::move(to_self_.front());
    to_self_.pop_front();
    return {};
  }
  if (ReceiveLocal(from, frame)) return {};
  *arrived = false;
  if (static_cast<int>(local_ranks_.size()) == wire_.size()) return {};  // nobody lives elsewhere
  return wire_.ReceiveFrame(from, frame, arrived);
}

bool Mail::ReceiveLocal(int* from, std::string* frame) {
  Mailbox& box = memory_->control().place(memory_->local_rank()).mailbox;
  for (;;) {
    MailCell& cell = box.cells[box.head % Mailbox::kCells];
    uint32_t round = static_cast<uint32_t>(box.head / Mailbox::kCells * 2);
    if (cell.sequence.load(std::memory_order_acquire) != round + 1) return false;
    std::string& partial = partial_[cell.from];
    partial.append(cell.data, cell.bytes);
    int sender = cell.from;
    bool last = cell.last != 0;
    cell.sequence.store(round + 2, std::memory_order_release);
    ++box.head;
    if (!last) continue;
    *from = local_ranks_[sender];
    *frame = std::move(partial);
    partial.clear();
    return true;
  }
}

bool Mail::Busy() const {
  return std::any_of(outgoing_.begin(), outgoing_.end(),
                     [](const Outgoing& outgoing) { return !outgoing.frames.empty(); });
}

void Mail::Forget(int rank) {
  if (local_rank_of_[rank] >= 0) outgoing_[local_rank_of_[rank]] = {};
}

}  // namespace ringtrain
