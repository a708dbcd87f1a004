#include "transport/tcp/piece_stream.h"

#include <algorithm>
#include <cstring>

namespace ringtrain {

// ---- writing ----

int PieceWriter::Gather(size_t ahead, iovec (&spans)[kMostSpans]) {
  while (waiting_ < ahead && leaving_.size() < kMostSpans / 2) {
    Leaving next;
    if (!exchange_->NextPiece(&next.piece)) break;
    next.piece.header.Encode(next.header.data());
    waiting_ += next.header.size() + next.piece.header.length;
    leaving_.push_back(next);
  }
  int count = 0;
  size_t skipped = written_;
  const auto add = [&](const char* data, size_t bytes) {
    const size_t skip = std::min(skipped, bytes);
    skipped -= skip;
    if (bytes > skip) spans[count++] = {const_cast<char*>(data) + skip, bytes - skip};
  };
  for (const Leaving& each : leaving_) {
    add(each.header.data(), each.header.size());
    add(each.piece.data, each.piece.header.length);
  }
  return count;
}

void PieceWriter::Wrote(size_t bytes) {
  waiting_ -= bytes;
  written_ += bytes;
  while (!leaving_.empty()) {
    const size_t whole = RecordHeader::kBytes + leaving_.front().piece.header.length;
    if (written_ < whole) return;
    written_ -= whole;
    const Piece piece = leaving_.front().piece;
    leaving_.pop_front();
    exchange_->PieceLeft(piece);
  }
}

// ---- reading ----

int PieceReader::Room(iovec (&spans)[kMostSpans]) {
  int count = 0;
  if (left_ > 0 && memory_ != nullptr) spans[count++] = {memory_, left_};
  spans[count++] = {buffer_.data() + filled_, buffer_.size() - filled_};
  return count;
}

const char* PieceReader::Took(size_t bytes) {
  if (left_ > 0 && memory_ != nullptr) {
    const size_t landed = std::min(bytes, left_);
    bytes -= landed;
    Land(landed);
  }
  filled_ += bytes;
  size_t parsed = 0;
  for (;;) {
    if (left_ > 0) {
      const size_t landed = std::min(filled_ - parsed, left_);
      if (memory_ != nullptr && landed > 0) std::memcpy(memory_, buffer_.data() + parsed, landed);
      parsed += landed;
      Land(landed);
      if (left_ > 0) break;
    }
    if (filled_ - parsed < RecordHeader::kBytes) break;
    if (!RecordHeader::Decode(buffer_.data() + parsed, &header_)) return "cannot be read";
    parsed += RecordHeader::kBytes;
    const char* fault = exchange_->Place(header_, &memory_);
    if (fault != nullptr) return fault;
    left_ = header_.length;
    if (left_ == 0) exchange_->PieceArrived(header_);
  }
  filled_ -= parsed;
  std::memmove(buffer_.data(), buffer_.data() + parsed, filled_);
  return nullptr;
}

void PieceReader::Land(size_t bytes) {
  if (bytes == 0) return;
  left_ -= bytes;
  if (memory_ != nullptr) memory_ += bytes;
  if (left_ == 0) exchange_->PieceArrived(header_);
}

}  // namespace ringtrain
