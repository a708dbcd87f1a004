#include "core/tuner.h"

#include "base/decimal.h"
#include "base/patient_files.h"
#include "core/version.h"

namespace ringtrain {
namespace {

constexpr size_t kMostMemory = 1 << 20;  // bytes of a file

SearchPlan PlanFor(const Options& options, bool has_streams) {
  SearchPlan plan;
  plan.start = SettingsOf(options);
  plan.steps_per_sample = static_cast<int>(options.autotune_steps_per_sample);
  plan.max_samples = static_cast<int>(options.autotune_max_samples);
  for (size_t i = 0; i < plan.values.size(); ++i) {
    const auto tunable = static_cast<Tunable>(i);
    if (!options.given(NameOf(tunable))) plan.values[i] = ValuesOf(tunable);
  }
  if (!has_streams) plan.values[static_cast<size_t>(Tunable::tcp_streams)].clear();
  return plan;
}

std::string HostsText(const World& world) {
  std::string text;
  for (int rank = 0; rank < world.size; ++rank)
    text += world.host_names[static_cast<size_t>(rank)] + " " +
            std::to_string(world.host_of[static_cast<size_t>(rank)]) + "\n";
  return text;
}

// The file's first line, and of each sample.
std::string LogHead() {
  std::string line;
  for (int i = 0; i < kTunables; ++i) line += std::string(NameOf(static_cast<Tunable>(i))) + ",";
  return line + "step_ms,verdict\n";
}

std::string LogLine(const TuningSearch::Sample& sample) {
  std::string line;
  for (int64_t value : sample.settings) line += std::to_string(value) + ",";
  return line + Decimal("%.3f", static_cast<double>(sample.step) / 1e6) + "," + sample.verdict + "\n";
}

}  // namespace

Tuner::Tuner(const Options& options, const World& world, const std::string& wire, bool has_streams, Tuned* tuned,
             Log* log, Writer* writer)
    : options_(options),
      facts_{kVersion, wire, HostsText(world), TextOf(SettingsOf(options))},
      tuned_(tuned),
      log_(log),
      writer_(writer),
      search_(PlanFor(options, has_streams)),
      held_(SettingsOf(options)),
      log_text_(LogHead()) {
  tuned_->SetState("learning");
  if (options_.autotune_cache.empty()) return;
  std::string text;
  const std::string problem = ReadFile(options_.autotune_cache, kMostMemory, &text);
  if (!problem.empty()) Warn(log_, "autotune_cache", options_.autotune_cache, "read", problem);
  if (problem.empty() && !memory_.Read(text))
    Warn(log_, "autotune_cache", options_.autotune_cache, "one of this release", "it is not; it will be written anew");
}

std::optional<Settings> Tuner::Began(Nanoseconds now, const std::vector<Response>& responses) {
  if (over_) return {};
  for (const Response& response : responses)
    if (const std::optional<Nanoseconds> took = clock_.Saw(now, response)) EndStep(*took);
  if (searches_ && clock_.since() > kGoneAfterSteps * clock_.operations()) {
    search_.Stop();
    End("stopped");
  }
  if (search_.wanted() == held_) return {};
  return held_ = search_.wanted();
}

void Tuner::EndStep(Nanoseconds took) {
  if (over_) return;
  if (!searches_) {
    if (clock_.steps() > options_.autotune_warmup_samples * options_.autotune_steps_per_sample) Begin();
    return;
  }
  const std::optional<TuningSearch::Sample> sample = search_.StepTook(took);
  if (!sample) return;
  Write(*sample);
  if (search_.done()) Remember();
}

void Tuner::Begin() {
  clock_.StopLearning();
  searches_ = true;
  std::vector<std::string> facts = facts_;
  facts.push_back(clock_.model());
  key_ = KeyOf(facts);
  const std::optional<Settings> found = memory_.Find(key_);
  if (!found) return tuned_->SetState("searching");
  search_.Use(*found);
  End("remembered");
}

void Tuner::Remember() {
  End("tuned");
  memory_.Keep(key_, search_.best());
  if (options_.autotune_cache.empty()) return;
  writer_->Do(
      "file '" + options_.autotune_cache + "' of autotune_cache",
      [path = options_.autotune_cache, text = memory_.Text()] { return ReplaceFile(path, text); },
      [log = log_, path = options_.autotune_cache](const std::string& why) {
        Warn(log, "autotune_cache", path, "written", why);
      });
}

void Tuner::End(const char* state) {
  over_ = true;
  tuned_->SetState(state);
  log_->Info(std::string("autotune: ") + state + ", " + TextOf(search_.best()));
}

void Tuner::Write(const TuningSearch::Sample& sample) {
  log_text_ += LogLine(sample);
  if (options_.autotune_log.empty()) return;
  writer_->Do(
      "file '" + options_.autotune_log + "' of autotune_log",
      [path = options_.autotune_log, text = log_text_] { return ReplaceFile(path, text); },
      [log = log_, path = options_.autotune_log, told = log_fails_](const std::string& why) {
        if (!std::exchange(*told, true)) Warn(log, "autotune_log", path, "written", why);
      });
}

void Tuner::Warn(Log* log, const char* option, const std::string& path, const char* expected,
                 const std::string& found) {
  log->Warning("autotune: the file '" + path + "' of " + option + " must be " + expected + ", but " + found +
               ". Training goes on without it.");
}

}  // namespace ringtrain
