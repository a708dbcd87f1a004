// Timeline: one rank's trace in the Chrome/Perfetto JSON array format.
//
// The coordinator's thread reports spans and flushes when it goes idle, and threads of the program report how long they
// waited; Start and Stop may come from any thread. These two wait for the file (trace_file.h), the others never.
// Memory is bounded, by what may wait to be written and by a limit of names; so is the file.
//
// One process is a rank, one track ("thread") a tensor. The stages of a chunk pipeline overlap, and the format has no
// place for spans of one track that overlap without nesting; such a span goes to a further track of the same tensor,
// "name (2)". Asynchronous events would allow the overlap, but viewers group them by category and lose the row for each
// tensor. Times count from the start of 2024 by the wall clock, so that traces of several ranks and hosts can be put
// into one.
#ifndef RINGTRAIN_OBSERVE_TIMELINE_H_
#define RINGTRAIN_OBSERVE_TIMELINE_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/mutex.h"
#include "base/status.h"
#include "base/writer.h"
#include "observe/trace_file.h"

namespace ringtrain {

class Timeline {
 public:
  // The writer lives longer.
  explicit Timeline(Writer* writer) : writer_(writer) {}
  ~Timeline();
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;

  // Begins a new file; refused while another one is open. At most `max_events` spans are written, later ones counted,
  // as are those that come while too much waits to be written. mark_cycles: whether Cycle writes anything. host: its
  // name, for people to read; "" if nobody wants it.
  Status Start(const std::string& path, int rank, int64_t max_events, bool mark_cycles = false,
               const std::string& host = "");
  // Writes what is left, and how many spans were dropped. Says if a write failed since Start, or is not done after
  // kPatience. Ok if there is no file.
  Status Stop();
  // Whether spans are wanted now.
  bool enabled() const { return enabled_.load(std::memory_order_relaxed); }

  // A span of `tensor`'s track, in nanoseconds of base/clock.h: what readers search for, and what it is called here
  // ("": the same).
  void Span(const std::string& tensor, const std::string& name, Nanoseconds begin, Nanoseconds end, int64_t bytes,
            const char* category = "");
  // Now a batch begins that the ranks have agreed on.
  void Cycle();
  // Has what waits written to the file.
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
  void Append(const std::string& event, bool whatever_waits = false) RT_REQUIRES(mutex_);
  void HandOver() RT_REQUIRES(mutex_);

  static constexpr double kPatience = 60;  // seconds, with a file system

  Writer* const writer_;
  std::atomic<bool> enabled_{false};

  Mutex control_mutex_;  // held by whoever starts or stops, and waits for the file

  Mutex mutex_;
  std::shared_ptr<TraceFile> file_ RT_GUARDED_BY(mutex_);  // the writer's, too
  int rank_ RT_GUARDED_BY(mutex_) = 0;
  Nanoseconds origin_ RT_GUARDED_BY(mutex_) = 0;  // the trace's time 0 by base/clock.h
  int64_t events_ RT_GUARDED_BY(mutex_) = 0;
  int64_t max_events_ RT_GUARDED_BY(mutex_) = 0;
  bool mark_cycles_ RT_GUARDED_BY(mutex_) = false;
  int64_t dropped_ RT_GUARDED_BY(mutex_) = 0;
  int next_track_ RT_GUARDED_BY(mutex_) = 1;
  std::unordered_map<std::string, Tracks> tracks_ RT_GUARDED_BY(mutex_);
};

}  // namespace ringtrain
#endif  // RINGTRAIN_OBSERVE_TIMELINE_H_
