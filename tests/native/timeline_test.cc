// The timeline's file: valid JSON all the time, spans of a track follow or nest, bounds are kept.
#include "observe/timeline.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <future>
#include <map>
#include <random>
#include <vector>

#include "check.h"

using namespace ringtrain;

namespace {

// ---- a JSON parser that keeps what the tests look at ----

// One value's members as text: objects' members by name, nested ones as "outer.inner", strings decoded no further than
// escapes.
using Event = std::map<std::string, std::string>;

class Parser {
 public:
  explicit Parser(const std::string& text) : text_(text) {}

  // The events of a trace; false if the text is not a JSON array of objects.
  bool Trace(std::vector<Event>* events) {
    if (!Take('[')) return false;
    do {
      events->emplace_back();
      if (!Object("", &events->back())) return false;
    } while (Take(','));
    return Take(']') && (Skip(), at_ == text_.size());
  }

 private:
  void Skip() {
    while (at_ < text_.size() && std::strchr(" \n\r\t", text_[at_]) != nullptr) ++at_;
  }
  bool Take(char wanted) {
    Skip();
    if (at_ == text_.size() || text_[at_] != wanted) return false;
    ++at_;
    return true;
  }
  bool Object(const std::string& prefix, Event* event) {
    if (!Take('{')) return false;
    do {
      std::string name;
      if (!String(&name) || !Take(':') || !Value(prefix + name, event)) return false;
    } while (Take(','));
    return Take('}');
  }
  bool Value(const std::string& name, Event* event) {
    Skip();
    if (at_ == text_.size()) return false;
    if (text_[at_] == '{') return Object(name + ".", event);
    if (text_[at_] == '"') return String(&(*event)[name]);
    return Number(&(*event)[name]);
  }
  bool Number(std::string* value) {
    const size_t begin = at_;
    if (text_[at_] == '-') ++at_;
    if (!Digits()) return false;
    if (at_ < text_.size() && text_[at_] == '.' && (++at_, !Digits())) return false;
    *value = text_.substr(begin, at_ - begin);
    return true;
  }
  bool Digits() {
    const size_t begin = at_;
    while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9') ++at_;
    return at_ > begin;
  }
  bool String(std::string* value) {
    if (!Take('"')) return false;
    for (; at_ < text_.size() && text_[at_] != '"'; ++at_) {
      if (static_cast<unsigned char>(text_[at_]) < 0x20) return false;
      if (text_[at_] == '\\' && !Escape()) return false;
      *value += text_[at_];
    }
    return Take('"');
  }
  // Steps over the backslash; of \u00XX only the last digit stays, which is enough to compare with.
  bool Escape() {
    if (++at_ == text_.size()) return false;
    if (text_[at_] == 'u') at_ += 4;
    return at_ < text_.size();
  }

  const std::string& text_;
  size_t at_ = 0;
};

std::string ContentOf(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

std::vector<Event> EventsOf(const std::string& path) {
  std::vector<Event> events;
  const std::string text = ContentOf(path);
  const std::string tail = text.substr(text.size() - std::min<size_t>(text.size(), 300));
  if (!Parser(text).Trace(&events)) check::Report(__FILE__, __LINE__, "not JSON: ..." + tail);
  return events;
}

std::vector<Event> Only(const std::vector<Event>& events, const std::string& phase, const std::string& name = "") {
  std::vector<Event> selected;
  for (const Event& event : events)
    if (event.at("ph") == phase && (name.empty() || event.at("name") == name)) selected.push_back(event);
  return selected;
}

// Text of microseconds with three decimals, as nanoseconds.
int64_t NanosecondsOf(const std::string& text) {
  const size_t dot = text.find('.');
  RT_REQUIRE(dot != std::string::npos && text.size() == dot + 4);
  return std::stoll(text.substr(0, dot)) * 1000 + std::stoll(text.substr(dot + 1));
}

// ---- a file that goes away with the test ----

class File {
 public:
  File() {
    const int file = mkstemp(path_);
    RT_REQUIRE(file >= 0);
    close(file);
  }
  ~File() {
    unlink(path_);
    unlink((path() + ".growing").c_str());  // left where a process was killed
  }
  std::string path() const { return path_; }

 private:
  char path_[40] = "/tmp/ringtrain-timeline-XXXXXX";
};

// With the thread that writes.
struct Written {
  Writer writer;
};
class Timed : public Written, public Timeline {
 public:
  Timed() : Timeline(&writer) {}
  void FlushNow() {
    Flush();
    RT_REQUIRE_EQ(writer.Await(60), std::string());
  }
};

void CheckTracksNest(const std::vector<Event>& events) {
  struct Span {
    int64_t begin, end;
  };
  std::map<std::string, std::vector<Span>> open;
  for (const Event& event : Only(events, "X")) {
    const int64_t begin = NanosecondsOf(event.at("ts")), end = begin + NanosecondsOf(event.at("dur"));
    auto& around = open[event.at("tid")];
    while (!around.empty() && around.back().end <= begin) around.pop_back();
    RT_CHECK(around.empty() || (around.back().begin <= begin && end <= around.back().end));
    around.push_back({begin, end});
  }
}

}  // namespace

RT_TEST(a_tensors_stages_are_named_timed_and_sized) {
  File file;
  Timed timeline;
  RT_CHECK(!timeline.enabled());
  RT_REQUIRE_OK(timeline.Start(file.path(), 3, 1000, false, "node-\"b\""));
  RT_CHECK(timeline.enabled());
  const Nanoseconds now = Now();
  timeline.Span("fc1.weight", "allreduce", now, now + 9001, 4096);
  timeline.Span("fc1.weight", "negotiate", now, now + 1000, 0);
  timeline.Span("fc2.bias", "queue", now + 1234, now + 2000, 0);
  RT_REQUIRE_OK(timeline.Stop());
  RT_CHECK(!timeline.enabled());

  const std::vector<Event> events = EventsOf(file.path());
  RT_REQUIRE_EQ(Only(events, "M", "process_name").size(), size_t{1});
  RT_CHECK_EQ(Only(events, "M", "process_name")[0].at("args.name"), "rank 3");
  RT_REQUIRE_EQ(Only(events, "M", "process_labels").size(), size_t{1});
  RT_CHECK_EQ(Only(events, "M", "process_labels")[0].at("args.labels"), "host node-\"b\"");
  const std::vector<Event> tracks = Only(events, "M", "thread_name"), spans = Only(events, "X");
  RT_REQUIRE_EQ(tracks.size(), size_t{2});
  RT_REQUIRE_EQ(spans.size(), size_t{3});
  RT_CHECK_EQ(tracks[0].at("args.name"), "fc1.weight");
  RT_CHECK_EQ(tracks[1].at("args.name"), "fc2.bias");
  RT_CHECK_EQ(spans[0].at("name"), "allreduce");
  RT_CHECK_EQ(spans[0].at("pid"), "3");
  RT_CHECK_EQ(spans[0].at("dur"), "9.001");
  RT_CHECK_EQ(spans[0].at("args.bytes"), "4096");
  RT_CHECK_EQ(spans[1].at("tid"), tracks[0].at("tid"));
  RT_CHECK_EQ(spans[2].at("tid"), tracks[1].at("tid"));
  RT_CHECK_EQ(NanosecondsOf(spans[2].at("ts")) - NanosecondsOf(spans[0].at("ts")), int64_t{1234});
}

RT_TEST(spans_that_overlap_go_to_further_tracks) {
  File file;
  Timed timeline;
  RT_REQUIRE_OK(timeline.Start(file.path(), 0, 1000));
  const Nanoseconds now = Now();
  for (int step = 0; step < 3; ++step) {
    const Nanoseconds begin = now + step * 1000;
    timeline.Span("w", "allreduce", begin, begin + 1000, 0);
    timeline.Span("w", "pack", begin + 100, begin + 600, 0);
    timeline.Span("w", "wire", begin + 200, begin + 800, 0);    // overlaps pack
    timeline.Span("w", "unpack", begin + 300, begin + 900, 0);  // overlaps both
    timeline.Span("w", "reduce", begin + 250, begin + 300, 0);  // begins before what came last
  }
  RT_REQUIRE_OK(timeline.Stop());
  const std::vector<Event> events = EventsOf(file.path());
  RT_CHECK_EQ(Only(events, "X").size(), size_t{15});
  CheckTracksNest(events);
  const std::vector<Event> tracks = Only(events, "M", "thread_name");
  RT_REQUIRE_EQ(tracks.size(), size_t{3});
  RT_CHECK_EQ(tracks[1].at("args.name"), "w (2)");
  RT_CHECK_EQ(tracks[2].at("args.name"), "w (3)");
}

RT_TEST(any_name_is_valid_json) {
  File file;
  Timed timeline;
  RT_REQUIRE_OK(timeline.Start(file.path(), 0, 1000));
  const std::string names[] = {
      "\"quoted\"", "back\\slash",        "line\nbreak\ttab", std::string("nul\0byte", 8), "größe/µ",
      "",           "\xff\xfe not UTF-8", "cut \xe2\x82",     "surrogate \xed\xa0\x80",    std::string(10000, 'n')};
  for (const std::string& name : names) timeline.Span(name, "wire", Now(), Now(), 0);
  RT_REQUIRE_OK(timeline.Stop());
  const std::vector<Event> events = EventsOf(file.path());
  const std::vector<Event> tracks = Only(events, "M", "thread_name");
  RT_REQUIRE_EQ(tracks.size(), sizeof names / sizeof *names);
  RT_CHECK_EQ(tracks[0].at("args.name"), names[0]);
  RT_CHECK_EQ(tracks[1].at("args.name"), names[1]);
  RT_CHECK_EQ(tracks[4].at("args.name"), names[4]);
  RT_CHECK(tracks[9].at("args.name").size() > 1000 &&
           tracks[9].at("args.name").substr(0, 100) == names[9].substr(0, 100));
  const std::string text = ContentOf(file.path());
  RT_CHECK(text.find('\xff') == std::string::npos && text.find("\xed\xa0") == std::string::npos);
  RT_CHECK(text.find("\\ufffd\\ufffd not UTF-8") != std::string::npos);
}

RT_TEST(spans_beyond_the_limit_are_counted) {
  File file;
  Timed timeline;
  RT_REQUIRE_OK(timeline.Start(file.path(), 0, 5));
  for (int i = 0; i < 12; ++i) timeline.Span("w", "wire", Now(), Now(), 0);
  RT_REQUIRE_OK(timeline.Stop());
  const std::vector<Event> events = EventsOf(file.path());
  RT_CHECK_EQ(Only(events, "X").size(), size_t{5});
  RT_REQUIRE_EQ(Only(events, "i").size(), size_t{1});
  RT_CHECK_EQ(Only(events, "i")[0].at("name"), "7 spans dropped");
}

RT_TEST(names_beyond_the_limit_share_tracks) {
  File file;
  Timed timeline;
  RT_REQUIRE_OK(timeline.Start(file.path(), 0, 1000000));
  const Nanoseconds now = Now();
  for (int i = 0; i < 10050; ++i)
    timeline.Span("allreduce.noname." + std::to_string(i), "wire", now + i * 100, now + i * 100 + 50, 0);
  RT_REQUIRE_OK(timeline.Stop());
  const std::vector<Event> events = EventsOf(file.path());
  RT_CHECK_EQ(Only(events, "X").size(), size_t{10050});
  RT_CHECK_EQ(Only(events, "M", "thread_name").size(), size_t{10001});
}

RT_TEST(start_is_refused_while_open_and_where_nothing_can_be_written) {
  File file, other;
  Timed timeline;
  for (const char* path : {"/no/such/folder/trace.json", "/dev/null", "/tmp"})
    RT_CHECK_EQ(timeline.Start(path, 0, 10).code(), StatusCode::kInvalidArgument);
  RT_CHECK(!timeline.enabled());
  RT_CHECK_OK(timeline.Stop());
  RT_REQUIRE_OK(timeline.Start(file.path(), 0, 10));
  RT_CHECK_EQ(timeline.Start(other.path(), 0, 10).code(), StatusCode::kInvalidArgument);
  RT_REQUIRE_OK(timeline.Stop());
  RT_REQUIRE_OK(timeline.Start(other.path(), 0, 10));
  timeline.Span("w", "wire", Now(), Now(), 0);
  RT_REQUIRE_OK(timeline.Stop());
  RT_CHECK_EQ(Only(EventsOf(other.path()), "X").size(), size_t{1});
}

RT_TEST(flush_makes_the_spans_so_far_readable) {
  File file;
  Timed timeline;
  RT_REQUIRE_OK(timeline.Start(file.path(), 0, 1000000));
  RT_CHECK_EQ(Only(EventsOf(file.path()), "X").size(), size_t{0});
  size_t spans = 0;
  for (size_t burst : {1, 2, 40, 3000, 0, 1}) {
    for (size_t i = 0; i < burst; ++i) timeline.Span("w", "wire", Now(), Now(), 1);
    spans += burst;
    timeline.FlushNow();
    RT_CHECK_EQ(Only(EventsOf(file.path()), "X").size(), spans);
  }
  RT_REQUIRE_OK(timeline.Stop());
}

RT_TEST(full_disk_ends_the_trace_with_an_error_and_a_valid_file) {
  File file;
  const pid_t child = fork();
  RT_REQUIRE(child >= 0);
  if (child == 0) {  // a file-size limit stands for the full disk
    signal(SIGXFSZ, SIG_IGN);
    const rlimit limit = {100000, 100000};
    setrlimit(RLIMIT_FSIZE, &limit);
    Timed timeline;
    bool right = timeline.Start(file.path(), 0, 1000000).ok();
    for (int i = 0; i < 20000; ++i) timeline.Span("w", "wire", Now(), Now(), 1);
    timeline.FlushNow();
    timeline.Flush();
    right = right && !timeline.enabled() && timeline.Stop().code() == StatusCode::kInternal;
    _exit(right ? 0 : 1);
  }
  int status = 0;
  RT_REQUIRE_EQ(waitpid(child, &status, 0), child);
  RT_CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  RT_CHECK(Only(EventsOf(file.path()), "X").size() > 10);
}

RT_TEST(a_killed_process_leaves_valid_json) {
  std::mt19937 random(5);
  for (int round = 0; round < 60; ++round) {
    File file;
    const pid_t child = fork();
    RT_REQUIRE(child >= 0);
    if (child == 0) {
      Timed timeline;
      if (!timeline.Start(file.path(), 0, 100000000).ok()) _exit(1);
      for (int i = 0;; ++i) {
        timeline.Span("tensor." + std::to_string(i % 50), "allreduce", Now(), Now(), i);
        if (i % 1000 == 0) timeline.Flush();
      }
    }
    usleep(static_cast<useconds_t>(500 + random() % 20000));
    kill(child, SIGKILL);
    int status = 0;
    RT_REQUIRE_EQ(waitpid(child, &status, 0), child);
    RT_CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    if (!ContentOf(file.path()).empty()) EventsOf(file.path());  // it may have been killed before it began
  }
}

RT_TEST(started_and_stopped_while_spans_come) {
  File file;
  Timed timeline;
  std::atomic<bool> done{false};
  std::thread coordinator([&] {
    while (!done) {
      timeline.Span("w", "wire", Now(), Now(), 1);
      timeline.Flush();
    }
  });
  for (int round = 0; round < 50; ++round) {
    RT_CHECK_OK(timeline.Start(file.path(), 0, 100));
    RT_CHECK_OK(timeline.Stop());
    EventsOf(file.path());
  }
  done = true;
  coordinator.join();
}

// The file system hangs: spans go on coming at once, those for which there is no room are counted, and the rest is
// written once it goes on.
RT_TEST(a_file_system_that_hangs_keeps_nobody) {
  File file;
  Timed timeline;
  RT_REQUIRE_OK(timeline.Start(file.path(), 0, 1000000));
  std::promise<void> goes_on;
  timeline.writer.Do(
      "hangs", [end = goes_on.get_future().share()] { return end.wait(), std::string(); }, [](const std::string&) {});
  const std::string name(1000, 'n');
  const size_t more = ringtrain::TraceFile::kMostWaiting / name.size();
  for (size_t i = 0; i < more; ++i) timeline.Span("w", name, Now(), Now(), 1);
  timeline.Flush();
  RT_CHECK(timeline.enabled());
  goes_on.set_value();
  RT_REQUIRE_OK(timeline.Stop());
  const std::vector<Event> events = EventsOf(file.path());
  const size_t written = Only(events, "X").size();
  RT_CHECK(written > more / 2 && written < more);
  RT_REQUIRE_EQ(Only(events, "i").size(), size_t{1});
  RT_CHECK_EQ(Only(events, "i")[0].at("name"), std::to_string(more - written) + " spans dropped");
}
