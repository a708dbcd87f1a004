#include "cuda/stream.h"

#include <semaphore.h>

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "strict.h"

namespace fakes {
namespace {

struct Node {
  std::function<void()> work;  // empty in the node that ends the thread, and in the one that the queue starts with
  std::atomic<Node*> next{nullptr};
};

struct Device {
  std::mutex mutex;  // among the threads that enqueue; never taken by a stream's thread
  std::vector<Stream*> blocking;
  Stream* legacy = nullptr;
  bool legacy_used = false;
};

Device& DeviceAt(int index) {
  static auto* devices = new Device[kMaxDevices];
  return devices[index];
}

struct Registry {
  std::mutex mutex;
  std::set<const void*> streams;  // alive, those of users
};

Registry& Streams() {
  static auto* registry = new Registry;
  return *registry;
}

}  // namespace

struct Stream {
  int device;
  bool blocking;
  std::atomic<bool> capturing{false};
  Dice dice;
  // The queue: enqueuers write `last` under the device's mutex, the thread alone reads `first`.
  Node* last = new Node;
  Node* first = last;
  sem_t waiting;
  Moment* tail = nullptr;  // after all that was enqueued; nullptr if something came since it was recorded

  Stream(int on, bool blocks, uint64_t number) : device(on), blocking(blocks), dice(Number("FAKE_SEED", 1) + number) {
    sem_init(&waiting, 0, 0);
    std::thread([this] { Work(); }).detach();
  }

  void Push(std::function<void()> work) {
    auto* node = new Node;
    node->work = std::move(work);
    last->next.store(node, std::memory_order_release);
    last = node;
    tail = nullptr;
    sem_post(&waiting);
  }

  Moment* Tail() {
    if (tail != nullptr) return tail;
    auto* moment = new Moment;
    Push([moment] { moment->Pass(); });
    return tail = moment;
  }

 private:
  void Work() {
    const auto delay = static_cast<uint32_t>(Number("FAKE_DELAY_US", 0));
    for (;;) {
      while (sem_wait(&waiting) != 0 && errno == EINTR) {
      }
      Node* node = first->next.load(std::memory_order_acquire);
      delete first;
      first = node;
      if (!node->work) return;
      if (delay > 0) usleep(dice.Below(delay));
      node->work();
      node->work = nullptr;
    }
  }
};

namespace {

Stream* MakeStream(int device, bool blocking) {
  static std::atomic<uint64_t> number{0};
  return new Stream(device, blocking, ++number);
}

// The order that CUDA gives between a device's legacy stream and its blocking ones. The device's mutex is held.
void OrderWithLegacy(Device* device, Stream* stream) {
  auto wait = [stream](Moment* moment) { stream->Push([moment] { moment->Wait(); }); };
  if (stream == device->legacy) {
    device->legacy_used = true;
    for (Stream* other : device->blocking) wait(other->Tail());
  } else if (stream->blocking && device->legacy_used) {
    wait(device->legacy->Tail());
  }
}

Stream* AddBlocking(int index) {
  Device& device = DeviceAt(index);
  Stream* made = MakeStream(index, true);
  std::lock_guard<std::mutex> lock(device.mutex);
  device.blocking.push_back(made);
  return made;
}

}  // namespace

Stream* NewStream(int device, bool blocking) {
  Stream* made = blocking ? AddBlocking(device) : MakeStream(device, false);
  std::lock_guard<std::mutex> lock(Streams().mutex);
  Streams().streams.insert(made);
  return made;
}

Stream* LegacyStream(int index) {
  Device& device = DeviceAt(index);
  std::lock_guard<std::mutex> lock(device.mutex);
  if (device.legacy == nullptr) device.legacy = MakeStream(index, false);
  return device.legacy;
}

Stream* ThreadStream(int device) {
  static thread_local Stream* streams[kMaxDevices] = {};
  if (streams[device] == nullptr) streams[device] = AddBlocking(device);
  return streams[device];
}

void DestroyStream(Stream* stream) {
  {
    std::lock_guard<std::mutex> lock(Streams().mutex);
    Streams().streams.erase(stream);
  }
  Device& device = DeviceAt(stream->device);
  std::lock_guard<std::mutex> lock(device.mutex);
  device.blocking.erase(std::remove(device.blocking.begin(), device.blocking.end(), stream), device.blocking.end());
  stream->Push(nullptr);
}

bool IsStream(const void* handle) {
  std::lock_guard<std::mutex> lock(Streams().mutex);
  return Streams().streams.count(handle) > 0;
}

int DeviceOf(const Stream* stream) { return stream->device; }
bool IsCapturing(const Stream* stream) { return stream->capturing; }
void SetCapturing(Stream* stream, bool capturing) { stream->capturing = capturing; }

void Launch(Stream* stream, std::function<void()> work) {
  Device& device = DeviceAt(stream->device);
  std::lock_guard<std::mutex> lock(device.mutex);
  OrderWithLegacy(&device, stream);
  stream->Push(std::move(work));
}

Moment* Record(Stream* stream) {
  Device& device = DeviceAt(stream->device);
  std::lock_guard<std::mutex> lock(device.mutex);
  OrderWithLegacy(&device, stream);
  return stream->Tail();
}

void WaitFor(Stream* stream, Moment* moment) {
  Launch(stream, [moment] { moment->Wait(); });
}

void Synchronize(int device) {
  Record(LegacyStream(device))->Wait();
  std::vector<Stream*> own;
  {
    std::lock_guard<std::mutex> lock(Streams().mutex);
    for (const void* stream : Streams().streams) own.push_back(static_cast<Stream*>(const_cast<void*>(stream)));
  }
  for (Stream* stream : own)
    if (stream->device == device) Record(stream)->Wait();
}

long LiveStreams() {
  std::lock_guard<std::mutex> lock(Streams().mutex);
  return static_cast<long>(Streams().streams.size());
}

}  // namespace fakes
