// Writer: a thread for what may block: files and stderr. A file system that hangs, or a launcher that has stopped
// reading, must not keep a driver from what it has to do: a rank whose driver is blocked is taken for dead.
#ifndef RINGTRAIN_BASE_WRITER_H_
#define RINGTRAIN_BASE_WRITER_H_

#include <functional>
#include <memory>
#include <string>
#include <thread>

namespace ringtrain {

constexpr double kFilePatience = 2;  // seconds for a small file at the end of a world

class Writer {
 public:
  using Work = std::function<std::string()>;                   // returns why it has not been done; "" if it has
  using Failed = std::function<void(const std::string& why)>;  // on the writer's thread, while there is a writer

  Writer();
  // Leaves the thread behind with what it is at, which must therefore own all that it touches.
  ~Writer();
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;

  // Any thread; returns at once. One after the other in the order of the calls, but what waits under the same name is
  // replaced where it waits.
  void Do(const std::string& name, Work work, Failed failed);
  // Waits until all is done, and returns "", or the name of what is not done by then.
  std::string Await(double seconds);

 private:
  struct State;
  static void Run(const std::shared_ptr<State>& state);

  const std::shared_ptr<State> state_;
  std::thread thread_;  // once there is something to do
};

}  // namespace ringtrain
#endif  // RINGTRAIN_BASE_WRITER_H_
