#include "transport/tcp/exchange.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace ringtrain {

// ---- sending ----

void Exchange::StartSend(Message* message) {
  message->sequence = next_send_[message->tag]++;
  if (message->bytes > kSmallBytes) ++bulky_;
  const Key key = KeyOf(message->tag, message->sequence);
  if (granted_.erase(key) > 0) return large_.push_back(message);
  if (message->bytes <= kSmallBytes && Cost(message->bytes) <= credit_) {
    credit_ -= Cost(message->bytes);
    return small_.push_back(message);
  }
  waiting_[key] = message;
  Tell(RecordType::kAsk, message->tag, message->sequence, message->bytes);
}

bool Exchange::NextPiece(Piece* piece) {
  std::deque<Message*>& queue = small_.empty() ? large_ : small_;
  if (queue.empty()) return false;
  Message* const message = queue.front();
  piece->message = message;
  piece->data = message->data + message->cut;
  RecordHeader& header = piece->header;
  header.type = RecordType::kPiece;
  header.epoch = epoch_;
  header.tag = message->tag;
  header.sequence = message->sequence;
  header.offset = message->cut;
  header.total = message->bytes;
  header.length = std::min(message->bytes - message->cut, piece_bytes_);
  message->cut += header.length;
  if (message->cut == message->bytes) queue.pop_front();
  return true;
}

void Exchange::PieceLeft(const Piece& piece) {
  Message* const message = piece.message;
  message->moved += piece.header.length;
  if (message->moved == message->bytes) End(message, Message::kComplete);
}

// ---- receiving ----

void Exchange::StartReceive(Message* message) {
  message->sequence = next_receive_[message->tag]++;
  if (message->bytes > kSmallBytes) ++bulky_;
  const auto incoming = incoming_.try_emplace(KeyOf(message->tag, message->sequence)).first;
  const bool announced = incoming->second.announced;
  incoming->second.message = message;
  if (announced && incoming->second.total != message->bytes) return RefuseSize(incoming);
  if (incoming->second.whole) return Unstage(incoming);
  const bool arriving = incoming->second.placed > 0;
  if (!arriving && (announced || message->bytes > kSmallBytes)) Ready(incoming);
}

void Exchange::Ready(IncomingMap::iterator incoming) {
  if (std::exchange(incoming->second.told, true)) return;
  const Message& message = *incoming->second.message;
  Tell(RecordType::kReady, message.tag, message.sequence, message.bytes);
}

// The message came before its receive.
void Exchange::Unstage(IncomingMap::iterator incoming) {
  Incoming& from = incoming->second;
  if (from.total > 0) std::memcpy(from.message->data, from.staged.data(), from.total);
  End(from.message, Message::kComplete);
  ReturnCredit(from.total);
  incoming_.erase(incoming);
}

void Exchange::RefuseSize(IncomingMap::iterator incoming) {
  Incoming& refused = incoming->second;
  refused.message->found = refused.total;
  End(std::exchange(refused.message, nullptr), Message::kWrongSize);
  refused.refused = true;
}

const char* Exchange::Place(const RecordHeader& header, char** memory) {
  if (header.type != RecordType::kPiece || header.epoch != epoch_ || !header.Fits() || header.length > kPieceBytes ||
      (header.length == 0 && header.total > 0))
    return "cannot be read";
  const Key key = KeyOf(header.tag, header.sequence);
  const auto next = next_receive_.find(header.tag);
  const bool posted = next != next_receive_.end() && header.sequence - next->second > UINT32_MAX / 2;
  if (posted && incoming_.count(key) == 0) return "belongs to a message that has ended";
  const auto found = incoming_.try_emplace(key).first;
  Incoming& incoming = found->second;
  if (incoming.announced && incoming.total != header.total) return "contradicts an earlier one";
  incoming.announced = true;
  incoming.total = header.total;
  if (uint64_t{incoming.placed} + header.length > header.total || incoming.whole) return "repeats what has come";
  incoming.placed += header.length;
  if (incoming.message != nullptr && incoming.message->bytes != header.total) RefuseSize(found);
  if (!incoming.told && !incoming.refused) {
    if (header.total > kSmallBytes || header.length != header.total)
      return "belongs to a message that nobody asked for";
    if (staged_ + Cost(header.total) > kCredit) return "goes beyond its credit";
    staged_ += Cost(header.total);
  }
  *memory = nullptr;
  if (incoming.refused) return nullptr;
  if (incoming.message == nullptr) incoming.staged.resize(header.length);
  *memory = incoming.message != nullptr ? incoming.message->data + header.offset : &incoming.staged[0];
  return nullptr;
}

void Exchange::PieceArrived(const RecordHeader& header) {
  const auto found = incoming_.find(KeyOf(header.tag, header.sequence));
  if (found == incoming_.end()) return;
  Incoming& incoming = found->second;
  if (incoming.refused) return;
  if (incoming.message == nullptr || !incoming.staged.empty()) {  // posted before, or while it came
    incoming.whole = true;
    if (incoming.message != nullptr) Unstage(found);
    return;
  }
  incoming.message->moved += header.length;
  if (incoming.message->moved < incoming.message->bytes) return;
  End(incoming.message, Message::kComplete);
  if (!incoming.told) ReturnCredit(incoming.total);
  incoming_.erase(found);
}

void Exchange::ReturnCredit(uint32_t bytes) {
  returned_ += Cost(bytes);
  if (returned_ < kCredit / 4) return;
  staged_ -= returned_;
  Tell(RecordType::kReturned, 0, 0, std::exchange(returned_, 0));
}

// ---- control ----

void Exchange::Tell(RecordType type, uint32_t tag, uint32_t sequence, uint32_t total) {
  RecordHeader header;
  header.type = type;
  header.epoch = epoch_;
  header.tag = tag;
  header.sequence = sequence;
  header.total = total;
  control_.push_back(header);
}

bool Exchange::NextControl(RecordHeader* header) {
  if (control_.empty()) return false;
  *header = control_.front();
  control_.pop_front();
  return true;
}

const char* Exchange::HearControl(const RecordHeader& header) {
  if (header.epoch != epoch_ || header.length != 0) return "cannot be read";
  const Key key = KeyOf(header.tag, header.sequence);
  if (header.type == RecordType::kReady) {
    const auto waiting = waiting_.find(key);
    if (waiting == waiting_.end()) {
      granted_.insert(key);
      return nullptr;
    }
    large_.push_back(waiting->second);
    waiting_.erase(waiting);
    return nullptr;
  }
  if (header.type == RecordType::kReturned) {
    if (header.total > kCredit - credit_) return "returns more than was lent";
    credit_ += header.total;
    return nullptr;
  }
  if (header.type != RecordType::kAsk) return "cannot be read";
  const auto next = next_receive_.find(header.tag);
  const bool posted = next != next_receive_.end() && header.sequence - next->second > UINT32_MAX / 2;
  if (posted && incoming_.count(key) == 0) return nullptr;  // kReady had crossed the question, and all has come
  const auto found = incoming_.try_emplace(key).first;
  Incoming& incoming = found->second;
  if (incoming.announced) return incoming.total == header.total ? nullptr : "contradicts an earlier one";
  incoming.announced = true;
  incoming.total = header.total;
  if (incoming.message == nullptr) return nullptr;
  if (incoming.message->bytes != header.total)
    RefuseSize(found);
  else
    Ready(found);
  return nullptr;
}

// ---- the end ----

void Exchange::End(Message* message, Message::State state) {
  if (message->bytes > kSmallBytes) --bulky_;
  news_ = true;
  message->state.store(state, std::memory_order_release);
}

bool Exchange::receives() const {
  return std::any_of(incoming_.begin(), incoming_.end(),
                     [](const auto& each) { return each.second.message != nullptr; });
}

void Exchange::Abandon() {
  control_.clear();
  small_.clear();
  large_.clear();
  waiting_.clear();
  granted_.clear();
  incoming_.clear();
  bulky_ = 0;
}

}  // namespace ringtrain
