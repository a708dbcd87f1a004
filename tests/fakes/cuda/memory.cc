// Compiled without ThreadSanitizer in every variant: the lock here would order streams that CUDA does not order.
#include "cuda/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <map>

#include "strict.h"

namespace fakes {
namespace {

struct Allocation {
  size_t bytes = 0;
  int device = kHostMemory;
  char* alias = nullptr;  // where streams reach it; the address itself for host memory
  bool registered = false;
  bool freed = false;
  int users = 0;
};

char lock_word = 0;
std::map<uint64_t, Allocation>& Allocations() {
  static auto* allocations = new std::map<uint64_t, Allocation>;
  return *allocations;
}

struct Locked {
  Locked() {
    while (__atomic_test_and_set(&lock_word, __ATOMIC_ACQUIRE)) usleep(0);
  }
  ~Locked() { __atomic_clear(&lock_word, __ATOMIC_RELEASE); }
};

size_t WholePages(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

void* Map(size_t bytes, int protection, int flags, int file) {
  void* mapped = mmap(nullptr, bytes, protection, flags, file, 0);
  if (mapped == MAP_FAILED) Violation("no address space for %zu bytes", bytes);
  return mapped;
}

// The address to hand out; *alias is where the bytes are.
uint64_t MapDeviceMemory(size_t bytes, char** alias) {
  const int file = memfd_create("fake device memory", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) Violation("no memory for %zu bytes", bytes);
  *alias = static_cast<char*>(Map(bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file));
  void* address = Map(bytes, PROT_NONE, MAP_SHARED, file);
  close(file);
  return reinterpret_cast<uint64_t>(address);
}

// The allocation that an address belongs to, freed or not; nullptr if there never was one.
std::pair<const uint64_t, Allocation>* Owner(uint64_t address) {
  auto after = Allocations().upper_bound(address);
  if (after == Allocations().begin()) return nullptr;
  auto& candidate = *std::prev(after);
  return address < candidate.first + std::max<size_t>(candidate.second.bytes, 1) ? &candidate : nullptr;
}

size_t LiveBytesLocked(int device) {
  size_t sum = 0;
  for (const auto& [start, allocation] : Allocations())
    if (!allocation.freed && allocation.device == device) sum += allocation.bytes;
  return sum;
}

void GiveBack(uint64_t start, const Allocation& allocation) {
  // The address stays taken: another mapping there would hide that somebody still uses it.
  const size_t bytes = WholePages(allocation.bytes);
  mmap(reinterpret_cast<void*>(start), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1,
       0);
  if (allocation.device != kHostMemory) munmap(allocation.alias, bytes);
}

}  // namespace

uint64_t AllocateMemory(int device, size_t bytes) {
  const size_t whole = WholePages(bytes);
  const size_t limit = static_cast<size_t>(Number("FAKE_MEMORY", 1L << 34));
  Locked locked;
  if (device != kHostMemory && LiveBytesLocked(device) + bytes > limit) return 0;
  Allocation allocation;
  allocation.bytes = bytes;
  allocation.device = device;
  uint64_t start = 0;
  if (device == kHostMemory) {
    allocation.alias = static_cast<char*>(Map(whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1));
    start = reinterpret_cast<uint64_t>(allocation.alias);
  } else {
    start = MapDeviceMemory(whole, &allocation.alias);
  }
  std::memset(allocation.alias, kPoison, whole);
  Allocations()[start] = allocation;
  return start;
}

bool FreeMemory(uint64_t start, bool host) {
  Locked locked;
  auto found = Allocations().find(start);
  if (found == Allocations().end() || (found->second.device == kHostMemory) != host || found->second.registered)
    return false;
  Allocation& allocation = found->second;
  if (allocation.freed) Violation("memory at %#lx is freed twice", start);
  if (allocation.users > 0) Violation("memory at %#lx is freed while a stream uses it", start);
  allocation.freed = true;
  GiveBack(start, allocation);
  return true;
}

bool RegisterMemory(void* memory, size_t bytes) {
  const uint64_t start = reinterpret_cast<uint64_t>(memory);
  Locked locked;
  const auto* owner = Owner(start);
  if (owner != nullptr && !owner->second.freed) return false;
  Allocation allocation;
  allocation.bytes = bytes;
  allocation.alias = static_cast<char*>(memory);
  allocation.registered = true;
  Allocations()[start] = allocation;
  return true;
}

bool UnregisterMemory(void* memory) {
  Locked locked;
  auto found = Allocations().find(reinterpret_cast<uint64_t>(memory));
  if (found == Allocations().end() || !found->second.registered) return false;
  if (found->second.users > 0) Violation("memory at %p is unregistered while a stream uses it", memory);
  Allocations().erase(found);
  return true;
}

Place FindMemory(uint64_t address) {
  Locked locked;
  const auto* owner = Owner(address);
  if (owner == nullptr || owner->second.freed) return {false, kHostMemory, 0, 0};
  return {true, owner->second.device, owner->first, owner->second.bytes};
}

void* UseMemory(uint64_t address, size_t bytes, const char* user) {
  Locked locked;
  auto* owner = Owner(address);
  if (owner == nullptr) Violation("%s uses %#lx, which is not memory of a device nor pinned", user, address);
  Allocation& allocation = owner->second;
  if (allocation.freed) Violation("%s uses %#lx, which was freed", user, address);
  if (address + bytes > owner->first + allocation.bytes)
    Violation("%s uses %zu bytes at %#lx, which end %#lx after %zu bytes", user, bytes, address, owner->first,
              allocation.bytes);
  ++allocation.users;
  return allocation.alias + (address - owner->first);
}

void ReleaseMemory(uint64_t address) {
  Locked locked;
  if (auto* owner = Owner(address)) --owner->second.users;
}

size_t LiveBytes(int device) {
  Locked locked;
  return LiveBytesLocked(device);
}

bool InUse(uint64_t address) {
  Locked locked;
  const auto* owner = Owner(address);
  return owner != nullptr && owner->second.users > 0;
}

long LiveAllocations() {
  Locked locked;
  long live = 0;
  for (const auto& [start, allocation] : Allocations()) live += allocation.freed ? 0 : 1;
  return live;
}

}  // namespace fakes
