// The C ABI of the library as a whole, and of contexts: how they open, which world and process sets they are in, and
// how they end.
#include <algorithm>
#include <memory>
#include <new>
#include <sstream>
#include <utility>

#include "base/alarm.h"
#include "c_api/context.h"
#include "c_api/translate.h"
#include "device/nccl.h"
#include "include/ringtrain.h"
#include "kernels/level.h"
#include "transport/in_process.h"
#include "transport/mpi.h"
#include "transport/tcp.h"
#include "transport/tcp/sha256.h"
#include "world/version.h"

using ringtrain::Context;
using ringtrain::Guard;
using ringtrain::Hub;
using ringtrain::Report;
using ringtrain::Status;
using ringtrain::TextBy;
using ringtrain::TextOf;

struct rt_hub {
  std::shared_ptr<Hub> hub;
};
struct rt_listener {
  std::unique_ptr<ringtrain::TcpListener> listener;
};
struct rt_alarm : ringtrain::Alarm {
  using Alarm::Alarm;
};

#if defined(__clang__)
#define RT_COMPILER __VERSION__
#else
#define RT_COMPILER "GCC " __VERSION__
#endif

namespace {

// Hands a context out once its ranks have met by what `find(options, &rendezvous)` finds.
template <typename Find>
Status Open(const char* options_text, Find find, rt_context** context) {
  return Guard([&]() -> Status {
    ringtrain::Options options;
    RT_TRY(ringtrain::Options::Parse(TextOf(options_text), &options));
    std::unique_ptr<ringtrain::Rendezvous> rendezvous;
    RT_TRY(find(options, &rendezvous));
    std::unique_ptr<rt_context> opened(new rt_context);
    RT_TRY(Context::Open(*rendezvous, options, &opened->context));
    *context = opened.release();
    return {};
  });
}

ringtrain::TcpWorld WorldOverTcp(int rank, const std::string& peers, const uint8_t* secret, uint64_t epoch,
                                 const ringtrain::Options& options) {
  ringtrain::TcpWorld world;
  world.rank = rank;
  world.secret = secret;
  world.epoch = epoch;
  world.connect_seconds = options.start_timeout_seconds;
  // Silence is the protocol's to find, so that all ranks are told in the same words; the kernel comes after it.
  world.dead_after_seconds = 2 * options.dead_after_seconds;
  world.streams = static_cast<int>(options.tcp_streams);
  world.congestion = options.tcp_congestion;
  std::istringstream lines(peers);
  for (std::string line; std::getline(lines, line);) world.peers.push_back(line);
  return world;
}

}  // namespace

int32_t rt_abi_version(void) { return RT_ABI_VERSION; }

const char* rt_build_info(void) {
  static const std::string text = std::string("ringtrain ") + ringtrain::kVersion +
                                  ", built with " RT_COMPILER ", kernels " + ringtrain::KernelVariant();
  return text.c_str();
}

const char* rt_table(const char* name) { return ringtrain::TableText(name); }

void rt_free(void* memory) { ringtrain::Outputs().Free(memory); }  // a result's memory, or a text

void rt_trim() { ringtrain::Outputs().Trim(); }

void rt_suggest_nccl(const char* path, const char* interfaces) {
  Done([&] { ringtrain::Nccl::Suggest(TextOf(path), TextOf(interfaces)); });
}

char* rt_gpu_libraries(const char* cuda_lib, const char* nccl_lib) {
  const ringtrain::Driver* driver = nullptr;
  const ringtrain::Nccl* nccl = nullptr;
  const Status has_driver = Guard([&] { return ringtrain::Driver::Open(TextOf(cuda_lib), &driver); });
  const Status has_nccl = Guard([&] { return ringtrain::Nccl::Open(TextOf(nccl_lib), &nccl); });
  return TextBy([&] {
    const std::string cuda =
        driver != nullptr ? driver->VersionText() + "|" + driver->path : "|" + has_driver.message();
    return "cuda|" + cuda + "\nnccl|" +
           (nccl != nullptr ? nccl->VersionText() + "|" + nccl->path : "|" + has_nccl.message());
  });
}

int32_t rt_hub_open(int32_t size, const char* layout, rt_hub** hub, char** error) {
  Status status = Guard([&]() -> Status {
    if (size < 1)
      return Status::InvalidArgument("a world must have one rank at least, got " + std::to_string(size) + ".");
    std::vector<int> hosts;
    RT_TRY(ringtrain::ParseLayout(TextOf(layout), size, &hosts));
    *hub = new rt_hub{std::make_shared<Hub>(hosts)};
    return {};
  });
  return Report(status, error);
}

void rt_hub_close(rt_hub* hub) { delete hub; }

int32_t rt_open_in_process(rt_hub* hub, int32_t rank, const char* options, rt_context** context, char** error) {
  auto join = [&](const ringtrain::Options&, auto* rendezvous) { return Hub::Join(hub->hub, rank, rendezvous); };
  return Report(Open(options, join, context), error);
}

int32_t rt_open_mpi(const char* library, uintptr_t communicator, const char* options, rt_context** context,
                    char** error) {
  auto meet = [&](const ringtrain::Options& parsed, auto* rendezvous) {
    return ringtrain::OpenMpiRendezvous(TextOf(library), communicator, parsed.start_timeout_seconds, parsed.host_layout,
                                        rendezvous);
  };
  return Report(Open(options, meet, context), error);
}

int32_t rt_listen(const char* addresses, rt_listener** listener, char** error) {
  return Report(Guard([&]() -> Status {
                  std::unique_ptr<rt_listener> made(new rt_listener);
                  RT_TRY(ringtrain::TcpListener::Open(TextOf(addresses), &made->listener));
                  *listener = made.release();
                  return {};
                }),
                error);
}

char* rt_listener_addresses(rt_listener* listener) {
  return TextBy([&] { return listener->listener->addresses(); });
}

void rt_listener_close(rt_listener* listener) { delete listener; }

int32_t rt_open_tcp(rt_listener* listener, int32_t rank, const char* peers, uint8_t* secret, uint64_t epoch,
                    const char* options, rt_context** context, char** error) {
  auto meet = [&](const ringtrain::Options& parsed, auto* rendezvous) {
    return ringtrain::OpenTcpRendezvous(listener->listener.get(),
                                        WorldOverTcp(rank, TextOf(peers), secret, epoch, parsed), parsed.host_layout,
                                        rendezvous);
  };
  const Status status = Open(options, meet, context);
  ringtrain::Wipe(secret, RT_SECRET_BYTES);
  return Report(status, error);
}

int32_t rt_close(rt_context* context, double seconds, char** error) {
  return Report(Guard([&] { return seconds < 0 ? context->context->Close() : context->context->Close(seconds); }),
                error);
}

void rt_context_free(rt_context* context) {
  if (context == nullptr) return;
  rt_close(context, -1, nullptr);
  delete context;
  rt_trim();
}

rt_alarm* rt_alarm_set(double seconds, const char* text) {
  rt_alarm* alarm = nullptr;
  Guard([&] {
    alarm = new rt_alarm{seconds, TextOf(text)};
    return Status();
  });
  return alarm;
}

void rt_alarm_cancel(rt_alarm* alarm) { delete alarm; }

void rt_abort(rt_context* context, const char* cause) {
  if (Done([&] { context->context->Abort(TextOf(cause)); }) == 0)
    Done([&] { context->context->Abort(""); });  // which needs none
}

int32_t rt_suspects(rt_context* context, int32_t why, int32_t* ranks, int32_t capacity) {
  return Or<int32_t>(-1, [&] {
    const ringtrain::Suspects suspects = context->context->suspects();
    const std::vector<int>& found = why == RT_SILENT    ? suspects.silent
                                    : why == RT_UNHEARD ? suspects.unheard
                                                        : suspects.missing;
    std::copy_n(found.begin(), std::min<size_t>(found.size(), static_cast<size_t>(std::max(capacity, 0))), ranks);
    return static_cast<int32_t>(found.size());
  });
}

void rt_ask_through(rt_context* context, int32_t pipe) { context->context->AskThrough(pipe); }

void rt_await_state_from(rt_context* context, int32_t first) { context->context->AwaitStateFrom(first); }

void rt_long_phase(rt_context* context, double seconds) { context->context->LongPhase(seconds); }

void rt_world_of(rt_context* context, rt_world* world) {
  const ringtrain::World& from = context->context->world();
  *world = {from.rank,         from.size,         from.local_rank(),          from.local_size(),
            from.cross_rank(), from.cross_size(), from.homogeneous() ? 1 : 0, from.site(),
            from.epoch};
}

int32_t rt_process_set_ranks(rt_context* context, int32_t process_set, int32_t* ranks, int32_t capacity) {
  return Or<int32_t>(-2, [&] {
    const std::vector<int> members = context->context->ProcessSetRanks(process_set);
    if (members.empty()) return -1;
    std::copy_n(members.begin(), std::min<size_t>(members.size(), static_cast<size_t>(std::max(capacity, 0))), ranks);
    return static_cast<int32_t>(members.size());
  });
}

int32_t rt_process_set_hosts(rt_context* context, int32_t process_set) {
  return Or<int32_t>(-1, [&] { return context->context->ProcessSetHosts(process_set); });
}
