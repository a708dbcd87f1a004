#include "run/context.h"

#include <algorithm>
#include <new>
#include <utility>

#include "observe/flight_record.h"
#include "run/admission.h"
#include "world/opening.h"
#include "world/placement.h"

namespace ringtrain {
namespace {

// A refusal as all ranks hear it, most of which have not made the mistake.
Status FoundOn(int rank, const Status& refusal) {
  const std::string named = "rank " + std::to_string(rank);
  const std::string& said = refusal.message();
  if (said.find(named + " could not") != std::string::npos) return refusal;
  return Status(refusal.code(), said + " Found on " + named + ".");
}

}  // namespace

// ---- opening ----

Status Context::Open(Rendezvous& rendezvous, const Options& options, std::shared_ptr<Context>* opened) {
  Meeting meeting;
  RT_TRY(OpenWorld(rendezvous, options, &meeting));
  return Open(options, std::move(meeting), opened);
}

Status Context::Open(const Options& options, Meeting meeting, std::shared_ptr<Context>* opened) {
  std::shared_ptr<Context> context(new Context(options, std::move(meeting)));
  const Status begun = context->Begin();
  if (begun.ok())
    *opened = std::move(context);
  else
    context->Abort(begun.message());  // the others may be in it by now: they hear why it ends
  return begun;
}

Status Context::Begin() {
  try {
    if (!options_.timeline.empty()) RT_TRY(StartTimeline(options_.timeline, options_.timeline_mark_cycles != 0));
    RT_TRY(FlightFile(options_, world().rank).Prepare());
    return driver_.Start(world().rank);
  } catch (const std::bad_alloc&) {
    return epoch_.loop().no_memory();
  }
}

Context::Context(const Options& options, Meeting meeting)
    : options_(options),
      devices_(options.cuda_lib),
      table_(static_cast<size_t>(options.flight_operations)),
      transport_(std::move(meeting.transport)),
      epoch_(std::move(meeting.world), std::move(meeting.memory), books_, *transport_),
      driver_(books_, *transport_, &epoch_) {
  for (const std::string& warning : meeting.warnings) log_.Warning(warning);
  transport_->SetLog(&log_);
}

Context::~Context() {
  try {
    Close();
  } catch (const std::bad_alloc&) {  // what its members do at their end is left
  }
}

// ---- operations ----

Status Context::Submit(std::shared_ptr<Submission> submission, const Status& refusal, bool caller_waits) {
  RT_TRY(table_.closed());
  const Request& request = submission->request;
  const int process_set = submission->process_set;
  const std::vector<int> members = epoch_.process_sets().Members(process_set);
  RT_TRY(CheckMembership(*submission, members, world().rank));
  const Admission admission(options_, world().rank, &epoch_.process_sets(), &table_, &devices_);
  Status status = refusal.ok() ? admission.Admit(members, submission.get()) : refusal;
  if (!status.ok()) {
    if (members.size() > 1) status = FoundOn(world().rank, status);
    if (!PointToPoint::Takes(request)) {
      table_.AddRefusal(process_set, {request.name, status.code(), status.message()});
      driver_.OnNews(false, true, 0);
    }
    return status;
  }
  submission->submitted = Now();
  if (PointToPoint::Takes(request)) {
    const std::shared_ptr<Handle> handle = submission->handle;
    RT_TRY(table_.Add(std::move(submission)));
    driver_.TryNews(*handle, caller_waits);
    return {};
  }
  const bool calls_back = submission->done != nullptr;
  const int64_t bytes = static_cast<int64_t>(request.bytes());
  RT_TRY(table_.Add(std::move(submission)));
  driver_.OnNews(caller_waits, calls_back, bytes);
  return {};
}

Status Context::AllocateOn(int device, size_t bytes, void** memory) {
  std::shared_ptr<Device> found;
  RT_TRY(devices_.Find(device, &found));
  return found->Allocate(bytes, memory);
}

Status Context::ReadFrom(int device, void* stream, const void* from, size_t bytes, void* to) {
  std::shared_ptr<Device> found;
  RT_TRY(devices_.Find(device, &found));
  return found->Read(static_cast<CUstream>(stream), from, bytes, to);
}

int Context::ProcessSetHosts(int process_set) const {
  const std::vector<int> members = ProcessSetRanks(process_set);
  return members.empty() ? 0 : TopologyFor(world(), options_, members).host_count();
}

// ---- ending ----

void Context::Abort(const std::string& cause) {
  epoch_.loop().RequestAbort(cause);
  driver_.Call();
}

void Context::LongPhase(double seconds) {
  epoch_.loop().RequestLongPhase(static_cast<Nanoseconds>(std::max(0.0, seconds) * 1e9));
  driver_.Call();
}

Status Context::Close(double seconds) {
  MutexLock once(close_mutex_);
  if (closed_) return {};
  const Status last =
      Status::Closed("rank " + std::to_string(world().rank) + " has called shutdown(); call init() to start again.");
  closed_ = true;  // from here on it cannot be tried again
  const Nanoseconds deadline = driver_.Leave(DeadlineAfter(seconds));
  try {
    return CloseBehindDriver(deadline, last);
  } catch (const std::bad_alloc&) {
    table_.Close(last);
    return Status::NoMemory();
  }
}

Status Context::CloseBehindDriver(Nanoseconds deadline, const Status& last) {
  Status ended;
  driver_.WhileNobodyDrives([&](const RankLoop& loop) {
    const double remaining = std::max<double>(0, static_cast<double>(deadline - Now()) / 1e9);
    transport_->Close(loop.closed_cleanly(), remaining);
    ended = table_.closed();
    // Only now may the tensors go back to their owners: nothing moves any more.
    table_.Close(last);
    timeline_.Stop();
  });
  const std::string unwritten = writer_.Await(kFilePatience);
  if (!unwritten.empty())
    log_.Warning("shutdown: " + unwritten + " must be written by now, but is not after " +
                 std::to_string(static_cast<int>(kFilePatience)) +
                 " s. Look whether its file system hangs, or who reads this process's stderr.");
  return ended.code() == StatusCode::kClosed ? Status() : ended;
}

// ---- timeline ----

// Rank 0's file has the name that was given, as where one rank writes for all; the others' have their numbers behind
// it.
Status Context::StartTimeline(const std::string& path, bool mark_cycles) {
  std::string file = path;
  const std::string rank = std::to_string(world().rank);
  const size_t place = file.find("{rank}");
  if (place != std::string::npos)
    file.replace(place, 6, rank);
  else if (world().rank > 0)
    file += "." + rank;
  return timeline_.Start(file, world().rank, options_.timeline_events, mark_cycles,
                         world().host_names[static_cast<size_t>(world().rank)]);
}

std::string Context::FlightRecord() const {
  return FlightRecordText(world(), epoch_.process_sets().All(), table_.Flown(), "");
}

Status Context::StopTimeline() { return timeline_.Stop(); }

}  // namespace ringtrain
