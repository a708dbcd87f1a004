// Mutex: a lock that says what it guards, so that the compiler can hold the code to it. Every lock of the core is one.
//
// Clang checks the annotations (tests/project/test_lint.py): a field cannot be touched without its lock. To other
// compilers they are nothing. What is shared between processes (doorbells, life signs, windows) is atomic and has no
// lock.
#ifndef RINGTRAIN_BASE_MUTEX_H_
#define RINGTRAIN_BASE_MUTEX_H_

#include <mutex>

#if defined(__clang__)
#define RT_THREAD_SAFETY(annotation) __attribute__((annotation))
#else
#define RT_THREAD_SAFETY(annotation)
#endif

#define RT_GUARDED_BY(mutex) RT_THREAD_SAFETY(guarded_by(mutex))         // a field
#define RT_PT_GUARDED_BY(mutex) RT_THREAD_SAFETY(pt_guarded_by(mutex))   // what a pointer points to
#define RT_REQUIRES(mutex) RT_THREAD_SAFETY(requires_capability(mutex))  // a function that its holder alone may call
#define RT_NO_THREAD_SAFETY RT_THREAD_SAFETY(no_thread_safety_analysis)  // one that takes it for another to give

namespace ringtrain {

class RT_THREAD_SAFETY(capability("mutex")) Mutex {
 public:
  void Lock() RT_THREAD_SAFETY(acquire_capability()) { mutex_.lock(); }
  void Unlock() RT_THREAD_SAFETY(release_capability()) { mutex_.unlock(); }
  bool TryLock() RT_THREAD_SAFETY(try_acquire_capability(true)) { return mutex_.try_lock(); }

 private:
  std::mutex mutex_;
};

// Holds a mutex until the end of its block.
class RT_THREAD_SAFETY(scoped_lockable) MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) RT_THREAD_SAFETY(acquire_capability(mutex)) : mutex_(mutex) { mutex_.Lock(); }
  ~MutexLock() RT_THREAD_SAFETY(release_capability()) { mutex_.Unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

}  // namespace ringtrain
#endif  // RINGTRAIN_BASE_MUTEX_H_
