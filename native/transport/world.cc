#include "transport/world.h"

#include <sched.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <map>

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
  for (size_t first = 0; !simulated.empty() && rank >= static_cast<int>(first) + simulated[host]; ++host) first += simulated[host];
  return key + ":" + std::to_string(host);
}

Status Collect(Transport& transport, Nanoseconds deadline, std::vector<std::string>* all) {
  std::vector<bool> present(transport.size(), false);
  present[0] = true;
  Patience patience;
  for (int missing = transport.size() - 1; missing > 0;) {
    int from;
    std::string frame;
    bool arrived;
    RT_TRY(transport.ReceiveFrame(&from, &frame, &arrived));
    if (arrived && !present[from]) {
      present[from] = true;
      (*all)[from] = std::move(frame);
      --missing;
      continue;
    }
    if (Now() > deadline) {
      std::vector<int> absent;
      for (int rank = 0; rank < transport.size(); ++rank)
        if (!present[rank]) absent.push_back(rank);
      return Status::Timeout("init: all " + std::to_string(transport.size()) + " ranks must call init(), but " + RanksText(absent) +
                             " did not in time. Look for their error, or raise RINGTRAIN_START_TIMEOUT_SECONDS.");
    }
    patience.Wait();
  }
  return {};
}

Status ReceiveFromRoot(Transport& transport, Nanoseconds deadline, std::string* frame) {
  Patience patience;
  for (;;) {
    int from;
    bool arrived;
    RT_TRY(transport.ReceiveFrame(&from, frame, &arrived));
    if (arrived && from == 0) return {};
    if (Now() > deadline)
      return Status::Timeout("init: rank " + std::to_string(transport.rank()) +
                             " waited in vain for rank 0. All ranks must call init(); look for the error of the missing ones, or "
                             "raise RINGTRAIN_START_TIMEOUT_SECONDS.");
    patience.Wait();
  }
}

Status Drain(Transport& transport, Nanoseconds deadline) {
  // Unfinished sends move only when the transport is called; the next phase may not call it again.
  Patience patience;
  while (transport.Busy() && !transport.RingsDoorbell()) {
    RT_TRY(transport.Drive());
    if (Now() > deadline) return Status::Timeout("init: frames could not be delivered in time.");
    patience.Wait();
  }
  return {};
}

}  // namespace

int World::cross_size() const {
  return static_cast<int>(std::count_if(hosts.begin(), hosts.end(), [this](const std::vector<int>& ranks) {
    return static_cast<int>(ranks.size()) > local_rank();
  }));
}

int World::cross_rank() const {
  return static_cast<int>(std::count_if(hosts.begin(), hosts.begin() + host_of[rank], [this](const std::vector<int>& ranks) {
    return static_cast<int>(ranks.size()) > local_rank();
  }));
}

bool World::homogeneous() const {
  return std::all_of(hosts.begin(), hosts.end(),
                     [this](const std::vector<int>& ranks) { return ranks.size() == hosts[0].size(); });
}

void GroupByHost(const std::vector<std::string>& keys, World* world) {
  std::map<std::string, int> host_of_key;
  world->hosts.clear();
  world->host_of.clear();
  world->local_rank_of.clear();
  for (size_t rank = 0; rank < keys.size(); ++rank) {
    auto found = host_of_key.emplace(keys[rank], static_cast<int>(world->hosts.size()));
    if (found.second) world->hosts.emplace_back();
    std::vector<int>& ranks = world->hosts[found.first->second];
    world->host_of.push_back(found.first->second);
    world->local_rank_of.push_back(static_cast<int>(ranks.size()));
    ranks.push_back(static_cast<int>(rank));
  }
}

Status AllgatherTexts(Transport& transport, const std::string& mine, Nanoseconds deadline, std::vector<std::string>* all) {
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

Status MeetOnHosts(Transport& transport, const std::vector<int>& simulated, const WindowSize& window_size, Nanoseconds deadline,
                   Log* log, World* world, std::unique_ptr<HostMemory>* memory) {
  std::vector<std::string> keys;
  RT_TRY(AllgatherTexts(transport, HostKey(simulated, transport.rank()), deadline, &keys));
  GroupByHost(keys, world);

  // The lowest rank of each host makes the memory and tells its name; the others try to open it.
  std::unique_ptr<PosixMemory> shared;
  Status status;
  Encoder announcement;
  bool leads = world->local_rank() == 0;
  if (leads && world->local_size() > 1) status = PosixMemory::Create(world->local_size(), window_size(*world), &shared);
  announcement.Text(shared ? shared->name() : "");
  announcement.Unsigned(shared ? shared->nonce() : 0);
  std::vector<std::string> announcements;
  RT_TRY(AllgatherTexts(transport, announcement.Take(), deadline, &announcements));
  if (!leads) {
    Decoder decoder(announcements[world->my_host()[0]]);
    std::string name = decoder.Text();
    uint64_t nonce = decoder.Unsigned();
    status = name.empty() ? Status::Internal("its lowest rank could not create shared memory.")
                          : PosixMemory::Open(name, nonce, world->local_rank(), world->local_size(), &shared);
  }

  // One rank that cannot share is enough to part the whole host: all must know the same layout.
  std::vector<std::string> failures;
  RT_TRY(AllgatherTexts(transport, status.message(), deadline, &failures));
  if (shared) shared->Unlink();
  for (const std::vector<int>& ranks : std::vector<std::vector<int>>(world->hosts))
    for (int failed : ranks)
      if (!failures[failed].empty()) {
        for (int rank : ranks) keys[rank] += ":alone:" + std::to_string(rank);
        if (ranks[0] == world->my_host()[0])
          log->Warning("ranks on this host use MPI instead of shared memory: rank " + std::to_string(failed) + ": " + failures[failed]);
        break;
      }
  GroupByHost(keys, world);
  if (world->local_size() > 1 && shared == nullptr)  // this rank could not, and said so
    return Status::Internal("init: the answer of rank 0 cannot be read.");
  if (world->local_size() > 1)
    *memory = std::move(shared);
  else
    *memory = OpenProcessMemory(MakeProcessHost(1), 0);
  return {};
}

}  // namespace ringtrain
