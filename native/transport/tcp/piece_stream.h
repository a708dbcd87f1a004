// The two ends of a data lane: pieces as a stream of bytes. Pure, and without a copy: they say which memory the next
// bytes lie in or go to, as sendmsg and recvmsg want it, and are told how many have been moved.
#ifndef RINGTRAIN_TRANSPORT_TCP_PIECE_STREAM_H_
#define RINGTRAIN_TRANSPORT_TCP_PIECE_STREAM_H_

#include <sys/uio.h>

#include <array>
#include <deque>

#include "transport/tcp/exchange.h"

namespace ringtrain {

class PieceWriter {
 public:
  static constexpr int kMostSpans = 32;

  explicit PieceWriter(Exchange* exchange) : exchange_(exchange) {}
  // Takes pieces of the exchange until `ahead` bytes wait here, and fills in where they lie; how many spans there are.
  // What waits here will travel on this lane, so that where there are several it should be little.
  int Gather(size_t ahead, iovec (&spans)[kMostSpans]);
  // So many of these bytes have left.
  void Wrote(size_t bytes);

 private:
  struct Leaving {
    Piece piece;
    std::array<char, RecordHeader::kBytes> header;
  };

  Exchange* const exchange_;
  std::deque<Leaving> leaving_;
  size_t waiting_ = 0;  // bytes in it that have not left
  size_t written_ = 0;  // bytes of the first that have
};

class PieceReader {
 public:
  static constexpr int kMostSpans = 2;

  explicit PieceReader(Exchange* exchange) : exchange_(exchange) {}
  // Where the next bytes go; how many spans there are. The second is for what comes behind a piece: small pieces arrive
  // with their headers, and of large ones little takes the way through it.
  int Room(iovec (&spans)[kMostSpans]);
  // So many bytes have come. Returns a fault of the peer, or nullptr.
  const char* Took(size_t bytes);

 private:
  void Land(size_t bytes);

  Exchange* const exchange_;
  RecordHeader header_;
  char* memory_ = nullptr;  // for the rest of the payload; nullptr while that is thrown away
  size_t left_ = 0;         // of the payload
  size_t filled_ = 0;       // of buffer_
  std::array<char, 4096> buffer_;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_TRANSPORT_TCP_PIECE_STREAM_H_
