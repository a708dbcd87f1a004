// A rank's device against tests/fakes: the memory that it keeps, whose memory it knows, and events of a GPU that fails.
#include "device/device.h"

#include <dlfcn.h>
#include <limits.h>
#include <unistd.h>

#include <cstdlib>
#include <vector>

#include "base/clock.h"
#include "check.h"
#include "run/submission.h"

namespace ringtrain {
namespace {

std::string Library() {
  char path[PATH_MAX] = "";
  const ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1);
  const std::string program(path, length > 0 ? static_cast<size_t>(length) : 0);
  return program.substr(0, program.rfind('/')) + "/fakes/libcuda.so.1";
}

template <typename Function>
Function OfFake(const char* name) {
  void* const found = dlsym(dlopen(Library().c_str(), RTLD_NOW), name);
  RT_REQUIRE(found != nullptr);
  return reinterpret_cast<Function>(found);
}

std::shared_ptr<Device> FirstDevice() {
  unsetenv("CUDA_VISIBLE_DEVICES");
  DeviceTable table(Library());
  std::shared_ptr<Device> device;
  RT_REQUIRE_OK(table.Find(0, &device));
  return device;
}

size_t Granted(Device& device, size_t bytes) {
  void* memory;
  size_t granted;
  RT_REQUIRE_OK(device.TakePinned(bytes, &memory, &granted));
  device.GivePinned(memory, granted);
  return granted;
}

}  // namespace

RT_TEST(pinned_memory_is_little_larger_than_asked_for) {
  const std::shared_ptr<Device> device = FirstDevice();
  InContext current(*device);
  for (size_t bytes : {size_t{1}, size_t{65536}, size_t{65537}, size_t{1} << 20, (size_t{1} << 20) + 1, size_t{5} << 20,
                       (size_t{33} << 20) + 7}) {
    const size_t granted = Granted(*device, bytes);
    RT_CHECK(granted >= bytes && granted <= bytes + bytes / 8 + 65536);
    RT_CHECK_EQ(Granted(*device, granted), granted);
  }
}

RT_TEST(pinned_memory_that_nobody_takes_any_more_goes_back) {
  const std::shared_ptr<Device> device = FirstDevice();
  InContext current(*device);
  const auto calls = OfFake<long (*)(const char*)>("fake_cuda_calls");
  const long freed = calls("cuMemFreeHost"), allocated = calls("cuMemHostAlloc");
  Granted(*device, size_t{100} << 20);
  Granted(*device, size_t{32} << 20);
  for (int take = 0; take < 6000; ++take) Granted(*device, 1 << 20);
  RT_CHECK_EQ(calls("cuMemFreeHost") - freed, 1L);  // a little may stay
  RT_CHECK_EQ(calls("cuMemHostAlloc") - allocated, 3L);
}

RT_TEST(memory_that_the_host_shares_is_on_no_device) {
  const std::shared_ptr<Device> device = FirstDevice();
  InContext current(*device);
  void* on_device = nullptr;
  RT_REQUIRE_OK(device->Allocate(1000, &on_device));
  std::unique_ptr<Pinned> pinned;
  RT_REQUIRE_OK(Pinned::Take(device, 1000, &pinned));
  RT_CHECK_EQ(Device::Of(Library(), on_device), 0);
  RT_CHECK_EQ(Device::Of(Library(), pinned->get()), -1);
  RT_CHECK_EQ(Device::Of(Library(), &device), -1);
  Device::Free(0, on_device);
}

// Until the driver has looked, and ends the world: whoever polls must not take the result for a good one.
RT_TEST(an_operation_of_a_gpu_that_fails_is_not_finished) {
  const std::shared_ptr<Device> device = FirstDevice();
  Handle handle;
  {
    InContext current(*device);
    std::unique_ptr<Stream> stream;
    RT_REQUIRE_OK(Stream::Make(device, &stream));
    RT_REQUIRE_OK(DeviceEvent::Record(device, stream->get(), &handle.completion));
    RT_REQUIRE_OK(device->Check(device->driver().StreamSynchronize(stream->get()), "cuStreamSynchronize"));
  }
  handle.Finish({});
  RT_CHECK(handle.finished());
  const auto fail = OfFake<void (*)(const char*)>("fake_cuda_fail");
  fail("cuEventQuery:1+=700");
  RT_CHECK(!handle.finished());
  handle.Lose(Status::Internal("the GPU has failed"));
  RT_CHECK(handle.finished() && !handle.status().ok());
  fail("");
}

}  // namespace ringtrain
