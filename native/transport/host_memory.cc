#include "transport/host_memory.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>

#include "base/mutex.h"

namespace ringtrain {
namespace {

// Windows lie in the file by process set, far apart: the file is sparse, so distance costs nothing and nobody has to
// agree on it.
constexpr size_t kWindowSpacing = size_t{1} << 31;

constexpr size_t kCounterBytes = 64;  // behind a window

constexpr size_t kPage = 4096;
size_t RoundToPages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

size_t WindowOffset(int process_set) { return (static_cast<size_t>(process_set) + 1) * kWindowSpacing; }

Status SystemError(const std::string& what) { return Status::Internal(what + ": " + strerror(errno) + "."); }

}  // namespace

// ---- within one process ----

class ProcessHost {
 public:
  explicit ProcessHost(int local_size) : local_size_(local_size), control_(Zeroed(HostControl::Bytes(local_size))) {}

  int local_size() const { return local_size_; }
  char* control() { return control_.get(); }

  char* Map(int process_set, int participants, size_t bytes) {
    MutexLock lock(mutex_);
    Shared& window = windows_[process_set];
    if (!window.memory) window = {Zeroed(bytes), participants};
    return window.memory.get();
  }

  // The memory stays until all participants have come and gone: a late one must find what the early ones wrote.
  void Unmap(int process_set) {
    MutexLock lock(mutex_);
    auto window = windows_.find(process_set);
    if (window != windows_.end() && --window->second.participants == 0) windows_.erase(window);
  }

 private:
  struct Free {
    void operator()(char* memory) const { munmap(memory - kPage, *reinterpret_cast<size_t*>(memory - kPage)); }
  };
  using Memory = std::unique_ptr<char, Free>;

  // Page-aligned zeros that cost nothing until touched; the page before holds the length for munmap.
  static Memory Zeroed(size_t bytes) {
    size_t length = RoundToPages(bytes) + kPage;
    void* memory = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    *static_cast<size_t*>(memory) = length;
    return Memory(static_cast<char*>(memory) + kPage);
  }

  struct Shared {
    Memory memory;
    int participants = 0;  // that have not gone yet
  };

  const int local_size_;
  const Memory control_;
  Mutex mutex_;
  std::map<int, Shared> windows_ RT_GUARDED_BY(mutex_);
};

namespace {

class ProcessMemory : public HostMemory {
 public:
  ProcessMemory(std::shared_ptr<ProcessHost> host, int local_rank)
      : HostMemory(local_rank, host->local_size()), host_(std::move(host)) {
    control_ = reinterpret_cast<HostControl*>(host_->control());
  }
  Status MapWindow(int process_set, int participants, size_t bytes, char** memory) override {
    *memory = host_->Map(process_set, participants, bytes);
    return {};
  }
  void UnmapWindow(int process_set) override { host_->Unmap(process_set); }

 private:
  const std::shared_ptr<ProcessHost> host_;
};

}  // namespace

std::shared_ptr<ProcessHost> MakeProcessHost(int local_size) { return std::make_shared<ProcessHost>(local_size); }

std::unique_ptr<HostMemory> OpenProcessMemory(std::shared_ptr<ProcessHost> host, int local_rank) {
  return std::make_unique<ProcessMemory>(std::move(host), local_rank);
}

// ---- between processes ----

// The file gets its name last: if this process is killed before, nothing is left. Where the file system cannot do that,
// a name without a size may be.
Status PosixMemory::Create(int local_size, size_t world_window_bytes, std::unique_ptr<PosixMemory>* memory) {
  if (Create(local_size, world_window_bytes, false, memory).ok()) return {};
  return Create(local_size, world_window_bytes, true, memory);
}

Status PosixMemory::Create(int local_size, size_t world_window_bytes, bool named_at_once,
                           std::unique_ptr<PosixMemory>* memory) {
  uint64_t random[2];
  if (getrandom(random, sizeof random, 0) != sizeof random) return SystemError("getrandom");
  std::unique_ptr<PosixMemory> made(new PosixMemory(0, local_size));
  char name[64];
  snprintf(name, sizeof name, "/ringtrain-%016llx", static_cast<unsigned long long>(random[0]));
  made->name_ = name;
  made->file_ = named_at_once ? shm_open(name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600)
                              : open("/dev/shm", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (made->file_ < 0) return SystemError(std::string("shared memory ") + name + " cannot be created");
  made->linked_ = named_at_once;
  // Held until this process ends, and from before the file has a size. So whoever finds a name without a lock knows
  // that its creator was killed before it could remove it.
  if (flock(made->file_, LOCK_SH) != 0) return SystemError("flock of shared memory");
  RT_TRY(made->Reserve(0, HostControl::Bytes(local_size)));
  if (local_size > 1) RT_TRY(made->Reserve(WindowOffset(0), world_window_bytes + kCounterBytes));
  RT_TRY(made->MapControl());
  made->control_->nonce.store(random[1]);
  made->control_->place(0).process.Write();
  if (!made->linked_) RT_TRY(made->Link());
  *memory = std::move(made);
  return {};
}

Status PosixMemory::Link() {
  const std::string file = "/proc/self/fd/" + std::to_string(file_), name = "/dev/shm" + name_;
  linked_ = linkat(AT_FDCWD, file.c_str(), AT_FDCWD, name.c_str(), AT_SYMLINK_FOLLOW) == 0;
  return linked_ ? Status() : SystemError("linkat of shared memory");
}

Status PosixMemory::Open(const std::string& name, uint64_t nonce, int local_rank, int local_size,
                         std::unique_ptr<PosixMemory>* memory) {
  std::unique_ptr<PosixMemory> opened(new PosixMemory(local_rank, local_size));
  opened->name_ = name;
  opened->file_ = shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0600);
  if (opened->file_ < 0) return SystemError("shared memory " + name + " cannot be opened");
  struct stat information;
  if (fstat(opened->file_, &information) != 0) return SystemError("fstat");
  if (information.st_uid != geteuid() || static_cast<size_t>(information.st_size) < HostControl::Bytes(local_size))
    return Status::Internal("shared memory " + name + " is not ours.");
  RT_TRY(opened->MapControl());
  if (opened->nonce() != nonce) return Status::Internal("shared memory " + name + " belongs to another host.");
  opened->control_->place(local_rank).process.Write();
  *memory = std::move(opened);
  return {};
}

PosixMemory::~PosixMemory() {
  for (auto& window : windows_) munmap(window.second.memory, window.second.bytes);
  if (control_ != nullptr) munmap(control_, control_bytes_);
  if (file_ >= 0) close(file_);
  Unlink();
}

void PosixMemory::Unlink() {
  if (!linked_) return;
  shm_unlink(name_.c_str());
  linked_ = false;
}

Status PosixMemory::MapControl() {
  control_bytes_ = RoundToPages(HostControl::Bytes(local_size()));
  void* memory = mmap(nullptr, control_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
  if (memory == MAP_FAILED) return SystemError("mmap of shared memory");
  control_ = static_cast<HostControl*>(memory);
  return {};
}

bool PosixMemory::HasEnded(int local_rank) {
  if (peers_.empty())
    for (int peer = 0; peer < local_size(); ++peer)
      peers_.push_back(std::make_unique<PeerProcess>(control_->place(peer).process));
  return peers_[local_rank]->HasEnded();
}

// Reserved, not merely promised: a write into an overcommitted segment would end the process with SIGBUS.
Status PosixMemory::Reserve(size_t offset, size_t bytes) {
  int error;
  do error = posix_fallocate(file_, static_cast<off_t>(offset), static_cast<off_t>(RoundToPages(bytes)));
  while (error == EINTR);
  if (error == 0) return {};
  return Status::Internal("shared memory: " + std::to_string(bytes >> 10) + " KiB cannot be reserved in /dev/shm (" +
                          strerror(error) +
                          "). Enlarge /dev/shm, lower RINGTRAIN_SHARED_MEMORY_BYTES, or set RINGTRAIN_ALGORITHM=ring.");
}

std::atomic<uint32_t>& PosixMemory::Window::done() const {
  return *reinterpret_cast<std::atomic<uint32_t>*>(memory + bytes - kCounterBytes);
}

Status PosixMemory::MapWindow(int process_set, int participants, size_t bytes, char** memory) {
  const size_t length = RoundToPages(bytes + kCounterBytes);
  RT_TRY(Reserve(WindowOffset(process_set), length));
  void* mapped =
      mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED, file_, static_cast<off_t>(WindowOffset(process_set)));
  if (mapped == MAP_FAILED)
    return Status::Internal("shared memory: " + std::to_string(length >> 10) + " KiB cannot be mapped (" +
                            strerror(errno) +
                            "). Raise the limits of the address space (ulimit -v) and of mappings (vm.max_map_count), "
                            "or set RINGTRAIN_ALGORITHM=ring.");
  windows_[process_set] = {static_cast<char*>(mapped), length, static_cast<uint32_t>(participants)};
  *memory = static_cast<char*>(mapped);
  return {};
}

void PosixMemory::UnmapWindow(int process_set) {
  auto window = windows_.find(process_set);
  if (window == windows_.end()) return;
  const bool last = window->second.done().fetch_add(1) + 1 == window->second.participants;
  munmap(window->second.memory, window->second.bytes);
  if (last)
    fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(WindowOffset(process_set)),
              static_cast<off_t>(window->second.bytes));
  windows_.erase(window);
}

}  // namespace ringtrain
