// Where a process has no room for a thread, JAX's operations fail before they begin: nobody could complete them.
#include "jax/completions.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>

#include <atomic>
#include <future>

#include "check.h"

namespace {
std::atomic<bool> has_room{true};
}

extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*),
                              void* argument) {
  static const auto create = reinterpret_cast<int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*)>(
      dlsym(RTLD_NEXT, "pthread_create"));
  return has_room ? create(thread, attributes, run, argument) : EAGAIN;
}

using ringtrain::jax::Completions;

RT_TEST(without_a_thread_nothing_begins) {
  Completions& completions = Completions::Get();
  has_room = false;
  RT_CHECK(!completions.Ready());
  has_room = true;
  RT_CHECK(completions.Ready());
  has_room = false;
  RT_CHECK(completions.Ready());  // there is one
  std::promise<void> first, second;
  completions.Add([&] { first.set_value(); });
  completions.Add([&] { second.set_value(); });  // no thread of its own
  first.get_future().wait();
  second.get_future().wait();
  has_room = true;
}
