#include "collectives/stream.h"

#include <algorithm>
#include <cstring>

namespace ringtrain {
namespace {

constexpr int kMaxRounds = 8;  // chunks in one call of Advance

class SharedStream : public StreamEnd {
 public:
  SharedStream(StreamMemory* memory, Doorbell* peer, bool sends, Counters* counters)
      : memory_(memory), peer_(peer), sends_(sends), counters_(counters) {}

  void Add(const Piece& piece) override { pieces_.push_back(piece); }
  bool busy() const override { return !pieces_.empty(); }

  Status Advance(bool* moved, std::vector<uint64_t>* done) override {
    for (int round = 0; round < kMaxRounds && busy() && MayMove(); ++round) {
      *moved = true;
      MoveChunk();
      peer_->Ring();
      if (moved_ < pieces_.front().bytes) continue;
      done->push_back(pieces_.front().number);
      pieces_.pop_front();
      moved_ = 0;
    }
    return {};
  }

 private:
  bool MayMove() const {
    if (sends_) return next_ < memory_->read.load(std::memory_order_acquire) + StreamMemory::kSlots;
    return next_ < memory_->written.load(std::memory_order_acquire);
  }

  void MoveChunk() {
    const Piece& piece = pieces_.front();
    char* const slot = memory_->slots[next_ % StreamMemory::kSlots];
    const size_t bytes = std::min(piece.bytes - moved_, StreamMemory::kSlotBytes);
    ++next_;
    if (sends_) {
      handover_.Copy(slot, piece.data + moved_, bytes);
      memory_->written.store(next_, std::memory_order_release);
      counters_->Add(Counter::kSharedBytes, static_cast<int64_t>(bytes));
    } else {
      std::memcpy(piece.data + moved_, slot, bytes);
      memory_->read.store(next_, std::memory_order_release);
    }
    moved_ += bytes;
  }

  StreamMemory* const memory_;
  Doorbell* const peer_;
  const bool sends_;
  Counters* const counters_;
  Handover handover_;
  std::deque<Piece> pieces_;
  size_t moved_ = 0;   // bytes of the first piece
  uint64_t next_ = 0;  // chunk
};

class WireStream : public StreamEnd {
 public:
  WireStream(Wire* wire, int peer, int tag, bool sends) : wire_(wire), peer_(peer), tag_(tag), sends_(sends) {}

  void Add(const Piece& piece) override {
    Piece rest = piece;
    for (; rest.bytes > kMessageBytes; rest.bytes -= kMessageBytes, rest.data += kMessageBytes)
      waiting_.push_back({{rest.number, rest.data, kMessageBytes}, false});
    waiting_.push_back({rest, true});
  }
  bool busy() const override { return !waiting_.empty() || !messages_.empty(); }

  Status Advance(bool* moved, std::vector<uint64_t>* done) override {
    while (!waiting_.empty() && messages_.size() < kMaxMessages) {
      RT_TRY(Start());
      *moved = true;
    }
    while (!messages_.empty()) {
      bool complete;
      RT_TRY(wire_->Test(messages_.front().ticket, &complete));
      if (!complete) return {};
      *moved = true;
      if (messages_.front().ends) done->push_back(messages_.front().number);
      messages_.pop_front();
    }
    return {};
  }

 private:
  static constexpr size_t kMessageBytes = size_t{512} << 10;  // longer ones keep an MPI from receiving meanwhile
  static constexpr size_t kMaxMessages = 16;                  // under way at once

  struct Message {
    Wire::Ticket ticket;
    uint64_t number;
    bool ends;  // the piece
  };

  Status Start() {
    const auto& [piece, ends] = waiting_.front();
    Message message{0, piece.number, ends};
    RT_TRY(sends_ ? wire_->StartSend(peer_, tag_, piece.data, piece.bytes, &message.ticket)
                  : wire_->StartReceive(peer_, tag_, piece.data, piece.bytes, &message.ticket));
    waiting_.pop_front();
    messages_.push_back(message);
    return {};
  }

  Wire* const wire_;
  const int peer_, tag_;
  const bool sends_;
  std::deque<std::pair<Piece, bool>> waiting_;
  std::deque<Message> messages_;
};

}  // namespace

std::unique_ptr<StreamEnd> OpenSharedStream(StreamMemory* memory, Doorbell* peer, bool sends, Counters* counters) {
  return std::make_unique<SharedStream>(memory, peer, sends, counters);
}

std::unique_ptr<StreamEnd> OpenWireStream(Wire* wire, int peer, int tag, bool sends) {
  return std::make_unique<WireStream>(wire, peer, tag, sends);
}

}  // namespace ringtrain
