#include "observe/flight_record.h"

#include <errno.h>
#include <time.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <system_error>
#include <utility>

#include "base/decimal.h"
#include "base/json_text.h"
#include "base/patient_files.h"

namespace ringtrain {
namespace {

constexpr int kFormat = 2;  // flight_recorder.py refuses another one
constexpr size_t kLongestCause = 4000;
constexpr size_t kLongestName = 1000;

// base/clock.h's time as seconds since 1970, so that ranks of several hosts can be compared.
class WallClock {
 public:
  WallClock() {
    timespec wall;
    clock_gettime(CLOCK_REALTIME, &wall);
    offset_ = wall.tv_sec * kSecond + wall.tv_nsec - Now();
  }
  std::string Text(Nanoseconds time) const {
    if (time == 0) return "null";
    return Decimal("%.6f", static_cast<double>(time + offset_) / 1e9);
  }

 private:
  Nanoseconds offset_;
};

std::string ShapeText(const FlownOperation& operation) {
  std::string text = "[";
  const int known = std::min(operation.dimensions, FlownOperation::kExtents);
  for (int i = 0; i < known; ++i) text += (i > 0 ? "," : "") + std::to_string(operation.extents[i]);
  for (int i = known; i < operation.dimensions; ++i) text += ",null";
  return text + "]";
}

std::string Member(const char* name, const std::string& value) { return "\"" + std::string(name) + "\":" + value; }
std::string Member(const char* name, int64_t value) { return Member(name, std::to_string(value)); }
std::string InQuotes(const char* text) { return "\"" + std::string(text) + "\""; }

std::string OperationText(const FlownOperation& operation, const WallClock& clock) {
  const OperationRow& kind = *Find(operation.operation);
  const bool has_data = operation.tensors > 0;
  return "{" + Member("number", static_cast<int64_t>(operation.number)) + "," +
         Member("process_set", operation.process_set) + "," + Member("agreed", static_cast<int64_t>(operation.agreed)) +
         "," + Member("operation", InQuotes(kind.text)) + "," + Member("name", Quoted(operation.name, kLongestName)) +
         "," + Member("dtype", has_data ? InQuotes(Text(operation.dtype)) : "null") + "," +
         Member("shape", ShapeText(operation)) + "," + Member("tensors", operation.tensors) + "," +
         Member("bytes", operation.bytes) + "," +
         Member("reduction", kind.reduces ? InQuotes(Text(operation.reduction)) : "null") + "," +
         Member("root", kind.rooted ? std::to_string(operation.root) : "null") + "," +
         Member("submitted", clock.Text(operation.submitted)) + "," +
         Member("announced", clock.Text(operation.announced)) + "," + Member("started", clock.Text(operation.started)) +
         "," + Member("finished", clock.Text(operation.finished)) + "," +
         Member("status", InQuotes(Text(operation.status))) + "}";
}

std::string RanksList(const std::vector<int>& ranks) {
  std::string text = "[";
  for (size_t i = 0; i < ranks.size(); ++i) text += (i > 0 ? "," : "") + std::to_string(ranks[i]);
  return text + "]";
}

// Of all ranks, so that a record tells where those are that have left none.
std::string HostsText(const std::vector<std::string>& names) {
  std::map<std::string, std::vector<int>> ranks;
  for (size_t rank = 0; rank < names.size(); ++rank) ranks[names[rank]].push_back(static_cast<int>(rank));
  std::string text;
  for (const auto& [name, own] : ranks)
    text += (text.empty() ? "" : ",") + Quoted(name, kLongestName) + ":" + RanksList(own);
  return "{" + text + "}";
}

Status Failure(const std::string& path, const std::string& why) {
  return Status::InvalidArgument("flight record '" + path + "': it must be written there, but " + why +
                                 ". Let flight_record name a folder that this rank may write to.");
}

}  // namespace

std::string FlightRecordText(const World& world, const std::map<int, std::vector<int>>& process_sets,
                             const std::vector<FlownOperation>& operations, const std::string& because) {
  const WallClock clock;
  std::string text = "{" + Member("format", kFormat) + "," + Member("world", world.epoch) + "," +
                     Member("rank", world.rank) + "," + Member("size", world.size) + ",\n" +
                     Member("host", Quoted(world.host_names[static_cast<size_t>(world.rank)], kLongestName)) + "," +
                     Member("hosts", HostsText(world.host_names)) + "," + Member("process", getpid()) + "," +
                     Member("written", clock.Text(Now())) + ",\n" + Member("because", Quoted(because, kLongestCause)) +
                     ",\n\"process_sets\":{";
  const char* separator = "";
  for (const auto& [process_set, members] : process_sets) {
    text += separator + InQuotes(std::to_string(process_set).c_str()) + ":" + RanksList(members);
    separator = ",";
  }
  text += "},\n\"operations\":[";
  separator = "\n";
  for (const FlownOperation& operation : operations) {
    text += separator + OperationText(operation, clock);
    separator = ",\n";
  }
  return text + "\n]}\n";
}

FlightFile::FlightFile(const Options& options, int rank)
    : folder_(options.flight_record),
      path_(folder_.empty() ? "" : folder_ + "/flight." + std::to_string(rank) + ".json") {}

Status FlightFile::Prepare() const {
  if (!wanted()) return {};
  std::error_code error;
  std::filesystem::create_directories(folder_, error);
  if (error) return Failure(path_, error.message());
  if (access(folder_.c_str(), W_OK | X_OK) != 0) return Failure(path_, std::strerror(errno));
  return {};
}

void FlightFile::Write(std::string text, Writer* writer, Log* log) const {
  writer->Do(
      "flight record '" + path_ + "'", [path = path_, text = std::move(text)] { return ReplaceFile(path, text); },
      [path = path_, log](const std::string& why) { log->Warning(Failure(path, why).message()); });
}

}  // namespace ringtrain
