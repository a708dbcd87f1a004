// Timeline: one rank's trace in the Chrome/Perfetto JSON array format.
//
// The coordinator's thread reports spans and flushes when it goes idle, and threads of the program report how long they
// waited; Start and Stop may come from any thread.
// Memory is bounded, by a buffer and by a limit of names; so is the file.
//
// The file is valid JSON at every moment, also when the process is killed in a write, which the kernel cuts at the
// boundaries of pages. So the closing bracket stands far ahead of the last event, with spaces between; an event
// replaces spaces and lies within one page; and when the spaces are used up, a copy with twice the room is renamed into
// the file's place.
//
// One process is a rank, one track ("thread") a tensor. The stages of a chunk pipeline overlap, and the format has no
// place for spans of one track that overlap without nesting; such a span goes to a further track of the same tensor,
// "name (2)". Asynchronous events would allow the overlap, but viewers group them by category and lose the row for each
// tensor. Times count from the start of 2024 by the wall clock, so that traces of several ranks and hosts can be put
// into one.
#ifndef RINGTRAIN_CORE_TIMELINE_H_
#define RINGTRAIN_CORE_TIMELINE_H_

#include <atomic>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/mutex.h"
#include "base/status.h"

namespace ringtrain {

class Timeline {
 public:
  Timeline() = default;
  ~Timeline();
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;

  // Begins a new file; refused while another one is open. At most `max_events` spans are written, later ones counted.
  // mark_cycles: whether Cycle writes anything.
  Status Start(const std::string& path, int rank, int64_t max_events, bool mark_cycles = false);
  // Writes what is left, and how many spans were dropped. Says if a write failed since Start. Ok if there is no file.
  Status Stop();
  // Whether spans are wanted now.
  bool enabled() const { return enabled_.load(std::memory_order_relaxed); }

  // A span of `tensor`'s track, in nanoseconds of base/clock.h: what readers search for, and what it is called here
  // ("": the same).
  void Span(const std::string& tensor, const std::string& name, Nanoseconds begin, Nanoseconds end, int64_t bytes,
            const char* category = "");
  // Now a batch begins that the ranks have agreed on.
  void Cycle();
  // Writes the buffer to the file.
  void Flush();

 private:
  struct Interval {
    Nanoseconds begin, end;
  };
  // One row of the viewer. Spans of a row either follow each other or nest.
  struct Track {
    int id = 0;
    Nanoseconds latest_begin = 0;
    std::vector<Interval> open;  // intervals around latest_begin, from the outside in
  };
  using Tracks = std::vector<Track>;  // of one tensor

  static bool Place(Track* track, const Interval& span);
  Track* TrackFor(const std::string& tensor, const Interval& span) RT_REQUIRES(mutex_);
  void Append(const std::string& event) RT_REQUIRES(mutex_);
  void WriteBuffer() RT_REQUIRES(mutex_);
  Status WriteEvents(const char* events, size_t size) RT_REQUIRES(mutex_);
  Status Resize(int64_t capacity) RT_REQUIRES(mutex_);
  Status Failure(const std::string& cause) const RT_REQUIRES(mutex_);
  void CloseFile() RT_REQUIRES(mutex_);

  std::atomic<bool> enabled_{false};

  Mutex mutex_;
  std::string path_ RT_GUARDED_BY(mutex_);
  int file_ RT_GUARDED_BY(mutex_) = -1;
  int64_t capacity_ RT_GUARDED_BY(mutex_) = 0;  // the file's size; it ends with the closing bracket
  int64_t used_ RT_GUARDED_BY(mutex_) = 0;      // where the next event goes; spaces from here to the bracket
  int rank_ RT_GUARDED_BY(mutex_) = 0;
  Nanoseconds origin_ RT_GUARDED_BY(mutex_) = 0;  // the trace's time 0 by base/clock.h
  int64_t events_ RT_GUARDED_BY(mutex_) = 0;
  int64_t max_events_ RT_GUARDED_BY(mutex_) = 0;
  bool mark_cycles_ RT_GUARDED_BY(mutex_) = false;
  int64_t dropped_ RT_GUARDED_BY(mutex_) = 0;
  int next_track_ RT_GUARDED_BY(mutex_) = 1;
  std::unordered_map<std::string, Tracks> tracks_ RT_GUARDED_BY(mutex_);
  std::string buffer_ RT_GUARDED_BY(mutex_);
  Status failure_ RT_GUARDED_BY(mutex_);
};

}  // namespace ringtrain
#endif  // RINGTRAIN_CORE_TIMELINE_H_
