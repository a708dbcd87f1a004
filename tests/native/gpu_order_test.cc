// Tensors on GPUs through the C ABI, two ranks in this process, against tests/fakes: each result is right, and under
// ThreadSanitizer each read on a stream is ordered after the write that it needs, by CUDA's means alone.
//
// Nobody waits for a stream between the making of a tensor and the reading of its result. With FAKE_CUDA_FORGET=
// cuStreamWaitEvent:1+=1 no stream waits for another, as in a program that lacks those calls; test_native.py expects a
// data race.
#include <unistd.h>

#include <climits>
#include <cstdlib>
#include <memory>
#include <numeric>

#include "check.h"
#include "device/driver.h"
#include "include/ringtrain.h"
#include "tables/tables.h"

namespace ringtrain {
namespace {

constexpr int kRanks = 2;
constexpr int kSteps = 3;
constexpr double kHang = 100;  // seconds; longer than any wait that is not a hang
const std::vector<int64_t> kSizes = {1,     3,  1000, 5,
                                     70000, 20, 300};  // elements: several in a batch, one of several chunks

std::string Fake(const char* name) {
  char path[PATH_MAX] = "";
  const ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1);
  const std::string program(path, length > 0 ? static_cast<size_t>(length) : 0);
  return program.substr(0, program.rfind('/')) + "/fakes/" + name;
}

const Driver& Cuda() {
  static const Driver* driver = [] {
    setenv("FAKE_DEVICES", "2", 1);
    unsetenv("CUDA_VISIBLE_DEVICES");
    const Driver* opened = nullptr;
    RT_CHECK_OK(Driver::Open(Fake("libcuda.so.1"), &opened));
    return opened;
  }();
  return *driver;
}

void Require(CUresult result, const char* what) { RT_REQUIRE_OK(Cuda().Check(result, what)); }
#define REQUIRE_CUDA(name, ...) Require(Cuda().name(__VA_ARGS__), #name)

// A rank's stream, as its framework has one, with the device's context current on this thread.
class User {
 public:
  explicit User(int device) {
    CUcontext context;
    REQUIRE_CUDA(DevicePrimaryCtxRetain, &context, device);
    REQUIRE_CUDA(CtxSetCurrent, context);
    REQUIRE_CUDA(StreamCreateWithPriority, &stream, kCudaStreamNonBlocking, 0);
  }
  CUstream stream = nullptr;
};

// A tensor in device memory, and pinned memory for what goes in and comes out.
class Values {
 public:
  explicit Values(int64_t count) : count_(count) {
    void* memory;
    REQUIRE_CUDA(MemAlloc, &device, bytes());
    REQUIRE_CUDA(MemHostAlloc, &memory, 2 * bytes(), kCudaHostPortable);
    host_ = static_cast<float*>(memory);
  }
  ~Values() {
    Cuda().MemFree(device);
    Cuda().MemFreeHost(host_);
  }
  Values(const Values&) = delete;

  void Put(const User& user, float first) {
    std::iota(host_, host_ + count_, first);
    REQUIRE_CUDA(MemcpyHtoDAsync, device, host_, bytes(), user.stream);
  }
  void Fetch(const User& user) { REQUIRE_CUDA(MemcpyDtoHAsync, host_ + count_, device, bytes(), user.stream); }
  // After the stream was waited for.
  void Check(float first, float step) const {
    for (int64_t i = 0; i < count_; ++i)
      if (!RT_CHECK_EQ(host_[count_ + i], first + step * static_cast<float>(i))) return;
  }
  rt_tensor Tensor(int on, const User& user) const {
    rt_tensor tensor{};
    tensor.data = tensor.output = reinterpret_cast<void*>(device);
    tensor.dtype = static_cast<int32_t>(DType::kFloat32);
    tensor.device = on;
    tensor.stream = user.stream;
    tensor.ndim = 1;
    tensor.shape = &count_;
    return tensor;
  }
  size_t bytes() const { return static_cast<size_t>(count_) * sizeof(float); }

  CUdeviceptr device = 0;

 private:
  const int64_t count_;
  float* host_ = nullptr;
};

rt_handle* Submit(rt_context* context, const std::string& name, const rt_tensor& tensor) {
  rt_request request{};
  request.name = name.c_str();
  request.operation = static_cast<int32_t>(Operation::kAllreduce);
  request.reduction = static_cast<int32_t>(Reduction::kSum);
  request.root = -1;
  request.prescale = request.postscale = 1;
  request.tensor_count = 1;
  request.tensors = &tensor;
  request.cacheable = 1;
  rt_handle* handle = nullptr;
  char* error = nullptr;
  if (!RT_CHECK_EQ(rt_submit(context, &request, &handle, &error), 0)) check::Report(__FILE__, __LINE__, error);
  RT_REQUIRE(handle != nullptr);
  return handle;
}

// One step of a rank: all tensors are made, summed and read on the user's stream.
void Step(rt_context* context, int rank, const User& user, std::vector<std::unique_ptr<Values>>* all) {
  std::vector<rt_handle*> handles;
  for (size_t i = 0; i < all->size(); ++i) {
    (*all)[i]->Put(user, static_cast<float>(rank + 10 * i));
    handles.push_back(Submit(context, "tensor " + std::to_string(i), (*all)[i]->Tensor(rank, user)));
  }
  for (size_t i = 0; i < all->size(); ++i) {
    char* error = nullptr;
    if (!RT_CHECK_EQ(rt_wait(handles[i], kHang, &error), 0))
      check::Report(__FILE__, __LINE__, error != nullptr ? error : "it hangs");
    RT_CHECK_EQ(rt_stream_wait(handles[i], user.stream, nullptr), 0);
    (*all)[i]->Fetch(user);
  }
  REQUIRE_CUDA(StreamSynchronize, user.stream);
  for (size_t i = 0; i < all->size(); ++i) (*all)[i]->Check(static_cast<float>(1 + 20 * i), kRanks);
  for (rt_handle* handle : handles) {
    while (rt_poll(handle) == 1) usleep(100);  // the tensors may go
    rt_handle_free(handle);
  }
}

void RunRank(rt_hub* hub, int rank, const std::string& options) {
  rt_context* context = nullptr;
  char* error = nullptr;
  if (!RT_CHECK_EQ(rt_open_in_process(hub, rank, options.c_str(), &context, &error), 0))
    check::Report(__FILE__, __LINE__, error);
  RT_REQUIRE(context != nullptr);
  {
    const User user(rank);
    std::vector<std::unique_ptr<Values>> all;
    for (int64_t size : kSizes) all.push_back(std::make_unique<Values>(size));
    for (int step = 0; step < kSteps; ++step) Step(context, rank, user, &all);
  }
  RT_CHECK_EQ(rt_close(context, kHang, nullptr), 0);
  rt_context_free(context);
}

void RunWorld(const std::string& way) {
  Cuda();
  rt_hub* hub = nullptr;
  RT_REQUIRE_EQ(rt_hub_open(kRanks, nullptr, &hub, nullptr), 0);
  const std::string options =
      way + "\ncuda_lib=" + Fake("libcuda.so.1") + "\nnccl_lib=" + Fake("libnccl.so.2") + "\nchunk_bytes=65536\n";
  check::RunRanks(kRanks, [&](int rank) { RunRank(hub, rank, options); });
  rt_hub_close(hub);
}

RT_TEST(staged_results_are_ordered) { RunWorld("gpu_plane=staged"); }
RT_TEST(nccl_results_are_ordered) { RunWorld("gpu_plane=nccl\nfusion_threshold_bytes=1048576"); }
RT_TEST(sums_by_kernels_and_communicators_in_turn_are_ordered) {
  RunWorld("gpu_plane=nccl\nnccl_algorithm=ordered\nnccl_communicators=2\nfusion_threshold_bytes=4096");
}

}  // namespace
}  // namespace ringtrain

// Read by LeakSanitizer: the stand-ins keep what they have handed out for ever, to know it when it is used too late.
extern "C" const char* __lsan_default_suppressions();
extern "C" const char* __lsan_default_suppressions() { return "leak:libcuda.so.1\nleak:libnccl.so.2\n"; }
