// TraceFile: the file of a timeline. Any thread adds events, which wait in memory; a thread that may block writes them
// (base/writer.h).
//
// The file is valid JSON at every moment, also when the process is killed in a write, which the kernel cuts at the
// boundaries of pages. So the closing bracket stands far ahead of the last event, with spaces between; an event
// replaces spaces and lies within one page; and when the spaces are used up, a copy with twice the room is renamed into
// the file's place.
#ifndef RINGTRAIN_OBSERVE_TRACE_FILE_H_
#define RINGTRAIN_OBSERVE_TRACE_FILE_H_

#include <cstdint>
#include <string>

#include "base/mutex.h"
#include "base/status.h"

namespace ringtrain {

class TraceFile {
 public:
  static constexpr size_t kMostWaiting = 16 << 20;  // bytes

  // opening: the first event.
  TraceFile(std::string path, int rank, std::string opening);
  ~TraceFile();
  TraceFile(const TraceFile&) = delete;
  TraceFile& operator=(const TraceFile&) = delete;

  const std::string& path() const { return path_; }
  // Replaces what is there. Before anything else.
  Status Create();

  // Any thread, and none of these waits for the file.
  // Returns how many bytes wait; 0 if the event will not be written, since too much waits or a write has failed.
  size_t Add(const std::string& event, bool whatever_waits = false);
  size_t waiting();
  Status failure();
  // Of what the writer has to do.
  std::string name() const { return "timeline '" + path_ + "'"; }
  Status Failure(const std::string& cause) const;
  // Nothing more is written, for this cause, unless for another one before.
  void GiveUp(const std::string& cause) { Fail(Failure(cause)); }

  // The writer's: writes what waits; and ends the file behind it. Both say if any write has failed.
  Status Write();
  Status Finish();

 private:
  Status Fail(const Status& failure);
  Status WriteWithinPages(const std::string& events);
  Status WriteEvents(const char* events, size_t size);
  Status Resize(int64_t capacity);

  const std::string path_;
  const int rank_;
  const std::string opening_;

  Mutex mutex_;
  std::string waiting_ RT_GUARDED_BY(mutex_);
  Status failure_ RT_GUARDED_BY(mutex_);

  // The writer's.
  int file_ = -1;
  int64_t capacity_ = 0;  // the file's size; it ends with the closing bracket
  int64_t used_ = 0;      // where the next event goes; spaces from here to the bracket
};

}  // namespace ringtrain
#endif  // RINGTRAIN_OBSERVE_TRACE_FILE_H_
