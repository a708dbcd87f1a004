#include "transport/rendezvous.h"

#include <sched.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <utility>

#include "base/bytes.h"
#include "base/ranks.h"

namespace ringtrain {
namespace {

// Backs off while polling: other ranks may need this core to get as far as we are.
class Patience {
 public:
  void Wait() {
    if (++polls_ < 50) {
      sched_yield();
      return;
    }
    timespec pause = {0, std::min(polls_, 100L) * 10000L};
    nanosleep(&pause, nullptr);
  }

 private:
  long polls_ = 0;
};

// Ranks with equal keys may share memory: same running kernel, same /dev/shm, same user.
std::string HostKey(const std::vector<int>& simulated, int rank) {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string key;
  std::getline(file, key);
  struct stat shared_memory;
  if (stat("/dev/shm", &shared_memory) == 0) key += ":" + std::to_string(shared_memory.st_dev);
  key += ":" + std::to_string(geteuid());
  int host = 0;
  for (size_t first = 0; !simulated.empty() && rank >= static_cast<int>(first) + simulated[host]; ++host)
    first += simulated[host];
  return key + ":" + std::to_string(host);
}

// Ok while all ranks are there.
Status CheckForLostPeer(Wire& wire) {
  LostPeer lost;
  if (!wire.TakeLostPeer(&lost)) return {};
  return Status::PeerLost("init: rank " + std::to_string(lost.rank) +
                          " must stay until all ranks have met, but the connection to it was lost: " + lost.cause +
                          ". Look for its error.");
}

Status Collect(Wire& wire, Nanoseconds deadline, std::vector<std::string>* all) {
  std::vector<bool> present(wire.size(), false);
  present[0] = true;
  Patience patience;
  for (int missing = wire.size() - 1; missing > 0;) {
    int from;
    std::string frame;
    bool arrived;
    RT_TRY(wire.ReceiveFrame(&from, &frame, &arrived));
    if (arrived && !present[from]) {
      present[from] = true;
      (*all)[from] = std::move(frame);
      --missing;
      continue;
    }
    if (!arrived) RT_TRY(CheckForLostPeer(wire));
    if (Now() > deadline) {
      std::vector<int> absent;
      for (int rank = 0; rank < wire.size(); ++rank)
        if (!present[rank]) absent.push_back(rank);
      return RanksMissing(wire.size(), absent);
    }
    patience.Wait();
  }
  return {};
}

Status ReceiveFromRoot(Wire& wire, Nanoseconds deadline, std::string* frame) {
  Patience patience;
  for (;;) {
    int from;
    bool arrived;
    RT_TRY(wire.ReceiveFrame(&from, frame, &arrived));
    if (arrived && from == 0) return {};
    if (!arrived) RT_TRY(CheckForLostPeer(wire));
    if (Now() > deadline)
      return Status::Timeout(
          "init: rank " + std::to_string(wire.rank()) +
          " timed out waiting for rank 0. All ranks must call init(); look for the error of the missing ones, or "
          "raise RINGTRAIN_START_TIMEOUT_SECONDS.");
    patience.Wait();
  }
}

Status Drain(Progress& progress, Nanoseconds deadline) {
  // Unfinished sends move only when the transport is called; the next phase may not call it again.
  Patience patience;
  while (progress.Busy() && !progress.RingsDoorbell()) {
    RT_TRY(progress.Drive());
    if (Now() > deadline) return Status::Timeout("init: frames could not be delivered in time.");
    patience.Wait();
  }
  return {};
}

class FrameRendezvous : public Rendezvous {
 public:
  FrameRendezvous(std::unique_ptr<Transport> transport, std::vector<int> simulated)
      : rank_(transport->rank()),
        size_(transport->size()),
        transport_(std::move(transport)),
        simulated_(std::move(simulated)) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  Status Allgather(const std::string& mine, Nanoseconds deadline, std::vector<std::string>* all) override;
  Status Meet(const WindowSize& window_size, Nanoseconds deadline, Meeting* meeting) override;

 private:
  const int rank_, size_;
  std::unique_ptr<Transport> transport_;  // until Meet
  const std::vector<int> simulated_;
};

Status FrameRendezvous::Allgather(const std::string& mine, Nanoseconds deadline, std::vector<std::string>* all) {
  Transport& transport = *transport_;
  all->assign(transport.size(), "");
  if (transport.rank() == 0) {
    (*all)[0] = mine;
    RT_TRY(Collect(transport, deadline, all));
    Encoder encoder;
    for (const std::string& text : *all) encoder.Text(text);
    std::string frame = encoder.Take();
    for (int rank = 1; rank < transport.size(); ++rank) RT_TRY(transport.SendFrame(rank, frame));
  } else {
    RT_TRY(transport.SendFrame(0, mine));
    std::string frame;
    RT_TRY(ReceiveFromRoot(transport, deadline, &frame));
    Decoder decoder(frame);
    for (std::string& text : *all) text = decoder.Text();
    if (!decoder.ok()) return Status::Internal("init: the answer of rank 0 cannot be read.");
  }
  return Drain(transport, deadline);
}

// Ranks share a host if they can open each other's memory. Those that cannot become hosts of their own.
Status FrameRendezvous::Meet(const WindowSize& window_size, Nanoseconds deadline, Meeting* meeting) {
  World* const world = &meeting->world;
  std::vector<std::string> keys;
  RT_TRY(Allgather(HostKey(simulated_, rank()), deadline, &keys));
  GroupByHost(keys, world);

  // The lowest rank of each host makes the memory and tells its name; the others try to open it.
  std::unique_ptr<PosixMemory> shared;
  Status status;
  Encoder announcement;
  bool leads = world->local_rank() == 0;
  if (leads && world->local_size() > 1) status = PosixMemory::Create(world->local_size(), window_size(*world), &shared);
  announcement.Text(shared ? shared->name() : "");
  announcement.Unsigned(shared ? shared->nonce() : 0);
  announcement.Unsigned(static_cast<uint64_t>(transport_->LongestRoundTrip() * 1e9));
  std::vector<std::string> announcements;
  RT_TRY(Allgather(announcement.Take(), deadline, &announcements));
  std::vector<Nanoseconds> round_trips;
  for (const std::string& theirs : announcements) {
    Decoder decoder(theirs);
    decoder.Text();
    decoder.Unsigned();
    round_trips.push_back(static_cast<Nanoseconds>(decoder.Unsigned()));
  }
  if (!leads) {
    Decoder decoder(announcements[world->my_host()[0]]);
    std::string name = decoder.Text();
    uint64_t nonce = decoder.Unsigned();
    status = name.empty() ? Status::Internal("its lowest rank could not create shared memory.")
                          : PosixMemory::Open(name, nonce, world->local_rank(), world->local_size(), &shared);
  }

  // One rank that cannot share is enough to part the whole host: all must know the same layout.
  std::vector<std::string> failures;
  RT_TRY(Allgather(status.message(), deadline, &failures));
  if (shared) shared->Unlink();
  for (const std::vector<int>& ranks : std::vector<std::vector<int>>(world->hosts))
    for (int failed : ranks)
      if (!failures[failed].empty()) {
        for (int rank : ranks) keys[rank] += ":alone:" + std::to_string(rank);
        if (ranks[0] == world->my_host()[0])
          meeting->Warning("ranks on this host use the network instead of shared memory: rank " +
                           std::to_string(failed) + ": " + failures[failed]);
        break;
      }
  GroupByHost(keys, world);
  world->TakeRoundTrips(round_trips);
  if (world->local_size() > 1 && shared == nullptr)  // this rank could not, and said so
    return Status::Internal("init: the answer of rank 0 cannot be read.");
  if (world->local_size() > 1)
    meeting->memory = std::move(shared);
  else
    meeting->memory = OpenProcessMemory(MakeProcessHost(1), 0);
  meeting->transport = std::move(transport_);
  return {};
}

}  // namespace

Status RanksMissing(int size, const std::vector<int>& absent) {
  return Status::Timeout("init: all " + std::to_string(size) + " ranks must call init(), but " + RanksText(absent) +
                         " did not in time. Look for their error, or raise RINGTRAIN_START_TIMEOUT_SECONDS.");
}

std::unique_ptr<Rendezvous> MeetByFrames(std::unique_ptr<Transport> transport, std::vector<int> simulated) {
  return std::make_unique<FrameRendezvous>(std::move(transport), std::move(simulated));
}

Status ParseLayout(const std::string& text, int size, std::vector<int>* layout) {
  layout->clear();
  if (text.empty()) {
    layout->push_back(size);
    return {};
  }
  int sum = 0;
  for (size_t begin = 0; begin <= text.size();) {
    size_t end = std::min(text.find_first_of("+|", begin), text.size());
    std::string field = text.substr(begin, end - begin);
    bool digits = !field.empty() && field.size() < 7 && field.find_first_not_of("0123456789") == std::string::npos;
    int ranks = digits ? std::stoi(field) : 0;
    if (ranks == 0) break;
    layout->push_back(ranks);
    sum += ranks;
    begin = end + 1;
    if (end == text.size() && sum == size) return {};
  }
  return Status::InvalidArgument("option host_layout: expected ranks per host that sum to " + std::to_string(size) +
                                 ", such as 2+2, but found '" + text + "'.");
}

std::string SiteInLayout(const std::string& text, int rank) {
  if (text.find('|') == std::string::npos) return "";
  int site = 0, before = 0;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find_first_of("+|", begin), text.size());
    before += std::atoi(text.c_str() + begin);
    if (rank < before) break;
    site += end < text.size() && text[end] == '|';
    begin = end + 1;
  }
  return std::to_string(site);
}

}  // namespace ringtrain
