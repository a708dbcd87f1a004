#include "base/patient_files.h"

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <future>
#include <system_error>
#include <thread>
#include <utility>

#include "base/writer.h"

namespace ringtrain {
namespace {

struct Outcome {
  std::string problem, text;
};

template <typename Action>
Outcome WithPatience(Action action) {
  std::future<Outcome> done;
  try {
    std::packaged_task<Outcome()> task(std::move(action));
    done = task.get_future();
    std::thread(std::move(task)).detach();
  } catch (const std::exception& problem) {  // no thread, or no memory
    return {problem.what(), ""};
  }
  if (done.wait_for(std::chrono::duration<double>(kFilePatience)) == std::future_status::ready) return done.get();
  return {"the file system has not done so for " + std::to_string(static_cast<int>(kFilePatience)) + " s", ""};
}

Outcome Read(const std::string& path, size_t most_bytes) {
  std::FILE* const file = std::fopen(path.c_str(), "re");
  if (file == nullptr) return {errno == ENOENT ? "" : std::strerror(errno), ""};
  Outcome outcome;
  outcome.text.resize(most_bytes);
  outcome.text.resize(std::fread(outcome.text.data(), 1, most_bytes, file));
  if (std::ferror(file) != 0) outcome = {std::strerror(errno), ""};
  std::fclose(file);
  return outcome;
}

}  // namespace

std::string ReplaceFile(const std::string& path, const std::string& text) {
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  std::error_code error;
  if (!folder.empty()) std::filesystem::create_directories(folder, error);
  if (error) return error.message();
  const std::string growing = path + ".growing";
  std::FILE* const file = std::fopen(growing.c_str(), "we");
  if (file == nullptr) return std::strerror(errno);
  const bool written = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  const bool closed = std::fclose(file) == 0;
  if (written && closed && std::rename(growing.c_str(), path.c_str()) == 0) return "";
  const std::string problem = std::strerror(errno);
  std::remove(growing.c_str());
  return problem;
}

std::string ReadFile(const std::string& path, size_t most_bytes, std::string* text) {
  Outcome outcome = WithPatience([path, most_bytes] { return Read(path, most_bytes); });
  *text = std::move(outcome.text);
  return outcome.problem;
}

}  // namespace ringtrain
