#include "nccl/segment.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>
#include <mutex>
#include <set>

#include "strict.h"

namespace fakes {
namespace {

std::mutex names_mutex;
std::set<std::string>& Names() {  // in /dev/shm, to be removed at exit
  static auto* names = new std::set<std::string>;
  return *names;
}

void Remember(const std::string& name) {
  std::lock_guard<std::mutex> lock(names_mutex);
  static const int registered = std::atexit([] {
    std::lock_guard<std::mutex> at_exit(names_mutex);
    for (const std::string& left : Names()) shm_unlink(left.c_str());
  });
  (void)registered;
  Names().insert(name);
}

void Unlink(const std::string& name) {
  std::lock_guard<std::mutex> lock(names_mutex);
  if (Names().erase(name) > 0) shm_unlink(name.c_str());
}

}  // namespace

Segment::Segment(const std::string& name) : name_(name) {
  const int file = shm_open(name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  // Of the same size by every rank; new memory is zero, with which everything here begins.
  if (file < 0 || ftruncate(file, sizeof(Shared)) != 0) Violation("no shared memory %s", name.c_str());
  Remember(name);
  void* mapped = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (mapped == MAP_FAILED) Violation("cannot map %s", name.c_str());
  shared_ = static_cast<Shared*>(mapped);
}

Segment::~Segment() {
  Unlink(name_);
  munmap(shared_, sizeof(Shared));
}

void Segment::Forget() { Unlink(name_); }

void Segment::Ring() const {
  shared_->bell.fetch_add(1);
  syscall(SYS_futex, &shared_->bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

bool Segment::Await(const std::function<bool()>& ready, const std::function<bool()>& given_up) const {
  for (;;) {
    const uint32_t heard = shared_->bell.load();
    if (ready()) return true;
    if (given_up()) return false;
    const timespec look_again{0, 20'000'000};  // an abort of this rank rings no bell
    syscall(SYS_futex, &shared_->bell, FUTEX_WAIT, heard, &look_again, nullptr, 0);
  }
}

void Segment::Fail(int result, const std::string& explanation) const {
  if (shared_->explaining.exchange(1) == 0) {
    std::snprintf(shared_->explanation, sizeof shared_->explanation, "%s", explanation.c_str());
    shared_->failure.store(result);
  }
  Ring();
}

}  // namespace fakes
