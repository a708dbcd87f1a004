// Tuner: rank 0's, with option autotune. It hears of each operation of the world that has been agreed on, and says from
// where on all ranks shall use other settings; the protocol tells them (Protocol::Tune). Steps are found by
// step_clock.h, decided is in tuning_search.h, remembered in tuning_memory.h; here is the order of it, and the files.
//
// First it learns what a step is, for the samples that warm up. What is remembered for such steps on these hosts is
// used at once; else it searches, and keeps what it has found.
#ifndef RINGTRAIN_CORE_TUNER_H_
#define RINGTRAIN_CORE_TUNER_H_

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/log.h"
#include "base/options.h"
#include "base/tuned.h"
#include "base/writer.h"
#include "core/request.h"
#include "core/step_clock.h"
#include "core/tuning_memory.h"
#include "core/tuning_search.h"
#include "transport/world.h"

namespace ringtrain {

class Tuner {
 public:
  // wire: what carries tensors between hosts. has_streams: whether it heeds tcp_streams.
  Tuner(const Options& options, const World& world, const std::string& wire, bool has_streams, Tuned* tuned, Log* log,
        Writer* writer);

  // The world has agreed on these, in this order. Returns settings that shall hold from here on, if they are others.
  std::optional<Settings> Began(Nanoseconds now, const std::vector<Response>& responses);
  // It will return none any more.
  bool over() const { return over_; }

 private:
  // A step of which nothing has come for so many times its operations is no longer trained.
  static constexpr int kGoneAfterSteps = 100;

  void EndStep(Nanoseconds took);
  void Begin();
  void Remember();
  void End(const char* state);
  void Write(const TuningSearch::Sample& sample);
  static void Warn(Log* log, const char* option, const std::string& path, const char* expected,
                   const std::string& found);

  const Options& options_;
  const std::vector<std::string> facts_;  // that a finding holds for, beside the model
  Tuned* const tuned_;
  Log* const log_;
  Writer* const writer_;
  StepClock clock_;
  TuningMemory memory_;
  TuningSearch search_;
  bool searches_ = false, over_ = false;
  Settings held_;  // by all ranks
  std::string key_;
  std::string log_text_;
  const std::shared_ptr<bool> log_fails_ = std::make_shared<bool>(false);  // the writer's
};

}  // namespace ringtrain
#endif  // RINGTRAIN_CORE_TUNER_H_
