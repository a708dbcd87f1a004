// Memory that the ranks of a host share: between contexts of one process, and between processes through POSIX shared
// memory.
#include "transport/host_memory.h"

#include <dirent.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <set>
#include <vector>

#include "base/clock.h"
#include "check.h"

namespace ringtrain {
namespace {

constexpr size_t kBytes = 100000;

// Names of shared files of ringtrain; other processes may have some, too, for a moment.
std::set<std::string> Files() {
  std::set<std::string> files;
  DIR* folder = opendir("/dev/shm");
  if (folder == nullptr) return files;
  for (dirent* entry = readdir(folder); entry != nullptr; entry = readdir(folder))
    if (std::strncmp(entry->d_name, "ringtrain-", 10) == 0) files.insert(std::string("/") + entry->d_name);
  closedir(folder);
  return files;
}

bool Exists(const std::string& name) { return access(("/dev/shm" + name).c_str(), F_OK) == 0; }

bool Zero(const char* memory, size_t bytes) {
  for (size_t byte = 0; byte < bytes; ++byte)
    if (memory[byte] != 0) return false;
  return true;
}

RT_TEST(places_of_the_control_block_are_aligned) {
  for (int local_size : {1, 3}) {
    auto host = MakeProcessHost(local_size);
    auto memory = OpenProcessMemory(host, local_size - 1);
    RT_CHECK_EQ(memory->local_rank(), local_size - 1);
    RT_CHECK_EQ(memory->local_size(), local_size);
    for (int local = 0; local < local_size; ++local)
      RT_CHECK_EQ(reinterpret_cast<uintptr_t>(&memory->control().place(local)) % 64, uintptr_t{0});
    RT_CHECK(Zero(reinterpret_cast<char*>(&memory->control()), HostControl::Bytes(local_size)));
  }
}

RT_TEST(windows_of_a_process_are_shared_until_the_last_has_left) {
  auto host = MakeProcessHost(2);
  auto first = OpenProcessMemory(host, 0), second = OpenProcessMemory(host, 1);
  char *a, *b, *other;
  RT_REQUIRE_OK(first->MapWindow(0, 2, kBytes, &a));
  RT_CHECK(Zero(a, kBytes));
  std::memset(a, 7, kBytes);
  RT_REQUIRE_OK(first->MapWindow(1, 2, kBytes, &other));
  RT_CHECK(other != a);
  first->UnmapWindow(0);
  RT_REQUIRE_OK(second->MapWindow(0, 2, kBytes, &b));  // comes late, finds what was written
  RT_CHECK_EQ(int{b[kBytes - 1]}, 7);
  second->UnmapWindow(0);
  RT_REQUIRE_OK(second->MapWindow(0, 2, kBytes, &b));
  RT_CHECK(Zero(b, kBytes));  // all had left, so this is a new one
}

RT_TEST(file_is_private_and_nameless_once_unlinked) {
  {
    std::unique_ptr<PosixMemory> creator, member;
    RT_REQUIRE_OK(PosixMemory::Create(2, kBytes, &creator));
    struct stat information;
    RT_REQUIRE_EQ(stat(("/dev/shm" + creator->name()).c_str(), &information), 0);
    RT_CHECK_EQ(information.st_mode & 0777, 0600u);
    RT_REQUIRE_OK(PosixMemory::Open(creator->name(), creator->nonce(), 1, 2, &member));
    creator->Unlink();
    RT_CHECK(!Exists(creator->name()));
    char *a, *b;
    RT_REQUIRE_OK(creator->MapWindow(0, 2, kBytes, &a));
    RT_REQUIRE_OK(member->MapWindow(0, 2, kBytes, &b));
    a[kBytes - 1] = 5;
    RT_CHECK_EQ(int{b[kBytes - 1]}, 5);
    creator->control().abort.state = AbortNotice::kSet;
    RT_CHECK_EQ(member->control().abort.state.load(), uint32_t{AbortNotice::kSet});
  }
}

RT_TEST(file_is_locked_while_its_creator_lives) {
  std::unique_ptr<PosixMemory> creator;
  RT_REQUIRE_OK(PosixMemory::Create(2, kBytes, &creator));
  const int file = open(("/dev/shm" + creator->name()).c_str(), O_RDONLY);
  RT_REQUIRE_EQ(file >= 0, true);
  RT_CHECK_EQ(flock(file, LOCK_EX | LOCK_NB), -1);
  creator.reset();
  RT_CHECK_EQ(flock(file, LOCK_EX | LOCK_NB), 0);
  close(file);
}

RT_TEST(creator_that_fails_half_way_leaves_no_file) {
  const std::set<std::string> before = Files();
  std::unique_ptr<PosixMemory> creator;
  const Status status = PosixMemory::Create(2, size_t{1} << 50, &creator);
  RT_CHECK_EQ(status.code(), StatusCode::kInternal);
  RT_CHECK(status.message().find("cannot be reserved in /dev/shm") != std::string::npos);
  RT_CHECK(creator == nullptr);
  for (const std::string& name : Files()) {
    if (before.count(name) > 0) continue;
    const Nanoseconds deadline = DeadlineAfter(20);
    while (Exists(name) && Now() < deadline) usleep(1000);
    RT_CHECK(!Exists(name));
  }
}

RT_TEST(creator_that_goes_takes_the_name_along) {
  std::string name;
  {
    std::unique_ptr<PosixMemory> creator;
    RT_REQUIRE_OK(PosixMemory::Create(4, kBytes, &creator));
    name = creator->name();
    RT_CHECK(Exists(name));
  }
  RT_CHECK(!Exists(name));
}

RT_TEST(wrong_file_is_not_opened) {
  std::unique_ptr<PosixMemory> creator, member;
  RT_REQUIRE_OK(PosixMemory::Create(2, kBytes, &creator));
  RT_CHECK(!PosixMemory::Open(creator->name(), creator->nonce() + 1, 1, 2, &member).ok());
  RT_CHECK(!PosixMemory::Open("/ringtrain-none", creator->nonce(), 1, 2, &member).ok());
  RT_CHECK(member == nullptr);
}

// The process of another rank of a host, which does something in the memory, says that it is there, and waits for its
// end.
class Member {
 public:
  using Body = std::function<void(PosixMemory*)>;

  Member(const PosixMemory& host, int local_rank, const Body& body) {
    int here[2];
    if (pipe(here) != 0) return;
    process_ = fork();
    if (process_ == 0) {
      std::unique_ptr<PosixMemory> memory;
      const Status opened = PosixMemory::Open(host.name(), host.nonce(), local_rank, host.local_size(), &memory);
      if (!opened.ok()) _exit(1);
      body(memory.get());
      if (write(here[1], "", 1) != 1) _exit(1);
      for (;;) pause();
    }
    close(here[1]);
    char byte;
    is_there_ = read(here[0], &byte, 1) == 1;
    close(here[0]);
  }
  ~Member() { Kill(); }
  Member(const Member&) = delete;
  Member& operator=(const Member&) = delete;

  bool is_there() const { return is_there_; }
  pid_t process() const { return process_; }
  void Kill() {
    if (process_ <= 0) return;
    kill(process_, SIGKILL);
    waitpid(process_, nullptr, 0);
    process_ = 0;
  }

 private:
  pid_t process_ = 0;
  bool is_there_ = false;
};

// Of a rank of another process that never came so far as to begin its life sign.
RT_TEST(a_process_that_is_killed_is_seen_to_have_ended) {
  std::unique_ptr<PosixMemory> creator;
  RT_REQUIRE_OK(PosixMemory::Create(3, kBytes, &creator));
  Member member(*creator, 1, [](PosixMemory*) {});
  RT_REQUIRE(member.is_there());
  for (int local : {0, 1, 2}) RT_CHECK(!creator->HasEnded(local));  // this process, a living one, and none
  member.Kill();
  RT_CHECK(creator->HasEnded(1));
  RT_CHECK(!creator->HasEnded(0) && !creator->HasEnded(2));
  std::unique_ptr<PosixMemory> late;  // it opens when the process has gone
  RT_REQUIRE_OK(PosixMemory::Open(creator->name(), creator->nonce(), 2, 3, &late));
  RT_CHECK(late->HasEnded(1));
  RT_CHECK(!late->HasEnded(0));
}

// Each of the two signs by itself, to all who ask all the time, and of nobody else.
RT_TEST(all_who_ask_are_told_of_a_killed_process_by_both_signs) {
  constexpr int kRanks = 5, kVictim = 1;
  std::unique_ptr<PosixMemory> creator;
  for (int round = 0; round < check::Rounds(30); ++round) {
    RT_REQUIRE_OK(PosixMemory::Create(kRanks, kBytes, &creator));
    const auto begin = [](PosixMemory* memory) { memory->control().place(memory->local_rank()).life.Begin(); };
    Member victim(*creator, kVictim, begin);
    RT_REQUIRE(victim.is_there());
    std::vector<pid_t> watchers;
    for (int rank = 2; rank < kRanks; ++rank) {
      watchers.push_back(fork());
      if (watchers.back() != 0) continue;
      std::unique_ptr<PosixMemory> memory;
      if (!PosixMemory::Open(creator->name(), creator->nonce(), rank, kRanks, &memory).ok()) _exit(1);
      begin(memory.get());
      LifeSign& life = memory->control().place(kVictim).life;
      const Nanoseconds deadline = DeadlineAfter(20);
      for (bool died = false, ended = false; !died || !ended;) {
        died |= life.Died();
        ended |= memory->HasEnded(kVictim);
        if (Now() > deadline) _exit(2);
      }
      const bool again = life.Died() && memory->HasEnded(kVictim);
      _exit(again && !memory->HasEnded(0) ? 0 : 3);
    }
    usleep(static_cast<useconds_t>(round * 50));  // it dies before the others ask, or while they do
    victim.Kill();
    int failed = 0;
    for (pid_t watcher : watchers) {
      int code = -1;
      RT_CHECK_EQ(waitpid(watcher, &code, 0), watcher);
      failed += int{code != 0};
    }
    RT_REQUIRE_EQ(failed, 0);
  }
}

// A child of this process under an id that another one had; -1 where that cannot be chosen.
pid_t ForkUnder(pid_t id) {
#ifdef SYS_clone3
  struct {
    uint64_t flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls, set_tid, set_tid_size, cgroup;
  } arguments = {};
  arguments.exit_signal = SIGCHLD;
  arguments.set_tid = reinterpret_cast<uint64_t>(&id);
  arguments.set_tid_size = 1;
  return static_cast<pid_t>(syscall(SYS_clone3, &arguments, sizeof arguments));
#else
  return id > 0 ? -1 : 0;
#endif
}

RT_TEST(another_process_under_the_same_id_is_not_taken_for_the_one_that_ended) {
  std::unique_ptr<PosixMemory> creator;
  RT_REQUIRE_OK(PosixMemory::Create(2, kBytes, &creator));
  Member member(*creator, 1, [](PosixMemory*) {});
  RT_REQUIRE(member.is_there());
  const pid_t id = member.process();
  member.Kill();
  const pid_t other = ForkUnder(id);
  if (other == 0)
    for (;;) pause();
  if (other < 0 || creator->control().place(1).process.identity() == 0) return;  // not root, or an older kernel
  RT_CHECK_EQ(other, id);
  RT_CHECK(creator->HasEnded(1));
  kill(other, SIGKILL);
  RT_REQUIRE_EQ(waitpid(other, nullptr, 0), other);
}

// Its id means another process here, or none.
RT_TEST(a_process_of_another_pid_namespace_is_left_to_its_life_sign) {
  std::unique_ptr<PosixMemory> creator;
  RT_REQUIRE_OK(PosixMemory::Create(2, kBytes, &creator));
  int here[2];
  RT_REQUIRE_EQ(pipe(here), 0);
  const pid_t outer = fork();
  if (outer == 0) {
    if (unshare(CLONE_NEWPID) != 0) _exit(write(here[1], "-", 1) == 1 ? 0 : 1);
    const pid_t inner = fork();
    if (inner != 0) {
      waitpid(inner, nullptr, 0);
      _exit(0);
    }
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    std::unique_ptr<PosixMemory> memory;
    if (!PosixMemory::Open(creator->name(), creator->nonce(), 1, 2, &memory).ok()) _exit(1);
    memory->control().place(1).life.Begin();
    if (write(here[1], "+", 1) != 1) _exit(1);
    for (;;) pause();
  }
  char byte = '-';
  RT_REQUIRE_EQ(read(here[0], &byte, 1), ssize_t{1});
  if (byte == '+') {
    RT_CHECK(!creator->HasEnded(1));
    RT_CHECK(!creator->control().place(1).life.Died());
  }
  kill(outer, SIGKILL);
  RT_REQUIRE_EQ(waitpid(outer, nullptr, 0), outer);
  const Nanoseconds deadline = DeadlineAfter(60);
  while (byte == '+' && !creator->control().place(1).life.Died() && Now() < deadline) sched_yield();
  if (byte == '+') RT_CHECK(creator->control().place(1).life.Died());
  RT_CHECK(!creator->HasEnded(1));
}

// A thread's rank beside another of its process; and what a rank has forked, which has both signs in its memory.
RT_TEST(ranks_of_one_process_and_children_of_a_rank_are_not_told_by_their_process) {
  std::unique_ptr<PosixMemory> creator, beside;
  RT_REQUIRE_OK(PosixMemory::Create(3, kBytes, &creator));
  RT_REQUIRE_OK(PosixMemory::Open(creator->name(), creator->nonce(), 1, 3, &beside));
  RT_CHECK(!creator->HasEnded(1) && !beside->HasEnded(0));
  Member rank(*creator, 2, [](PosixMemory* memory) {
    memory->control().place(2).life.Begin();
    const pid_t parent = getpid(), worker = fork();
    if (worker == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      while (getppid() == parent) pause();  // it may have been killed before the signal was asked for
      _exit(0);
    }
    const pid_t brief = fork();
    if (brief == 0) _exit(0);
    waitpid(brief, nullptr, 0);
  });
  RT_REQUIRE(rank.is_there());
  RT_CHECK(!creator->HasEnded(2) && !creator->control().place(2).life.Died());
  rank.Kill();
  RT_CHECK(creator->HasEnded(2) && creator->control().place(2).life.Died());
}

// Without a free descriptor the process cannot be watched; it is, once there is one.
RT_TEST(a_process_is_watched_once_there_is_a_descriptor) {
  std::unique_ptr<PosixMemory> creator;
  RT_REQUIRE_OK(PosixMemory::Create(2, kBytes, &creator));
  Member member(*creator, 1, [](PosixMemory*) {});
  RT_REQUIRE(member.is_there());
  rlimit limit{};
  RT_REQUIRE_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  const rlimit none = {0, limit.rlim_max};
  RT_REQUIRE_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  RT_CHECK(!creator->HasEnded(1));
  RT_REQUIRE_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  RT_CHECK(!creator->HasEnded(1));
  member.Kill();
  RT_CHECK(creator->HasEnded(1));
}

RT_TEST(windows_of_several_sets_do_not_touch) {
  std::unique_ptr<PosixMemory> creator, member;
  RT_REQUIRE_OK(PosixMemory::Create(2, kBytes, &creator));
  RT_REQUIRE_OK(PosixMemory::Open(creator->name(), creator->nonce(), 1, 2, &member));
  for (int set : {0, 1, 2, 100}) {
    char* window;
    RT_REQUIRE_OK(creator->MapWindow(set, 2, kBytes, &window));
    RT_CHECK(Zero(window, kBytes));
    std::memset(window, set + 1, kBytes);
  }
  char* window = nullptr;
  for (int set : {100, 0, 1, 2}) {
    RT_REQUIRE_OK(member->MapWindow(set, 2, kBytes, &window));
    for (size_t byte : {size_t{0}, kBytes / 2, kBytes - 1}) RT_CHECK_EQ(int{window[byte]}, set + 1);
  }
  creator->UnmapWindow(2);
  RT_CHECK_EQ(int{window[0]}, 3);  // the other one may still look
  member->UnmapWindow(2);
  RT_REQUIRE_OK(creator->MapWindow(2, 2, kBytes, &window));
  RT_CHECK(Zero(window, kBytes));  // its pages have gone
  member->UnmapWindow(77);         // never mapped
}

RT_TEST(processes_ring_each_other) {
  std::unique_ptr<PosixMemory> creator;
  RT_REQUIRE_OK(PosixMemory::Create(2, kBytes, &creator));
  const std::string name = creator->name();
  const uint64_t nonce = creator->nonce();
  constexpr int kRounds = 500;
  const pid_t child = fork();
  RT_REQUIRE(child >= 0);
  // Counts in the window: the child answers each odd number with the next even one.
  auto await = [](HostMemory& memory, std::atomic<uint32_t>& word, uint32_t value) {
    Doorbell& doorbell = memory.doorbell(memory.local_rank());
    const Nanoseconds deadline = DeadlineAfter(60);
    while (word.load(std::memory_order_acquire) != value && Now() < deadline) {
      const uint32_t ticket = doorbell.PrepareSleep();
      if (word.load(std::memory_order_acquire) == value) {
        doorbell.CancelSleep();
        break;
      }
      doorbell.Sleep(ticket, deadline);
    }
    return word.load(std::memory_order_acquire) == value;
  };
  if (child == 0) {
    std::unique_ptr<PosixMemory> member;
    char* window = nullptr;
    if (!PosixMemory::Open(name, nonce, 1, 2, &member).ok() || !member->MapWindow(0, 2, kBytes, &window).ok()) _exit(1);
    auto& word = *reinterpret_cast<std::atomic<uint32_t>*>(window);
    for (uint32_t round = 0; round < kRounds; ++round) {
      if (!await(*member, word, 2 * round + 1)) _exit(2);
      word.store(2 * round + 2, std::memory_order_release);
      member->doorbell(0).Ring();
    }
    _exit(0);
  }
  char* window;
  RT_REQUIRE_OK(creator->MapWindow(0, 2, kBytes, &window));
  auto& word = *reinterpret_cast<std::atomic<uint32_t>*>(window);
  bool answered = true;
  for (uint32_t round = 0; round < kRounds && answered; ++round) {
    word.store(2 * round + 1, std::memory_order_release);
    creator->doorbell(1).Ring();
    answered = await(*creator, word, 2 * round + 2);
  }
  RT_CHECK(answered);
  int status = -1;
  RT_CHECK_EQ(waitpid(child, &status, 0), child);
  RT_CHECK_EQ(status, 0);
}

}  // namespace
}  // namespace ringtrain
