// FlightRecord: what a rank leaves behind for `ringtrain flight`: who it is, why it writes, and its last operations
// (flight.h), as JSON that ringtrain/_runtime/flight_recorder.py reads.
#ifndef RINGTRAIN_OBSERVE_FLIGHT_RECORD_H_
#define RINGTRAIN_OBSERVE_FLIGHT_RECORD_H_

#include <map>
#include <string>
#include <vector>

#include "base/log.h"
#include "base/options.h"
#include "base/status.h"
#include "base/writer.h"
#include "observe/flight.h"
#include "transport/world.h"

namespace ringtrain {

// process_sets: the members of each. because: why it is written, "" if somebody asked. Any thread.
std::string FlightRecordText(const World& world, const std::map<int, std::vector<int>>& process_sets,
                             const std::vector<FlownOperation>& operations, const std::string& because);

// The file of option flight_record, which each record replaces as a whole.
class FlightFile {
 public:
  FlightFile(const Options& options, int rank);

  bool wanted() const { return !path_.empty(); }
  // Makes the folder, and says if files cannot be written there.
  Status Prepare() const;
  // Has it written; a failure is a warning. One that still waits is replaced.
  void Write(std::string text, Writer* writer, Log* log) const;

 private:
  std::string folder_, path_;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_OBSERVE_FLIGHT_RECORD_H_
