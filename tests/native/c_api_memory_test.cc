// Without memory no function of the C ABI throws: an exception that leaves it would end the process. Each allocation of
// each call fails in turn, on the calling thread alone.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <new>
#include <string>
#include <vector>

#include "check.h"
#include "include/ringtrain.h"
#include "tables/tables.h"

namespace {

thread_local int64_t allocations_left = -1;  // -1: any number
thread_local bool has_failed = false;

void* Allocate(size_t bytes) {
  if (allocations_left == 0) {
    has_failed = true;
    throw std::bad_alloc();
  }
  if (allocations_left > 0) --allocations_left;
  void* const memory = std::malloc(bytes == 0 ? 1 : bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

void* operator new(size_t bytes) { return Allocate(bytes); }
void* operator new[](size_t bytes) { return Allocate(bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }

namespace ringtrain {
namespace {

// call: false if it says that it had no memory.
void Starve(const char* what, const std::function<bool()>& call) {
  constexpr int64_t kMost = 2000;  // allocations of a call
  for (int64_t count = 0; count < kMost; ++count) {
    bool well = false, threw = false;
    has_failed = false;
    allocations_left = count;
    try {
      well = call();
    } catch (...) {
      threw = true;
    }
    allocations_left = -1;
    if (threw) check::Report(__FILE__, __LINE__, std::string(what) + " throws at allocation " + std::to_string(count));
    if (threw) return;
    if (well == has_failed)
      check::Report(__FILE__, __LINE__,
                    std::string(what) + (well ? " succeeds" : " fails") + " at allocation " + std::to_string(count));
    if (!has_failed) return;
  }
  check::Report(__FILE__, __LINE__, std::string(what) + " never succeeds");
}

bool Taken(char* text) {
  rt_free(text);
  return text != nullptr;
}

// Of a call that returns a status, and perhaps a text.
template <typename Call>
bool Ok(Call call) {
  char* error = nullptr;
  const int32_t status = call(&error);
  rt_free(error);
  return status == 0;
}

class OneRank {
 public:
  OneRank() {
    RT_REQUIRE_EQ(rt_hub_open(1, "", &hub_, nullptr), 0);
    RT_REQUIRE_EQ(rt_open_in_process(hub_, 0, "", &context_, nullptr), 0);
  }
  ~OneRank() {
    rt_context_free(context_);
    rt_hub_close(hub_);
  }
  rt_context* context() const { return context_; }

 private:
  rt_hub* hub_ = nullptr;
  rt_context* context_ = nullptr;
};

const char* kLongName = "a name that is too long to lie in the object of a text itself";

}  // namespace

RT_TEST(questions_about_a_world) {
  OneRank world;
  rt_context* const context = world.context();
  int32_t ranks[1];
  int64_t counters[kCounterCount];
  rt_world about;
  Starve("rt_suspects", [&] { return rt_suspects(context, RT_MISSING, ranks, 1) == 0; });
  Starve("rt_world_of", [&] { return rt_world_of(context, &about), true; });
  Starve("rt_process_set_ranks", [&] { return rt_process_set_ranks(context, 0, ranks, 1) == 1; });
  Starve("rt_process_set_hosts", [&] { return rt_process_set_hosts(context, 0) == 1; });
  Starve("rt_counters", [&] { return rt_counters(context, counters, kCounterCount) == kCounterCount; });
  Starve("rt_lateness", [&] { return Taken(rt_lateness(context)); });
  Starve("rt_traffic", [&] { return Taken(rt_traffic(context)); });
  Starve("rt_lines", [&] { return Taken(rt_lines(context)); });
  Starve("rt_burst_bytes", [&] { return rt_burst_bytes(context) > 0; });
  Starve("rt_flight_record", [&] { return Taken(rt_flight_record(context)); });
  Starve("rt_gpu_libraries", [&] { return Taken(rt_gpu_libraries("/no/libcuda.so", "/no/libnccl.so")); });
  Starve("rt_device_of", [&] { return rt_device_of("/no/libcuda.so", counters) == -1 && !has_failed; });
}

RT_TEST(residuals_that_are_kept) {
  OneRank world;
  rt_context* const context = world.context();
  float sent[4] = {1, 2, 3, 4}, finished[4] = {};
  Starve("rt_residual_load", [&] { return rt_residual_load(context, 0, kLongName, 0, 4, sent, finished) == 1; });
  Starve("rt_residual_save", [&] { return rt_residual_save(context, 0, kLongName, 0, 4, sent, finished) >= 0; });
  Starve("rt_residuals", [&] { return Taken(rt_residuals(context, 0, "")); });
  Starve("rt_residuals_keep", [&] { return rt_residuals_keep(context, 0, kLongName) == 1; });
  Starve("rt_residuals_take_back", [&] { return rt_residuals_take_back(context, 0, kLongName, -1) == 1; });
  Starve("rt_residuals_inherit", [&] { return rt_residuals_inherit(context, context) == 1; });
}

RT_TEST(operations_and_the_end) {
  OneRank world;
  rt_context* const context = world.context();
  const float value = 1;
  float result = 0;
  const int64_t shape[1] = {1};
  rt_tensor tensor{};
  tensor.data = &value;
  tensor.output = &result;
  tensor.dtype = static_cast<int32_t>(DType::kFloat32);
  tensor.device = -1;
  tensor.ndim = 1;
  tensor.shape = shape;
  rt_request request{};
  request.name = kLongName;
  request.operation = static_cast<int32_t>(Operation::kAllreduce);
  request.prescale = request.postscale = 1;
  request.tensor_count = 1;
  request.tensors = &tensor;
  request.caller_waits = 1;
  rt_handle* handle = nullptr;
  Starve("rt_submit", [&] { return Ok([&](char** error) { return rt_submit(context, &request, &handle, error); }); });
  RT_REQUIRE(handle != nullptr);
  RT_CHECK_EQ(rt_wait(handle, 60, nullptr), 0);
  void* data = nullptr;
  int32_t dimensions = 0;
  int64_t extents[RT_MAX_DIMENSIONS];
  Starve("rt_output of none", [&] {
    char* error = nullptr;
    const bool none =
        rt_output(handle, 7, &data, &dimensions, extents, &error) == int32_t(StatusCode::kInvalidArgument) &&
        std::strstr(error, "does not exist") != nullptr;
    rt_free(error);
    return none;
  });
  rt_handle_free(handle);
  Starve("rt_abort", [&] { return rt_abort(context, kLongName), !has_failed; });
  char* error = nullptr;
  RT_CHECK(rt_close(context, 0, &error) != 0);
  rt_free(error);
}

RT_TEST(worlds_that_cannot_open) {
  Starve("rt_hub_open", [] {
    rt_hub* hub = nullptr;
    const bool well = Ok([&](char** error) { return rt_hub_open(1, "1", &hub, error); });
    rt_hub_close(hub);
    return well;
  });
  Starve("rt_listener_addresses", [] {
    rt_listener* listener = nullptr;
    if (!Ok([&](char** error) { return rt_listen("127.0.0.1:0", &listener, error); })) return false;
    const bool well = Taken(rt_listener_addresses(listener));
    rt_listener_close(listener);
    return well;
  });
}

RT_TEST(a_world_of_one) {
  Starve("rt_open_in_process", [] {
    rt_hub* hub = nullptr;
    if (!Ok([&](char** error) { return rt_hub_open(1, "1", &hub, error); })) return false;
    rt_context* context = nullptr;
    const bool well = Ok([&](char** error) { return rt_open_in_process(hub, 0, "", &context, error); });
    allocations_left = -1;
    rt_context_free(context);
    rt_hub_close(hub);
    return well;
  });
}

RT_TEST(steps_of_an_elastic_job) {
  Starve("rt_steps_open", [] {
    rt_steps* const made = rt_steps_open(0);
    rt_steps_free(made);
    return made != nullptr;
  });
  rt_steps* const steps = rt_steps_open(0);
  const int64_t rows[] = {1, 3, 2, 1, 0, 1, 3, 1, 1, 0};  // one is whole, the other has begun
  const int32_t places[] = {1, 0};
  int32_t place = 0;
  Starve("rt_steps_enter_world", [&] { return rt_steps_enter_world(steps, 1, 2, 1) == 1; });
  Starve("rt_steps_hear", [&] { return rt_steps_hear(steps, rows, 2, &place) == 1; });
  RT_CHECK_EQ(place, 1);
  Starve("rt_steps_settle", [&] { return rt_steps_settle(steps, places, 2) == 1; });
  rt_steps_hold(steps, 3);
  Starve("rt_steps_release", [&] { return rt_steps_release(steps) == 1; });
  rt_steps_free(steps);
}

RT_TEST(samples_of_an_elastic_job) {
  const int64_t given_back[] = {1, 3};
  Starve("rt_samples_open", [&] {
    rt_samples* const made = rt_samples_open(0, 100, 1, 0, 4, given_back, 2);
    rt_samples_free(made);
    return made != nullptr;
  });
  rt_samples* const samples = rt_samples_open(1, 100, 4, 0, 4, given_back, 2);
  const int64_t* positions = nullptr;
  const int32_t places[] = {0};
  rt_samples_deal(samples, 2, 0);
  Starve("rt_samples_draw_ahead", [&] { return rt_samples_draw_ahead(samples, &positions) == 2; });
  const int64_t parts[] = {2, 1};
  Starve("rt_samples_share", [&] { return rt_samples_share(samples, parts, 2) == 1; });
  rt_samples_share(samples, nullptr, 0);
  const int64_t costs[] = {1, 1, 2, 2};
  Starve("rt_samples_cost", [&] { return rt_samples_cost(samples, costs, 4) == 1; });
  rt_samples_cost(samples, nullptr, 0);
  Starve("rt_samples_draw_ahead", [&] { return rt_samples_draw_ahead(samples, &positions) == 2; });
  rt_samples_take(samples, 1);
  Starve("rt_samples_work", [&] { return rt_samples_work(samples) == 2; });
  Starve("rt_samples_weight", [&] { return rt_samples_weight(samples, places, 1) == 2; });
  Starve("rt_samples_release", [&] { return rt_samples_release(samples, places, 1) == 1; });
  rt_samples_free(samples);
}

RT_TEST(what_decides_in_an_elastic_job) {
  constexpr char kUid[] = "00112233445566778899aabbccddeeff";
  Starve("rt_membership_open", [&] {
    rt_membership* const made = rt_membership_open(kUid, kLongName, 0, kLongName, kLongName);
    rt_membership_free(made);
    return made != nullptr;
  });
  rt_membership* const membership = rt_membership_open(kUid, kLongName, 0, "", kLongName);
  Starve("rt_membership_listens_at", [&] { return rt_membership_listens_at(membership, kLongName) == 1; });
  Starve("rt_membership_got_state", [&] { return rt_membership_got_state(membership) == 1; });
  rt_membership_action action;
  Starve("rt_membership_begin", [&] { return rt_membership_begin(membership) == 1; });
  Starve("rt_membership_arrived", [&] { return rt_membership_arrived(membership, "none", 4) == 0; });
  rt_membership_begin(membership);
  Starve("rt_membership_next", [&] { return rt_membership_next(membership, &action) == 1; });
  rt_membership_free(membership);
  const std::string hosts = std::string(kLongName) + "|2\n";
  const rt_authority_options options = {1, 0, 1, 1, 1, 1, 1};
  Starve("rt_authority_begin", [&] {
    rt_authority* const made = rt_authority_begin(hosts.c_str(), &options, 0);
    rt_authority_free(made);
    return made != nullptr;
  });
  rt_authority* const authority = rt_authority_begin(hosts.c_str(), &options, 0);
  const std::string other = std::string(kLongName) + " of another host";
  Starve("rt_authority_host_added", [&] { return rt_authority_host_added(authority, other.c_str(), 2) == 1; });
  rt_authority_free(authority);
}

}  // namespace ringtrain
