#include "observe/trace_file.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

namespace ringtrain {
namespace {

constexpr size_t kBlockBytes = 256 << 10;
constexpr int64_t kPageBytes = 4096;  // or a part of a page, where they are larger
constexpr int64_t kFirstCapacity = 64 << 10;
constexpr char kClosing[] = "\n]\n";
constexpr int64_t kClosingBytes = sizeof kClosing - 1;

// All of it, whatever interrupts; false with errno otherwise.
bool WriteAll(int file, const char* data, size_t size, int64_t at) {
  while (size > 0) {
    const ssize_t written = pwrite(file, data, size, at);
    if (written < 0 && errno == EINTR) continue;
    if (written == 0) errno = ENOSPC;
    if (written <= 0) return false;
    data += written;
    size -= static_cast<size_t>(written);
    at += written;
  }
  return true;
}

bool Copy(int from, int to, int64_t size) {
  std::vector<char> block(kBlockBytes);
  for (int64_t at = 0; at < size;) {
    const ssize_t read = pread(from, block.data(), std::min<size_t>(block.size(), static_cast<size_t>(size - at)), at);
    if (read < 0 && errno == EINTR) continue;
    if (read == 0) errno = EIO;
    if (read <= 0 || !WriteAll(to, block.data(), static_cast<size_t>(read), at)) return false;
    at += read;
  }
  return true;
}

// Spaces from `begin` on and the closing bracket, up to `end`.
bool WriteRoom(int file, int64_t begin, int64_t end) {
  const std::string spaces(kBlockBytes, ' ');
  for (const int64_t closing = end - kClosingBytes; begin < closing; begin += static_cast<int64_t>(spaces.size()))
    if (!WriteAll(file, spaces.data(), std::min<size_t>(spaces.size(), static_cast<size_t>(closing - begin)), begin))
      return false;
  return WriteAll(file, kClosing, kClosingBytes, end - kClosingBytes);
}

}  // namespace

TraceFile::TraceFile(std::string path, int rank, std::string opening)
    : path_(std::move(path)), rank_(rank), opening_("[\n" + std::move(opening)) {}

TraceFile::~TraceFile() {
  if (file_ >= 0) close(file_);
}

Status TraceFile::Create() { return Resize(kFirstCapacity); }

// ---- any thread ----

// Events are lines; a comma ends the line before.
size_t TraceFile::Add(const std::string& event, bool whatever_waits) {
  MutexLock lock(mutex_);
  if (!failure_.ok() || (waiting_.size() + event.size() > kMostWaiting && !whatever_waits)) return 0;
  waiting_ += ",\n";
  waiting_ += event;
  return waiting_.size();
}

size_t TraceFile::waiting() {
  MutexLock lock(mutex_);
  return waiting_.size();
}

Status TraceFile::failure() {
  MutexLock lock(mutex_);
  return failure_;
}

Status TraceFile::Failure(const std::string& cause) const {
  return Status::Internal("timeline '" + path_ + "': expected to write it but found: " + cause + ", on rank " +
                          std::to_string(rank_) +
                          ". The trace ends here; name a file in an existing folder with room for it.");
}

// ---- the writer ----

Status TraceFile::Write() {
  std::string events;
  {
    MutexLock lock(mutex_);
    if (!failure_.ok()) return failure_;
    events.swap(waiting_);
  }
  return Fail(WriteWithinPages(events));
}

Status TraceFile::Finish() {
  RT_TRY(Write());
  return Fail(Resize(used_ + kClosingBytes));
}

// The first failure, if there is one.
Status TraceFile::Fail(const Status& failure) {
  MutexLock lock(mutex_);
  if (failure_.ok()) failure_ = failure;
  if (!failure_.ok()) std::string().swap(waiting_);
  return failure_;
}

Status TraceFile::WriteWithinPages(const std::string& events) {
  for (size_t begin = 0; begin < events.size();) {
    // As many whole events as the page has room for, at least one; in an event's text there is no line break.
    const auto room = static_cast<size_t>(kPageBytes - used_ % kPageBytes);
    size_t end = events.size();
    if (end - begin > room) end = events.rfind(",\n", begin + room);
    if (end <= begin) end = std::min(events.find(",\n", begin + 1), events.size());
    RT_TRY(WriteEvents(events.data() + begin, end - begin));
    begin = end;
  }
  return {};
}

// In one write, within one page.
Status TraceFile::WriteEvents(const char* events, size_t size) {
  const auto bytes = static_cast<int64_t>(size);
  const int64_t left = kPageBytes - used_ % kPageBytes;
  const int64_t at = bytes <= left ? used_ : used_ + left;
  while (at + bytes + kClosingBytes > capacity_) RT_TRY(Resize(2 * capacity_));
  if (!WriteAll(file_, events, size, at)) return Failure(std::strerror(errno));
  used_ = at + bytes;
  return {};
}

// Puts a file of that size, with what there is so far, into the place of the present one. It does not grow in place: a
// bracket that moves into another page could be seen twice, or not at all.
Status TraceFile::Resize(int64_t capacity) {
  const std::string growing = path_ + ".growing";
  const int file = open(growing.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (file < 0) return Failure(std::strerror(errno));
  const bool first = file_ < 0;
  const int64_t kept = first ? static_cast<int64_t>(opening_.size()) : used_;
  const bool written = (first ? WriteAll(file, opening_.data(), opening_.size(), 0) : Copy(file_, file, used_)) &&
                       WriteRoom(file, kept, capacity) && rename(growing.c_str(), path_.c_str()) == 0;
  if (!written) {
    const std::string cause = std::strerror(errno);
    close(file);
    unlink(growing.c_str());
    return Failure(cause);
  }
  if (!first) close(file_);
  file_ = file;
  capacity_ = capacity;
  used_ = kept;
  return {};
}

}  // namespace ringtrain
