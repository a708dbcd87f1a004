#include "core/timeline.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstring>

#include "base/json_text.h"

namespace ringtrain {
namespace {

constexpr size_t kBufferBytes = 256 << 10;
constexpr int64_t kPageBytes = 4096;  // or a part of a page, where they are larger
constexpr int64_t kFirstCapacity = 64 << 10;
constexpr size_t kLongestText = 1500;           // of a quoted name, so that an event fits into a page
constexpr size_t kMaxNames = 10000;             // later names share one set of tracks
constexpr size_t kMaxTracks = 8;                // of one tensor
constexpr int64_t kOriginSeconds = 1704067200;  // 2024-01-01 00:00 UTC
constexpr char kClosing[] = "\n]\n";
constexpr int64_t kClosingBytes = sizeof kClosing - 1;

std::string Quoted(const std::string& text) { return ringtrain::Quoted(text, kLongestText); }

// Nanoseconds as microseconds, the format's unit. A clock that was set back must not make a number that is none.
std::string Microseconds(Nanoseconds duration) {
  duration = std::max<Nanoseconds>(duration, 0);
  char text[40];
  std::snprintf(text, sizeof text, "%" PRId64 ".%03d", duration / 1000, static_cast<int>(duration % 1000));
  return text;
}

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
  std::vector<char> block(kBufferBytes);
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
  const std::string spaces(kBufferBytes, ' ');
  for (const int64_t closing = end - kClosingBytes; begin < closing; begin += static_cast<int64_t>(spaces.size()))
    if (!WriteAll(file, spaces.data(), std::min<size_t>(spaces.size(), static_cast<size_t>(closing - begin)), begin))
      return false;
  return WriteAll(file, kClosing, kClosingBytes, end - kClosingBytes);
}

bool IsNoFile(const std::string& path) {
  struct stat about;
  return lstat(path.c_str(), &about) == 0 && !S_ISREG(about.st_mode) && !S_ISLNK(about.st_mode);
}

// `argument` is a member of a JSON object.
std::string Metadata(const char* what, int rank, int track, const std::string& argument) {
  return "{\"ph\":\"M\",\"name\":\"" + std::string(what) + "\",\"pid\":" + std::to_string(rank) +
         ",\"tid\":" + std::to_string(track) + ",\"args\":{" + argument + "}}";
}

// base/clock.h's time at the trace's time 0.
Nanoseconds TraceOrigin() {
  timespec wall;
  clock_gettime(CLOCK_REALTIME, &wall);
  return Now() - ((wall.tv_sec - kOriginSeconds) * INT64_C(1000000000) + wall.tv_nsec);
}

}  // namespace

Timeline::~Timeline() { Stop(); }

Status Timeline::Start(const std::string& path, int rank, int64_t max_events, bool mark_cycles) {
  MutexLock lock(mutex_);
  if (file_ >= 0)
    return Status::InvalidArgument("start of timeline '" + path + "': expected none open but '" + path_ +
                                   "' is, on rank " + std::to_string(rank) + ". Stop it first.");
  if (IsNoFile(path))
    return Status::InvalidArgument("start of timeline '" + path +
                                   "': expected a file but it is a folder or a device, on rank " +
                                   std::to_string(rank) + ". Name a file.");
  path_ = path;
  rank_ = rank;
  used_ = 0;
  const Status created = Resize(kFirstCapacity);
  if (!created.ok()) return Status::InvalidArgument(created.message());
  origin_ = TraceOrigin();
  events_ = dropped_ = 0;
  max_events_ = max_events;
  mark_cycles_ = mark_cycles;
  next_track_ = 1;
  tracks_.clear();
  failure_ = Status();
  Append(Metadata("process_sort_index", rank, 0, "\"sort_index\":" + std::to_string(rank)));
  WriteBuffer();
  enabled_.store(failure_.ok(), std::memory_order_relaxed);
  if (!failure_.ok()) CloseFile();
  return failure_;
}

Status Timeline::Stop() {
  MutexLock lock(mutex_);
  enabled_.store(false, std::memory_order_relaxed);
  if (file_ < 0) return {};
  if (dropped_ > 0)
    Append("{\"ph\":\"i\",\"s\":\"g\",\"name\":\"" + std::to_string(dropped_) + " spans dropped\",\"pid\":" +
           std::to_string(rank_) + ",\"tid\":0,\"ts\":" + Microseconds(Now() - origin_) + "}");
  WriteBuffer();
  if (failure_.ok()) failure_ = Resize(used_ + kClosingBytes);
  CloseFile();
  return failure_;
}

void Timeline::CloseFile() {
  close(file_);
  file_ = -1;
  tracks_.clear();
  std::string().swap(buffer_);
}

void Timeline::Span(const std::string& tensor, const std::string& name, Nanoseconds begin, Nanoseconds end,
                    int64_t bytes, const char* category) {
  MutexLock lock(mutex_);
  if (!enabled()) return;
  Track* track = events_ < max_events_ ? TrackFor(tensor, {begin, end}) : nullptr;
  if (track == nullptr) {
    ++dropped_;
    return;
  }
  ++events_;
  const std::string kind = *category == '\0' ? "" : ",\"cat\":" + Quoted(category);
  Append("{\"ph\":\"X\",\"name\":" + Quoted(name) + kind + ",\"pid\":" + std::to_string(rank_) +
         ",\"tid\":" + std::to_string(track->id) + ",\"ts\":" + Microseconds(begin - origin_) + ",\"dur\":" +
         Microseconds(end - begin) + (bytes > 0 ? ",\"args\":{\"bytes\":" + std::to_string(bytes) + "}}" : "}"));
}

void Timeline::Cycle() {
  if (!enabled()) return;
  MutexLock lock(mutex_);
  if (!enabled() || !mark_cycles_) return;
  if (events_ >= max_events_) {
    ++dropped_;
    return;
  }
  ++events_;
  Append("{\"ph\":\"i\",\"s\":\"p\",\"name\":\"CYCLE_START\",\"pid\":" + std::to_string(rank_) +
         ",\"tid\":0,\"ts\":" + Microseconds(Now() - origin_) + "}");
}

void Timeline::Flush() {
  if (!enabled()) return;
  MutexLock lock(mutex_);
  WriteBuffer();
}

// Takes the span in if it follows what the track shows, or lies within it.
bool Timeline::Place(Track* track, const Interval& span) {
  if (span.begin < track->latest_begin) return false;
  auto around = track->open;
  while (!around.empty() && around.back().end <= span.begin) around.pop_back();
  if (!around.empty() && span.end > around.back().end) return false;
  around.push_back(span);
  track->open = std::move(around);
  track->latest_begin = span.begin;
  return true;
}

// The tensor's first track on which the span has a place, a new one if need be; nullptr if there are too many.
Timeline::Track* Timeline::TrackFor(const std::string& tensor, const Interval& span) {
  const bool own = tracks_.size() < kMaxNames || tracks_.count(tensor) != 0;
  const std::string& name = own ? tensor : "(more tensors)";
  Tracks& tracks = tracks_[name];
  for (Track& track : tracks)
    if (Place(&track, span)) return &track;
  if (tracks.size() == kMaxTracks) return nullptr;
  Track track;
  track.id = next_track_++;
  Place(&track, span);
  tracks.push_back(std::move(track));
  const std::string number = tracks.size() > 1 ? " (" + std::to_string(tracks.size()) + ")" : "";
  Append(Metadata("thread_name", rank_, tracks.back().id, "\"name\":" + Quoted(name + number)));
  return &tracks.back();
}

// Events are lines; a comma ends the line before.
void Timeline::Append(const std::string& event) {
  if (!failure_.ok()) return;
  buffer_ += ",\n";
  buffer_ += event;
  if (buffer_.size() >= kBufferBytes) WriteBuffer();
}

void Timeline::WriteBuffer() {
  for (size_t begin = 0; begin < buffer_.size() && failure_.ok();) {
    // As many whole events as the page has room for, at least one; in an event's text there is no line break.
    const auto room = static_cast<size_t>(kPageBytes - used_ % kPageBytes);
    size_t end = buffer_.size();
    if (end - begin > room) end = buffer_.rfind(",\n", begin + room);
    if (end <= begin) end = std::min(buffer_.find(",\n", begin + 1), buffer_.size());
    failure_ = WriteEvents(buffer_.data() + begin, end - begin);
    begin = end;
  }
  buffer_.clear();
  if (!failure_.ok()) enabled_.store(false, std::memory_order_relaxed);
}

// In one write, within one page.
Status Timeline::WriteEvents(const char* events, size_t size) {
  const auto bytes = static_cast<int64_t>(size);
  const int64_t left = kPageBytes - used_ % kPageBytes;
  const int64_t at = bytes <= left ? used_ : used_ + left;
  while (at + bytes + kClosingBytes > capacity_) RT_TRY(Resize(2 * capacity_));
  if (!WriteAll(file_, events, size, at)) return Failure(std::strerror(errno));
  used_ = at + bytes;
  return {};
}

// Puts a file of that size, with what there is so far, into the place of the present one.
Status Timeline::Resize(int64_t capacity) {
  const std::string growing = path_ + ".growing";
  const int file = open(growing.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (file < 0) return Failure(std::strerror(errno));
  const bool first = file_ < 0;
  const std::string opening =
      "[\n" + Metadata("process_name", rank_, 0, "\"name\":\"rank " + std::to_string(rank_) + "\"");
  const int64_t kept = first ? static_cast<int64_t>(opening.size()) : used_;
  const bool written = (first ? WriteAll(file, opening.data(), opening.size(), 0) : Copy(file_, file, used_)) &&
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

Status Timeline::Failure(const std::string& cause) const {
  return Status::Internal("timeline '" + path_ + "': expected to write it but found: " + cause + ", on rank " +
                          std::to_string(rank_) +
                          ". The trace ends here; name a file in an existing folder with room for it.");
}

}  // namespace ringtrain
