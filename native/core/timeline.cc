#include "core/timeline.h"

#include <errno.h>
#include <fcntl.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstring>

namespace ringtrain {
namespace {

constexpr size_t kBufferBytes = 256 << 10;
// A kill may cut a write between two pages of the file, so one write touches no more of them than it must.
constexpr size_t kWriteBytes = 4096;
constexpr size_t kMostNames = 10000;   // later names share one set of tracks
constexpr size_t kMostTracks = 8;      // of one tensor
constexpr int64_t kOriginSeconds = 1704067200;  // 2024-01-01 00:00 UTC
constexpr char kClosing[] = "\n]\n";
constexpr size_t kClosingBytes = sizeof kClosing - 1;

// Length of the UTF-8 sequence at text[i], 0 if it is malformed.
size_t SequenceLength(const std::string& text, size_t i) {
  const auto byte = [&](size_t at) { return at < text.size() ? static_cast<unsigned char>(text[at]) : 0u; };
  const unsigned first = byte(i);
  const size_t length = first < 0x80 ? 1 : first >= 0xc2 && first < 0xe0 ? 2 : (first & 0xf0) == 0xe0 ? 3 : first >= 0xf0 && first < 0xf5 ? 4 : 0;
  for (size_t k = 1; k < length; ++k)
    if ((byte(i + k) & 0xc0) != 0x80) return 0;
  const unsigned second = byte(i + 1);
  const bool overlong = (first == 0xe0 && second < 0xa0) || (first == 0xf0 && second < 0x90);
  const bool outside = (first == 0xed && second >= 0xa0) || (first == 0xf4 && second >= 0x90);  // surrogates, above U+10FFFF
  return overlong || outside ? 0 : length;
}

// `text` as a JSON string. Bytes that are not UTF-8 become the replacement character.
std::string Quoted(const std::string& text) {
  std::string quoted = "\"";
  for (size_t i = 0; i < text.size();) {
    const size_t length = SequenceLength(text, i);
    const auto byte = static_cast<unsigned char>(text[i]);
    if (length == 0) {
      quoted += "\\ufffd";
    } else if (byte < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\u%04x", byte);
      quoted += escape;
    } else {
      if (byte == '"' || byte == '\\') quoted += '\\';
      quoted.append(text, i, length);
    }
    i += std::max<size_t>(length, 1);
  }
  return quoted + '"';
}

// Nanoseconds as microseconds, the format's unit.
std::string Microseconds(Nanoseconds duration) {
  char text[40];
  std::snprintf(text, sizeof text, "%" PRId64 ".%03d", duration / 1000, static_cast<int>(duration % 1000));
  return text;
}

// base/clock.h's time at the trace's time 0.
Nanoseconds TraceOrigin() {
  timespec wall;
  clock_gettime(CLOCK_REALTIME, &wall);
  return Now() - ((wall.tv_sec - kOriginSeconds) * INT64_C(1000000000) + wall.tv_nsec);
}

}  // namespace

Timeline::~Timeline() { Stop(); }

Status Timeline::Start(const std::string& path, int rank, int64_t max_events) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (file_ >= 0)
    return Status::InvalidArgument("start of timeline '" + path + "': expected none open but '" + path_ + "' is, on rank " +
                                   std::to_string(rank) + ". Stop it first.");
  const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (file < 0)
    return Status::InvalidArgument("start of timeline '" + path + "': cannot write it: " + std::strerror(errno) + ", on rank " +
                                   std::to_string(rank) + ". Name a file in an existing folder.");
  path_ = path;
  file_ = file;
  end_ = 0;
  rank_ = rank;
  origin_ = TraceOrigin();
  events_ = dropped_ = 0;
  max_events_ = max_events;
  next_track_ = 1;
  tracks_.clear();
  failure_ = Status();
  AppendMetadata("process_name", 0, "\"name\":\"rank " + std::to_string(rank) + "\"");
  AppendMetadata("process_sort_index", 0, "\"sort_index\":" + std::to_string(rank));
  WriteBuffer();
  enabled_.store(failure_.ok(), std::memory_order_relaxed);
  if (!failure_.ok()) CloseFile();
  return failure_;
}

Status Timeline::Stop() {
  std::lock_guard<std::mutex> lock(mutex_);
  enabled_.store(false, std::memory_order_relaxed);
  if (file_ < 0) return {};
  if (dropped_ > 0)
    Append("{\"ph\":\"i\",\"s\":\"g\",\"name\":\"" + std::to_string(dropped_) + " spans dropped\",\"pid\":" +
           std::to_string(rank_) + ",\"tid\":0,\"ts\":" + Microseconds(Now() - origin_) + "}");
  WriteBuffer();
  CloseFile();
  return failure_;
}

void Timeline::CloseFile() {
  close(file_);
  file_ = -1;
  tracks_.clear();
  std::string().swap(buffer_);
}

void Timeline::Span(const std::string& tensor, const char* stage, Nanoseconds begin, Nanoseconds end, int64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!enabled()) return;
  Track* track = events_ < max_events_ ? TrackFor(tensor, {begin, end}) : nullptr;
  if (track == nullptr) {
    ++dropped_;
    return;
  }
  ++events_;
  Append("{\"ph\":\"X\",\"name\":" + Quoted(stage) + ",\"pid\":" + std::to_string(rank_) + ",\"tid\":" +
         std::to_string(track->id) + ",\"ts\":" + Microseconds(begin - origin_) + ",\"dur\":" + Microseconds(end - begin) +
         (bytes > 0 ? ",\"args\":{\"bytes\":" + std::to_string(bytes) + "}}" : "}"));
}

void Timeline::Flush() {
  if (!enabled()) return;
  std::lock_guard<std::mutex> lock(mutex_);
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
  const bool own = tracks_.size() < kMostNames || tracks_.count(tensor) != 0;
  const std::string& name = own ? tensor : "(more tensors)";
  Tracks& tracks = tracks_[name];
  for (Track& track : tracks)
    if (Place(&track, span)) return &track;
  if (tracks.size() == kMostTracks) return nullptr;
  Track track;
  track.id = next_track_++;
  Place(&track, span);
  tracks.push_back(std::move(track));
  const std::string number = tracks.size() > 1 ? " (" + std::to_string(tracks.size()) + ")" : "";
  AppendMetadata("thread_name", tracks.back().id, "\"name\":" + Quoted(name + number));
  return &tracks.back();
}

void Timeline::AppendMetadata(const char* what, int track, const std::string& argument) {
  Append("{\"ph\":\"M\",\"name\":\"" + std::string(what) + "\",\"pid\":" + std::to_string(rank_) + ",\"tid\":" +
         std::to_string(track) + ",\"args\":{" + argument + "}}");
}

// Events are lines; a comma ends the line before.
void Timeline::Append(const std::string& event) {
  if (!failure_.ok()) return;
  buffer_ += ",\n";
  buffer_ += event;
  if (buffer_.size() >= kBufferBytes) WriteBuffer();
}

// Whole events, about a page at a time. An event is never cut: the text in it has no line break.
void Timeline::WriteBuffer() {
  size_t begin = 0;
  while (begin < buffer_.size() && failure_.ok()) {
    size_t end = buffer_.size();
    if (end - begin > kWriteBytes) {
      end = buffer_.rfind(",\n", begin + kWriteBytes);
      if (end <= begin) end = std::min(buffer_.find(",\n", begin + 1), buffer_.size());
    }
    WriteAtEnd(buffer_.data() + begin, end - begin);
    begin = end;
  }
  buffer_.clear();
}

// One write from the closing bracket on: the events and a new bracket. A write that fails ends the timeline.
void Timeline::WriteAtEnd(const char* events, size_t size) {
  const bool first = end_ == 0;
  std::string text = first ? "[" + std::string(events + 1, size - 1) : std::string(events, size);
  text += kClosing;
  const int64_t at = first ? 0 : end_ - static_cast<int64_t>(kClosingBytes);
  ssize_t written = pwrite(file_, text.data(), text.size(), at);
  while (written < 0 && errno == EINTR) written = pwrite(file_, text.data(), text.size(), at);
  if (written == static_cast<ssize_t>(text.size())) {
    end_ = at + written;
    return;
  }
  const std::string cause = written >= 0 ? "the device is full" : std::strerror(errno);
  const bool restored = !first && pwrite(file_, kClosing, kClosingBytes, at) > 0 && ftruncate(file_, end_) == 0;
  failure_ = Status::Internal("timeline '" + path_ + "': cannot write it: " + cause + ", on rank " + std::to_string(rank_) +
                              ". The trace ends " + (restored ? "here" : "in the middle of an event") +
                              "; start another where there is room.");
  enabled_.store(false, std::memory_order_relaxed);
}

}  // namespace ringtrain
