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
  if (!MayLeaveOnCredit(message->bytes)) {
    waiting_[key] = message;
    return Tell(RecordType::kAsk, message->tag, message->sequence, message->bytes);
  }
  message->on_credit = true;
  credit_ -= static_cast<uint32_t>(Cost(message->bytes));
  (message->bytes <= kSmallBytes ? small_ : large_).push_back(message);
}

bool Exchange::MayLeaveOnCredit(uint32_t bytes) const {
  const uint64_t most = is_far_ ? kCredit : kNearCredit, lent = kCredit - credit_;
  return (is_far_ || bytes <= kSmallBytes) && lent + Cost(bytes) <= most;
}

bool Exchange::NextPiece(Piece* piece) {
  std::deque<Message*>& queue = small_.empty() ? large_ : small_;
  if (queue.empty()) return false;
  Message* const message = queue.front();
  piece->message = message;
  piece->data = message->data + message->cut;
  RecordHeader& header = piece->header;
  header.type = message->on_credit ? RecordType::kOnCredit : RecordType::kPiece;
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
  const auto found = incoming_.try_emplace(KeyOf(message->tag, message->sequence)).first;
  Incoming& incoming = found->second;
  incoming.message = message;
  if (incoming.announced && incoming.total != message->bytes) return RefuseSize(found);
  if (incoming.whole) return Finish(found);
  if (!incoming.came && (incoming.announced || message->bytes > kSmallBytes)) Ready(found);
}

void Exchange::Ready(IncomingMap::iterator incoming) {
  if (std::exchange(incoming->second.told, true)) return;
  const Message& message = *incoming->second.message;
  Tell(RecordType::kReady, message.tag, message.sequence, message.bytes);
}

// All of it is there, and its receive is posted.
void Exchange::Finish(IncomingMap::iterator found) {
  const Incoming& incoming = found->second;
  if (!incoming.staged.empty()) std::memcpy(incoming.message->data, incoming.staged.data(), incoming.total);
  End(incoming.message, Message::kComplete);
  ReturnCredit(incoming);
  incoming_.erase(found);
}

void Exchange::RefuseSize(IncomingMap::iterator incoming) {
  Incoming& refused = incoming->second;
  refused.message->found = refused.total;
  End(std::exchange(refused.message, nullptr), Message::kWrongSize);
  refused.refused = true;
}

// Whether the message that a header names was started here.
bool Exchange::IsPast(const std::unordered_map<uint32_t, uint32_t>& next, const RecordHeader& header) {
  const auto found = next.find(header.tag);
  return found != next.end() && header.sequence - found->second > UINT32_MAX / 2;
}

const char* Exchange::Place(const RecordHeader& header, char** memory) {
  const bool on_credit = header.type == RecordType::kOnCredit;
  if ((header.type != RecordType::kPiece && !on_credit) || header.epoch != epoch_ || !header.Fits() ||
      header.length > kPieceBytes || (header.length == 0 && header.total > 0))
    return "cannot be read";
  const Key key = KeyOf(header.tag, header.sequence);
  if (IsPast(next_receive_, header) && incoming_.count(key) == 0) return "belongs to a message that has ended";
  const auto found = incoming_.try_emplace(key).first;
  Incoming& incoming = found->second;
  const bool is_first = !std::exchange(incoming.came, true);
  if ((incoming.announced && incoming.total != header.total) || (!is_first && incoming.on_credit != on_credit))
    return "contradicts an earlier one";
  incoming.announced = true;
  incoming.total = header.total;
  if (uint64_t{incoming.placed} + header.length > header.total || incoming.whole) return "repeats what has come";
  incoming.placed += header.length;
  if (incoming.message != nullptr && incoming.message->bytes != header.total) RefuseSize(found);
  if (!on_credit && !incoming.told && !incoming.refused) return "belongs to a message that nobody asked for";
  if (on_credit && is_first) {
    if (staged_ + Cost(header.total) > kCredit) return "goes beyond its credit";
    staged_ += static_cast<uint32_t>(Cost(header.total));
    incoming.on_credit = true;
    if (incoming.message == nullptr && !incoming.refused) incoming.staged.resize(header.total);
  }
  *memory = nullptr;
  if (incoming.refused) return nullptr;
  *memory = (incoming.staged.empty() && incoming.message != nullptr ? incoming.message->data : incoming.staged.data()) +
            header.offset;
  return nullptr;
}

void Exchange::PieceArrived(const RecordHeader& header) {
  const auto found = incoming_.find(KeyOf(header.tag, header.sequence));
  if (found == incoming_.end()) return;
  Incoming& incoming = found->second;
  incoming.arrived += header.length;
  if (incoming.arrived < incoming.total) return;
  incoming.whole = true;
  if (incoming.message != nullptr) return Finish(found);
  if (!incoming.refused) return;  // until its receive is posted
  ReturnCredit(incoming);
  incoming_.erase(found);
}

void Exchange::ReturnCredit(const Incoming& incoming) {
  if (!incoming.on_credit) return;
  returned_ += static_cast<uint32_t>(Cost(incoming.total));
  if (returned_ < kNearCredit / 4) return;
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
    if (waiting != waiting_.end()) {
      large_.push_back(waiting->second);
      waiting_.erase(waiting);
    } else if (!IsPast(next_send_, header)) {  // else it has left on credit
      granted_.insert(key);
    }
    return nullptr;
  }
  if (header.type == RecordType::kReturned) {
    if (header.total > kCredit - credit_) return "returns more than was lent";
    credit_ += header.total;
    return nullptr;
  }
  if (header.type != RecordType::kAsk) return "cannot be read";
  if (IsPast(next_receive_, header) && incoming_.count(key) == 0)
    return nullptr;  // kReady had crossed the question, and all has come
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
