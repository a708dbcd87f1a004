// Memory of the fake devices: who owns an address, and where a stream's thread finds the bytes.
//
// Device memory has two mappings. The address that is handed out cannot be touched, as a host cannot touch a GPU's
// memory; streams work through the other one. New memory is filled with 0xA5. Freed memory keeps its address for ever,
// so that any later use is seen. Pinned host memory has one mapping for both.
#ifndef RINGTRAIN_TESTS_FAKES_CUDA_MEMORY_H_
#define RINGTRAIN_TESTS_FAKES_CUDA_MEMORY_H_

#include <cstddef>
#include <cstdint>

namespace fakes {

constexpr int kHostMemory = -1;  // in the place of a device: pinned or registered
constexpr uint8_t kPoison = 0xA5;

struct Place {
  bool known;  // false: memory that the driver never saw, or that was freed
  int device;
  uint64_t start;
  size_t bytes;
};

// 0 if there is not as much memory left on the device as FAKE_MEMORY allows.
uint64_t AllocateMemory(int device, size_t bytes);
// False if no allocation starts there. Freeing what a stream uses at the moment is a violation.
bool FreeMemory(uint64_t start, bool host);
// Host memory of the user's own; false if it is registered already, or not registered.
bool RegisterMemory(void* start, size_t bytes);
bool UnregisterMemory(void* start);

// Where an address lies.
Place FindMemory(uint64_t address);
// For a stream's thread: the address of the bytes to work on. Memory that is freed, too short or unknown is a
// violation.
void* UseMemory(uint64_t address, size_t bytes, const char* user);
void ReleaseMemory(uint64_t address);
// Bytes and allocations that are not freed, host and device.
size_t LiveBytes(int device);
long LiveAllocations();
bool InUse(uint64_t address);  // by a stream at the moment

}  // namespace fakes
#endif  // RINGTRAIN_TESTS_FAKES_CUDA_MEMORY_H_
