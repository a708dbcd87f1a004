#include "transport/tcp/lane.h"

#include <errno.h>
#include <sys/socket.h>

#include <array>
#include <utility>

namespace ringtrain {
namespace {

constexpr size_t kBytesInTurn = 2 << 20;

}  // namespace

LaneMove ControlSender::Move() {
  while (sent_ < bytes_.size() && writable) {
    const ssize_t sent =
        Uninterrupted([&] { return send(socket_.fd(), bytes_.data() + sent_, bytes_.size() - sent_, MSG_NOSIGNAL); });
    if (sent < 0 && errno != EAGAIN) return LaneMove::Lost(errno);
    if (sent < 0) writable = false;
    if (sent > 0) sent_ += static_cast<size_t>(sent);
  }
  if (sent_ == bytes_.size()) {
    bytes_.clear();
    sent_ = 0;
  }
  return {};
}

LaneMove ControlSender::Listen(bool* left) {
  for (;;) {
    char heard[RecordOpener::kSealBytes];
    const ssize_t got = Uninterrupted([&] { return recv(socket_.fd(), heard, sizeof heard, 0); });
    if (got < 0 && errno == EAGAIN) return {};
    if (got <= 0) return LaneMove::Lost(got < 0 ? errno : 0);
    heard_.append(heard, static_cast<size_t>(got));
    if (heard_.size() > sizeof heard || !EqualInConstantTime(heard_.data(), leave_.data(), heard_.size()))
      return LaneMove::Fault("goes the wrong way");
    *left |= heard_.size() == sizeof heard;
  }
}

void ControlReceiver::SayLeave() const {
  // Into an empty buffer.
  Uninterrupted([&] { return send(socket_.fd(), leave_.data(), RecordOpener::kSealBytes, MSG_NOSIGNAL); });
}

LaneMove ControlReceiver::Move(std::vector<Record>* records) {
  std::array<char, 16 << 10> buffer;
  for (size_t moved = 0; moved < kBytesInTurn;) {
    const ssize_t got = Uninterrupted([&] { return recv(socket_.fd(), buffer.data(), buffer.size(), 0); });
    if (got < 0 && errno == EAGAIN) return {};
    if (got <= 0) return LaneMove::Lost(got < 0 ? errno : 0);
    moved += static_cast<size_t>(got);
    opener_.Feed(buffer.data(), static_cast<size_t>(got));
    while (true) {
      Record record;
      if (!opener_.Next(&record.header, &record.payload)) break;
      records->push_back(std::move(record));
    }
    if (opener_.fault() != nullptr) return LaneMove::Fault(opener_.fault());
    if (static_cast<size_t>(got) < buffer.size() && !ended) return {};  // there was no more
  }
  return {true, false, "", false, 0};
}

LaneMove PieceSender::Move(size_t most) {
  iovec spans[PieceWriter::kMostSpans];
  for (size_t moved = 0; moved < most;) {
    const int count = writable ? writer_.Gather(ahead_, spans) : 0;
    if (count == 0) return {};
    msghdr message{};
    message.msg_iov = spans;
    message.msg_iovlen = static_cast<size_t>(count);
    const ssize_t sent = Uninterrupted([&] { return sendmsg(socket_.fd(), &message, MSG_NOSIGNAL); });
    if (sent < 0 && errno != EAGAIN) return LaneMove::Lost(errno);
    if (sent < 0) writable = false;
    if (sent > 0) {
      moved += static_cast<size_t>(sent);
      writer_.Wrote(static_cast<size_t>(sent));
    }
  }
  return {true, false, "", false, 0};
}

LaneMove PieceSender::Listen() const {
  char byte;
  const ssize_t got = Uninterrupted([&] { return recv(socket_.fd(), &byte, 1, 0); });
  if (got < 0 && errno == EAGAIN) return {};
  return got > 0 ? LaneMove::Fault("goes the wrong way") : LaneMove::Lost(got < 0 ? errno : 0);
}

LaneMove PieceReceiver::Move() {
  iovec spans[PieceReader::kMostSpans];
  for (size_t moved = 0; moved < kBytesInTurn;) {
    const int count = reader_.Room(spans);
    size_t room = 0;
    for (int i = 0; i < count; ++i) room += spans[i].iov_len;
    msghdr message{};
    message.msg_iov = spans;
    message.msg_iovlen = static_cast<size_t>(count);
    const ssize_t got = Uninterrupted([&] { return recvmsg(socket_.fd(), &message, 0); });
    if (got < 0 && errno == EAGAIN) return {};
    if (got <= 0) return LaneMove::Lost(got < 0 ? errno : 0);
    moved += static_cast<size_t>(got);
    const char* fault = reader_.Took(static_cast<size_t>(got));
    if (fault != nullptr) return LaneMove::Fault(fault);
    if (static_cast<size_t>(got) < room && !ended) return {};  // there was no more
  }
  return {true, false, "", false, 0};
}

}  // namespace ringtrain
