#include "observe/timeline.h"

#include <sys/stat.h>
#include <time.h>

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <new>
#include <utility>

#include "base/json_text.h"

namespace ringtrain {
namespace {

constexpr size_t kBufferBytes = 256 << 10;      // that may wait for a flush
constexpr size_t kLongestText = 1500;           // of a quoted name, so that an event fits into a page
constexpr size_t kMaxNames = 10000;             // later names share one set of tracks
constexpr size_t kMaxTracks = 8;                // of one tensor
constexpr int64_t kOriginSeconds = 1704067200;  // 2024-01-01 00:00 UTC

std::string Quoted(const std::string& text) { return ringtrain::Quoted(text, kLongestText); }

// Nanoseconds as microseconds, the format's unit. A clock that was set back must not make a number that is none.
std::string Microseconds(Nanoseconds duration) {
  duration = std::max<Nanoseconds>(duration, 0);
  char text[40];
  std::snprintf(text, sizeof text, "%" PRId64 ".%03d", duration / 1000, static_cast<int>(duration % 1000));
  return text;
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
  return Now() - ((wall.tv_sec - kOriginSeconds) * kSecond + wall.tv_nsec);
}

}  // namespace

Timeline::~Timeline() { Stop(); }

Status Timeline::Start(const std::string& path, int rank, int64_t max_events, bool mark_cycles,
                       const std::string& host) {
  MutexLock control(control_mutex_);
  {
    MutexLock lock(mutex_);
    if (file_ != nullptr)
      return Status::InvalidArgument("start of timeline '" + path + "': expected none open but '" + file_->path() +
                                     "' is, on rank " + std::to_string(rank) + ". Stop it first.");
  }
  if (IsNoFile(path))
    return Status::InvalidArgument("start of timeline '" + path +
                                   "': expected a file but it is a folder or a device, on rank " +
                                   std::to_string(rank) + ". Name a file.");
  auto file = std::make_shared<TraceFile>(
      path, rank, Metadata("process_name", rank, 0, "\"name\":\"rank " + std::to_string(rank) + "\""));
  const Status created = file->Create();
  if (!created.ok()) return Status::InvalidArgument(created.message());
  file->Add(Metadata("process_sort_index", rank, 0, "\"sort_index\":" + std::to_string(rank)));
  if (!host.empty()) file->Add(Metadata("process_labels", rank, 0, "\"labels\":" + Quoted("host " + host)));
  RT_TRY(file->Write());

  MutexLock lock(mutex_);
  file_ = std::move(file);
  rank_ = rank;
  origin_ = TraceOrigin();
  events_ = dropped_ = 0;
  max_events_ = max_events;
  mark_cycles_ = mark_cycles;
  next_track_ = 1;
  tracks_.clear();
  enabled_.store(true, std::memory_order_relaxed);
  return {};
}

Status Timeline::Stop() {
  MutexLock control(control_mutex_);
  std::shared_ptr<TraceFile> file;
  {
    MutexLock lock(mutex_);
    enabled_.store(false, std::memory_order_relaxed);
    if (file_ == nullptr) return {};
    if (dropped_ > 0)
      file_->Add("{\"ph\":\"i\",\"s\":\"g\",\"name\":\"" + std::to_string(dropped_) + " spans dropped\",\"pid\":" +
                     std::to_string(rank_) + ",\"tid\":0,\"ts\":" + Microseconds(Now() - origin_) + "}",
                 true);
    file = std::move(file_);
    tracks_.clear();
  }
  writer_->Do(
      file->name(), [file] { return file->Finish().message(); }, [file](const std::string& why) { file->GiveUp(why); });
  if (!writer_->Await(kPatience).empty())
    return file->Failure("the file system has not done so for " + std::to_string(static_cast<int>(kPatience)) + " s");
  return file->failure();
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
  if (!enabled()) return;
  if (!file_->failure().ok())
    enabled_.store(false, std::memory_order_relaxed);
  else if (file_->waiting() > 0)
    HandOver();
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
  Append(Metadata("thread_name", rank_, tracks.back().id, "\"name\":" + Quoted(name + number)), true);
  return &tracks.back();
}

// What does not fit is counted.
void Timeline::Append(const std::string& event, bool whatever_waits) {
  const size_t waiting = file_->Add(event, whatever_waits);
  if (waiting == 0) ++dropped_;
  if (waiting >= kBufferBytes) HandOver();
}

void Timeline::HandOver() {
  try {
    writer_->Do(
        file_->name(), [file = file_] { return file->Write().message(); },
        [file = file_](const std::string& why) { file->GiveUp(why); });
  } catch (const std::bad_alloc&) {  // the next time, perhaps
  }
}

}  // namespace ringtrain
