// A library to preload: counts the calls that one library makes of C functions, and has one of them fail.
//
// A call counts if it comes from the watched library, or from the C or C++ library on its behalf. Those of one function
// with the same frames of the watched library on their stacks are of one site. The k-th call of a chosen function and
// site fails with a chosen error and does nothing; where `always` is set, so do all later ones of the function.
// tests/faults/failing_calls.py chooses by watch_calls_of and fail_call, in the process itself.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <fcntl.h>
#include <link.h>
#include <linux/futex.h>
#include <netdb.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);

// ---- which calls count ----

typedef struct {
  const char *name;
  uintptr_t begin, end;
} Range;

static Range watched;
// Not the loader, which ends the process itself where it finds no memory for a thread's variables.
static Range carriers[] = {{"libstdc++.so", 0, 0}, {"libc.so", 0, 0}};
enum { kCarriers = sizeof carriers / sizeof carriers[0], kFrames = 32 };
static _Thread_local int busy;  // a call made while one is judged

static int lies_in(const Range *range, const void *address) {
  return (uintptr_t)address >= range->begin && (uintptr_t)address < range->end;
}

static int carries(const void *address) {
  for (int i = 0; i < kCarriers; ++i)
    if (lies_in(&carriers[i], address)) return 1;
  return 0;
}

// `name` and what is mapped for it, if this is the library of that name.
static void note_range(Range *range, const struct dl_phdr_info *library) {
  const char *slash = strrchr(library->dlpi_name, '/');
  const char *name = slash == NULL ? library->dlpi_name : slash + 1;
  if (range->name == NULL || strncmp(name, range->name, strlen(range->name)) != 0) return;
  for (int i = 0; i < library->dlpi_phnum; ++i) {
    if (library->dlpi_phdr[i].p_type != PT_LOAD) continue;
    const uintptr_t begin = library->dlpi_addr + library->dlpi_phdr[i].p_vaddr;
    if (range->begin == 0 || begin < range->begin) range->begin = begin;
    if (begin + library->dlpi_phdr[i].p_memsz > range->end) range->end = begin + library->dlpi_phdr[i].p_memsz;
  }
}

static int note_ranges(struct dl_phdr_info *library, size_t size, void *unused) {
  (void)size, (void)unused;
  note_range(&watched, library);
  for (int i = 0; i < kCarriers; ++i) note_range(&carriers[i], library);
  return 0;
}

// The site of a call with this return address: a digest of the watched library's frames on its stack. 0 if it does not
// come from there.
static uint64_t site_of(const void *caller) {
  if (watched.end == 0 || busy || !(lies_in(&watched, caller) || carries(caller))) return 0;
  busy = 1;
  void *frames[kFrames];
  const int count = backtrace(frames, kFrames);
  int found = 0;
  while (found < count && frames[found] != caller) ++found;  // this library's own frames come before it
  while (found < count && carries(frames[found])) ++found;
  uint64_t digest = 0;
  if (found < count && lies_in(&watched, frames[found]))
    for (digest = 1; found < count; ++found)
      if (lies_in(&watched, frames[found]))
        digest = (digest ^ ((uintptr_t)frames[found] - watched.begin)) * UINT64_C(0x9E3779B97F4A7C15);
  busy = 0;
  return digest;
}

// ---- which one fails ----

typedef struct {
  const char *name;
} Function;

// The calls of one function from one site.
typedef struct {
  atomic_uintptr_t function;
  atomic_ulong site;
  atomic_long calls;
} Place;

enum { kMostFunctions = 96, kMostPlaces = 1 << 14 };
static Function functions[kMostFunctions];
static atomic_int function_count;
static Place places[kMostPlaces];
static const Function *chosen;
static uint64_t chosen_site;
static long chosen_call;
static int chosen_error, chosen_always;
static atomic_int has_failed;

static Place *place_of(const Function *function, uint64_t site) {
  for (size_t at = (site ^ (uintptr_t)function / sizeof *function) % kMostPlaces, tried = 0; tried < kMostPlaces;
       at = (at + 1) % kMostPlaces, ++tried) {
    uint64_t empty = 0;
    if (atomic_compare_exchange_strong(&places[at].site, &empty, site))
      atomic_store(&places[at].function, (uintptr_t)function);
    else if (empty != site)
      continue;
    while (atomic_load(&places[at].function) == 0) continue;  // another thread is about to
    if (atomic_load(&places[at].function) == (uintptr_t)function) return &places[at];
  }
  abort();
}

// Writes where the first call fails: the places in the watched library that are on its stack.
static void tell(void) {
  busy = 1;
  void *frames[kFrames];
  const int count = backtrace(frames, kFrames);
  char line[kFrames * 20] = "failed at";
  for (int i = 0; i < count; ++i)
    if (lies_in(&watched, frames[i]))
      sprintf(line + strlen(line), " 0x%lx", (unsigned long)((uintptr_t)frames[i] - watched.begin));
  strcat(line, "\n");
  if (write(STDERR_FILENO, line, strlen(line)) < 0) abort();
  busy = 0;
}

// The error with which this call is to fail; 0 if it is to go on.
static int error_of(const Function *function, const void *caller) {
  if (chosen != NULL && function != chosen) return 0;  // they need not be told apart
  const uint64_t site = site_of(caller);
  if (site == 0) return 0;
  const long number = atomic_fetch_add(&place_of(function, site)->calls, 1) + 1;
  const int is_chosen = function == chosen && site == chosen_site && number == chosen_call;
  if (!is_chosen && !(function == chosen && chosen_always && atomic_load(&has_failed))) return 0;
  if (atomic_exchange(&has_failed, 1) == 0) tell();
  return chosen_error;
}

// ---- for Python, by ctypes ----

// From now on the calls of the library whose file's name begins so count; 0 if there is none.
int watch_calls_of(const char *library) {
  void *frames[kFrames];
  backtrace(frames, kFrames);  // the first time it loads what unwinds the stack
  watched.name = strdup(library);
  dl_iterate_phdr(note_ranges, NULL);
  return watched.end != 0;
}

// 0 if no such function is looked at.
int fail_call(const char *name, uint64_t site, long call, int error, int always) {
  chosen_site = site;
  chosen_call = call;
  chosen_error = error;
  chosen_always = always;
  for (int i = 0; i < atomic_load(&function_count); ++i)
    if (strcmp(functions[i].name, name) == 0) chosen = &functions[i];
  return chosen != NULL;
}

void fail_no_call(void) { chosen = NULL; }

// The n-th place: its function, site and number of calls. 0 if there is none under this number, -1 behind the last.
int called_place(int number, const char **function, uint64_t *site, long *calls) {
  if (number >= kMostPlaces) return -1;
  *site = atomic_load(&places[number].site);
  if (*site == 0) return 0;
  *function = ((const Function *)atomic_load(&places[number].function))->name;
  *calls = atomic_load(&places[number].calls);
  return 1;
}

// ---- the functions ----

#define JOIN_AGAIN(a, b) a##b
#define JOIN(a, b) JOIN_AGAIN(a, b)

// Registers a function before main; NAME##_function is its record.
#define WATCHED(function)                                            \
  static Function *function##_function;                              \
  __attribute__((constructor)) static void function##_register(void) { \
    function##_function = &functions[atomic_fetch_add(&function_count, 1)]; \
    function##_function->name = #function;                           \
  }

#define ERROR_OF(function) \
  (function##_function == NULL ? 0 : error_of(function##_function, __builtin_return_address(0)))

// The one that is behind this library's.
#define REAL(function)                                                                  \
  ({                                                                                    \
    static _Atomic(__typeof__(&function)) real_;                                        \
    if (atomic_load(&real_) == NULL) atomic_store(&real_, (__typeof__(&function))dlsym(RTLD_NEXT, #function)); \
    atomic_load(&real_);                                                                \
  })

// A function that fails with `failure` and errno.
#define SETS_ERRNO(type, failure, function, parameters, arguments) \
  WATCHED(function)                                                \
  type function parameters {                                       \
    const int error = ERROR_OF(function);                          \
    if (error == 0) return REAL(function) arguments;               \
    errno = error;                                                 \
    return failure;                                                \
  }

// One that returns its error.
#define RETURNS_ERROR(function, parameters, arguments) \
  WATCHED(function)                                    \
  int function parameters {                            \
    const int error = ERROR_OF(function);              \
    return error != 0 ? error : REAL(function) arguments; \
  }

// Memory. The real ones by names that need no search, which would want memory itself.
WATCHED(malloc)
void *malloc(size_t bytes) {
  const int error = ERROR_OF(malloc);
  if (error == 0) return __libc_malloc(bytes);
  errno = error;
  return NULL;
}

WATCHED(calloc)
void *calloc(size_t count, size_t bytes) {
  const int error = ERROR_OF(calloc);
  if (error == 0) return __libc_calloc(count, bytes);
  errno = error;
  return NULL;
}

WATCHED(realloc)
void *realloc(void *memory, size_t bytes) {
  const int error = ERROR_OF(realloc);
  if (error == 0) return __libc_realloc(memory, bytes);
  errno = error;
  return NULL;
}

WATCHED(posix_memalign)
int posix_memalign(void **memory, size_t alignment, size_t bytes) {
  const int error = ERROR_OF(posix_memalign);
  if (error != 0) return error;
  *memory = __libc_memalign(alignment, bytes);
  return *memory == NULL ? ENOMEM : 0;
}

SETS_ERRNO(void *, MAP_FAILED, mmap, (void *at, size_t bytes, int protection, int flags, int file, off_t offset),
           (at, bytes, protection, flags, file, offset))
SETS_ERRNO(int, -1, madvise, (void *at, size_t bytes, int advice), (at, bytes, advice))

// Files.
SETS_ERRNO(int, -1, shm_open, (const char *name, int flags, mode_t mode), (name, flags, mode))
SETS_ERRNO(int, -1, fallocate, (int file, int mode, off_t offset, off_t bytes), (file, mode, offset, bytes))
RETURNS_ERROR(posix_fallocate, (int file, off_t offset, off_t bytes), (file, offset, bytes))
SETS_ERRNO(int, -1, stat, (const char *path, struct stat *found), (path, found))
SETS_ERRNO(int, -1, fstat, (int file, struct stat *found), (file, found))
SETS_ERRNO(FILE *, NULL, fopen, (const char *path, const char *mode), (path, mode))
SETS_ERRNO(FILE *, NULL, fopen64, (const char *path, const char *mode), (path, mode))
SETS_ERRNO(ssize_t, -1, read, (int file, void *bytes, size_t count), (file, bytes, count))
SETS_ERRNO(ssize_t, -1, write, (int file, const void *bytes, size_t count), (file, bytes, count))
SETS_ERRNO(ssize_t, -1, pread, (int file, void *bytes, size_t count, off_t at), (file, bytes, count, at))
SETS_ERRNO(ssize_t, -1, pwrite, (int file, const void *bytes, size_t count, off_t at), (file, bytes, count, at))

WATCHED(open)
int open(const char *path, int flags, ...) {
  const int error = ERROR_OF(open);
  va_list rest;
  va_start(rest, flags);
  const mode_t mode = (flags & O_CREAT) != 0 ? va_arg(rest, mode_t) : 0;
  va_end(rest);
  if (error == 0) return REAL(open)(path, flags, mode);
  errno = error;
  return -1;
}

// Connections.
SETS_ERRNO(int, -1, socket, (int domain, int type, int protocol), (domain, type, protocol))
SETS_ERRNO(int, -1, bind, (int file, const struct sockaddr *to, socklen_t bytes), (file, to, bytes))
SETS_ERRNO(int, -1, listen, (int file, int backlog), (file, backlog))
SETS_ERRNO(int, -1, accept4, (int file, struct sockaddr *from, socklen_t *bytes, int flags), (file, from, bytes, flags))
SETS_ERRNO(int, -1, connect, (int file, const struct sockaddr *to, socklen_t bytes), (file, to, bytes))
SETS_ERRNO(int, -1, getsockname, (int file, struct sockaddr *name, socklen_t *bytes), (file, name, bytes))
SETS_ERRNO(int, -1, getpeername, (int file, struct sockaddr *name, socklen_t *bytes), (file, name, bytes))
SETS_ERRNO(int, -1, getsockopt, (int file, int level, int name, void *value, socklen_t *bytes),
           (file, level, name, value, bytes))
SETS_ERRNO(int, -1, setsockopt, (int file, int level, int name, const void *value, socklen_t bytes),
           (file, level, name, value, bytes))
SETS_ERRNO(ssize_t, -1, send, (int file, const void *bytes, size_t count, int flags), (file, bytes, count, flags))
SETS_ERRNO(ssize_t, -1, sendmsg, (int file, const struct msghdr *message, int flags), (file, message, flags))
SETS_ERRNO(ssize_t, -1, recv, (int file, void *bytes, size_t count, int flags), (file, bytes, count, flags))
SETS_ERRNO(ssize_t, -1, recvmsg, (int file, struct msghdr *message, int flags), (file, message, flags))
RETURNS_ERROR(getaddrinfo, (const char *host, const char *service, const struct addrinfo *hints, struct addrinfo **found),
              (host, service, hints, found))
RETURNS_ERROR(getnameinfo, (const struct sockaddr *address, socklen_t bytes, char *host, socklen_t host_bytes,
                            char *service, socklen_t service_bytes, int flags),
              (address, bytes, host, host_bytes, service, service_bytes, flags))
SETS_ERRNO(int, -1, gethostname, (char *name, size_t bytes), (name, bytes))

// Waiting.
SETS_ERRNO(int, -1, epoll_create1, (int flags), (flags))

// What is changed or taken out wants nothing, so it cannot fail.
WATCHED(epoll_ctl)
int epoll_ctl(int set, int operation, int file, struct epoll_event *event) {
  const int error = operation == EPOLL_CTL_ADD ? ERROR_OF(epoll_ctl) : 0;
  if (error == 0) return REAL(epoll_ctl)(set, operation, file, event);
  errno = error;
  return -1;
}

SETS_ERRNO(int, -1, epoll_wait, (int set, struct epoll_event *events, int most, int milliseconds),
           (set, events, most, milliseconds))
SETS_ERRNO(int, -1, eventfd, (unsigned int value, int flags), (value, flags))
SETS_ERRNO(int, -1, poll, (struct pollfd *files, nfds_t count, int milliseconds), (files, count, milliseconds))
SETS_ERRNO(int, -1, nanosleep, (const struct timespec *time, struct timespec *left), (time, left))

WATCHED(ioctl)
int ioctl(int file, unsigned long request, ...) {
  const int error = ERROR_OF(ioctl);
  va_list rest;
  va_start(rest, request);
  void *argument = va_arg(rest, void *);
  va_end(rest);
  if (error == 0) return (int)syscall(SYS_ioctl, file, request, argument);
  errno = error;
  return -1;
}

// Threads and the rest.
RETURNS_ERROR(pthread_create, (pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *argument),
              (thread, attributes, run, argument))
RETURNS_ERROR(pthread_setname_np, (pthread_t thread, const char *name), (thread, name))
SETS_ERRNO(ssize_t, -1, getrandom, (void *bytes, size_t count, unsigned int flags), (bytes, count, flags))
SETS_ERRNO(int, -1, getrlimit, (__rlimit_resource_t resource, struct rlimit *limit), (resource, limit))
SETS_ERRNO(int, -1, sched_getaffinity, (pid_t process, size_t bytes, cpu_set_t *cores), (process, bytes, cores))

// A wait by futex, and other calls of the kernel by number; a wake cannot fail.
WATCHED(futex)
WATCHED(syscall)
long syscall(long number, ...) {
  va_list rest;
  va_start(rest, number);
  long given[6];
  for (int i = 0; i < 6; ++i) given[i] = va_arg(rest, long);
  va_end(rest);
  int error = 0;
  if (number != SYS_futex)
    error = ERROR_OF(syscall);
  else if (given[1] == FUTEX_WAIT)
    error = ERROR_OF(futex);
  if (error == 0) return REAL(syscall)(number, given[0], given[1], given[2], given[3], given[4], given[5]);
  errno = error;
  return -1;
}
