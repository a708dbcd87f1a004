// What the authority of an elastic job is told by numbers: how many worlds there may be, how many ranks one must have,
// and when a slot may be tried again. Whole jobs are simulated in tests/simulation/elastic.
#include "elastic/authority.h"

#include <algorithm>
#include <memory>

#include "check.h"

namespace ringtrain {
namespace {

constexpr Nanoseconds kPause = 10 * kSecond;  // the first one

// One host with four slots, and a process in each; the launcher's side of it.
struct Job {
  explicit Job(int reset_limit, int minimum = 1) {
    options.hosts = {{"a", 4}};
    options.reset_limit = reset_limit;
    options.minimum = minimum;
    options.silence = options.grace = options.wait = 100000 * kSecond;
    options.first_pause = kPause;
    options.longest_pause = 60 * kPause;
    options.random = [drawn = std::make_shared<uint64_t>(0)] { return ++*drawn; };
    authority = std::make_unique<Authority>(options);
    authority->Begin(0);
    authority->HostCame(0, "a", &actions);
    Hear(0, ControlType::kPresent, 0);
    for (int slot = 0; slot < 4; ++slot) Hear(0, ControlType::kReady, slot);
    for (const AuthorityAction& action : actions)
      if (const auto* write = std::get_if<authority_action::Write>(&action)) record = write->record;
    Form({0, 1, 2, 3});
  }

  // life: the number of the process in its slot.
  void Hear(Nanoseconds now, ControlType type, int slot, uint64_t life = 1) {
    ControlFrame frame;
    frame.type = type;
    if (type == ControlType::kReport || type == ControlType::kFormed) frame.epoch = authority->epoch();
    frame.process = {{life, static_cast<uint64_t>(slot)}, "a", slot, "a:" + std::to_string(slot)};
    frame.exit_code = 1;
    frame.holds_state = holds_state;
    authority->Arrived(now, "a", frame, &actions);
  }
  void Form(const std::vector<int>& slots) {
    for (int slot : slots) Hear(0, ControlType::kFormed, slot);
  }
  // That of the slot ends, and the others become another world, if they may.
  void Die(int dead, const std::vector<int>& others) {
    Hear(0, ControlType::kDead, dead);
    for (int slot : others) Hear(0, ControlType::kReport, slot);
    Form(others);
  }
  // The process of the last slot has ended, and another one comes there; the others have reported to let it in.
  void Rejoins() {
    Die(3, {0, 1, 2});
    Hear(0, ControlType::kReady, 3, /*life=*/2);
    for (int slot : {0, 1, 2}) Hear(0, ControlType::kReport, slot);
  }
  // Another launcher takes the job up, and its host tells of all four processes.
  void ChangeLauncher(Nanoseconds now) {
    ControlFrame present;
    present.type = ControlType::kPresent;
    for (uint64_t slot = 0; slot < 4; ++slot) present.uids.push_back({1, slot});
    present.record = record;
    authority = std::make_unique<Authority>(options);
    authority->Resume(now, "");
    authority->HostCame(now, "a", &actions);
    authority->Arrived(now, "a", present, &actions);
  }
  bool runs() const { return authority->phase() == Authority::Phase::kRunning; }
  // The slots in which ranks are started at a time.
  std::vector<int> StartedAt(Nanoseconds now) {
    actions.clear();
    authority->Tick(now, &actions);
    std::vector<int> slots;
    for (const AuthorityAction& action : actions)
      if (const auto* start = std::get_if<authority_action::Start>(&action)) slots.push_back(start->slot);
    return slots;
  }
  // What was said since the last look that has these words.
  std::vector<std::string> TakeSaid(const std::string& words) {
    std::vector<std::string> texts;
    for (const AuthorityAction& action : actions)
      if (const auto* say = std::get_if<authority_action::Say>(&action))
        if (say->text.find(words) != std::string::npos) texts.push_back(say->text);
    actions.clear();
    return texts;
  }
  // Why the job has ended; "" if it has not.
  std::string end() const {
    for (const AuthorityAction& action : actions)
      if (const auto* end = std::get_if<authority_action::End>(&action)) return (end->well ? "well: " : "") + end->text;
    return "";
  }

  AuthorityOptions options;
  std::unique_ptr<Authority> authority;
  std::string record;  // of the first world
  AuthorityActions actions;
  bool holds_state = true;  // that is reported
};

RT_TEST(the_world_changes_as_often_as_the_reset_limit_says) {
  struct Row {
    int limit, changes;  // 0: any number
  };
  for (const Row row : {Row{1, 1}, Row{2, 2}, Row{3, 3}, Row{0, 3}}) {
    Job job(row.limit);
    RT_REQUIRE(job.runs());
    const std::vector<std::vector<int>> left = {{0, 1, 2}, {0, 1}, {0}};
    for (int change = 0; change < 3; ++change) {
      RT_CHECK_EQ(job.end(), std::string());
      job.Die(3 - change, left[static_cast<size_t>(change)]);
      if (change >= row.changes) break;
      RT_CHECK(job.runs());
      RT_CHECK_EQ(job.authority->epoch().count, static_cast<uint64_t>(change) + 2);
    }
    if (row.changes == 3) {
      RT_CHECK(job.runs());
      continue;
    }
    RT_CHECK_EQ(job.end(), "The reset limit of " + std::to_string(row.limit) + " worlds is reached.");
    RT_CHECK(job.authority->phase() == Authority::Phase::kEnded);
  }
}

RT_TEST(a_world_that_never_ran_is_no_reset) {
  Job job(1);
  job.Hear(0, ControlType::kDead, 3);
  for (int slot : {0, 1, 2}) job.Hear(0, ControlType::kReport, slot);
  RT_CHECK(job.authority->phase() == Authority::Phase::kForming);
  job.Die(2, {0, 1});  // before that world has formed
  RT_CHECK(job.runs());
  RT_CHECK_EQ(job.authority->epoch().count, 3u);
  job.Die(1, {0});
  RT_CHECK_EQ(job.end(), "The reset limit of 1 worlds is reached.");
}

// The rank in slot 3 raises where it begins to train, and so does each that comes after it.
RT_TEST(errors_in_a_slot_end_a_job_that_has_not_begun_to_train_and_no_other) {
  for (const bool holds_state : {false, true}) {
    Job job(0);
    job.holds_state = holds_state;
    for (uint64_t life = 1; life <= 5 && job.end().empty(); ++life) {
      job.Hear(0, ControlType::kDead, 3, life);
      for (int slot : {0, 1, 2}) job.Hear(0, ControlType::kReport, slot);
      RT_CHECK_EQ(job.end().empty(), holds_state || life < 3);
      job.Form({0, 1, 2});
      job.Hear(0, ControlType::kReady, 3, life + 1);
      for (int slot : {0, 1, 2}) job.Hear(0, ControlType::kReport, slot);
      job.Form({0, 1, 2});
      job.Hear(0, ControlType::kFormed, 3, life + 1);
    }
    RT_CHECK_EQ(job.end(), holds_state ? std::string()
                                       : "The rank in slot 3 of host 'a' has ended with an error 3 times before the "
                                         "training began; its own words are above.");
  }
}

RT_TEST(a_first_world_that_is_lost_before_the_training_says_that_it_begins_again) {
  Job job(0, 4);
  job.holds_state = false;
  job.Die(3, {0, 1, 2});
  RT_CHECK(job.TakeSaid("before the training began") ==
           std::vector<std::string>{"The world has ended before the training began. That begins when 4 ranks have "
                                    "called init() again; the job ends if they have not within 100000 s "
                                    "(--elastic-timeout)."});
}

RT_TEST(a_process_that_comes_and_goes_again_does_not_prolong_the_wait_below_the_minimum) {
  Job job(0, 4);
  job.Die(3, {0, 1, 2});
  Nanoseconds now = 0;
  for (uint64_t life = 2; life < 20; ++life) {
    RT_CHECK(job.authority->phase() == Authority::Phase::kWaiting);
    RT_CHECK_EQ(job.TakeSaid("A world must have").size(), size_t{life == 2});
    now += 20000 * kSecond;
    job.authority->Tick(now, &job.actions);
    if (!job.end().empty()) break;
    job.Hear(now, ControlType::kReady, 3, life);
    RT_CHECK(job.authority->phase() == Authority::Phase::kForming);
    job.Hear(now, ControlType::kDead, 3, life);
    for (int slot : {0, 1, 2}) job.Hear(now, ControlType::kReport, slot);
  }
  RT_CHECK_EQ(now, 100000 * kSecond);
}

RT_TEST(a_job_below_its_minimum_says_once_that_it_waits_and_goes_on_when_enough_are_there) {
  Job job(0, 3);
  const std::string words = "A world must have";
  job.Die(3, {0, 1, 2});
  RT_CHECK(job.runs() && job.TakeSaid(words).empty());
  job.Die(2, {0, 1});
  RT_CHECK(job.authority->phase() == Authority::Phase::kWaiting);
  RT_CHECK(
      job.TakeSaid(words) ==
      std::vector<std::string>{"A world must have 3 ranks, but 2 are left. What they have is kept, and the training "
                               "goes on when enough have joined; the job ends if they have not within 100000 s "
                               "(--elastic-timeout)."});
  job.authority->Tick(kSecond, &job.actions);
  RT_CHECK(job.TakeSaid(words).empty());
  job.Hear(kSecond, ControlType::kReady, 2, /*life=*/2);
  RT_CHECK(job.authority->phase() == Authority::Phase::kForming);
  RT_CHECK_EQ(job.end(), std::string());
}

RT_TEST(a_member_that_dies_before_it_has_answered_the_next_launcher_is_told_of) {
  Job job(0);
  job.ChangeLauncher(kSecond);
  RT_CHECK(job.authority->phase() == Authority::Phase::kResuming);
  job.actions.clear();
  job.Hear(kSecond, ControlType::kDead, 1);
  job.Hear(kSecond, ControlType::kDead, 2, /*life=*/7);  // it never was a member
  RT_CHECK(job.TakeSaid("slot") ==
           std::vector<std::string>{"The rank in slot 1 of host 'a' has ended with exit code 1."});
}

RT_TEST(a_launcher_that_finds_all_ranks_of_a_job_dead_ends_it_at_once) {
  Job job(0);
  job.ChangeLauncher(kSecond);
  for (int slot = 0; slot < 4; ++slot) {
    RT_CHECK_EQ(job.end(), std::string());
    job.Hear(kSecond, ControlType::kDead, slot);
  }
  RT_CHECK_EQ(job.end(), "All ranks that held the state of the training are gone.");
  RT_CHECK(job.TakeSaid("is heard").empty());
}

// A host of the world does not answer the next launcher, and its ranks may run there without one.
RT_TEST(ranks_that_no_launcher_hears_are_waited_for_until_they_have_ended_themselves) {
  Job job(0);
  ControlFrame form;
  RT_REQUIRE(ControlFrame::Decode(job.record, &form));
  for (size_t rank = 0; rank < form.members.size(); ++rank)
    if (rank >= 2) form.members[rank].process.host = "b";
  job.record = form.Encode();
  job.options.hosts["b"] = 2;
  job.options.silence = 10 * kSecond;
  job.options.grace = 50 * kSecond;
  job.ChangeLauncher(0);
  for (int slot = 0; slot < 4; ++slot) job.Hear(0, ControlType::kDead, slot);
  const auto pass_until = [&](Nanoseconds until) {
    for (Nanoseconds now = 0; now <= until; now += kSecond) job.authority->Tick(now, &job.actions);
  };
  pass_until(61 * kSecond);
  RT_CHECK_EQ(job.end(), std::string());
  RT_CHECK(job.TakeSaid("None of the job's ranks is heard") ==
           std::vector<std::string>{
               "None of the job's ranks is heard, and a host on which some were does not answer. They may go on there: "
               "they are waited for until those without a launcher have ended themselves, for up to 50 s."});
  job.authority->Tick(62 * kSecond, &job.actions);
  RT_CHECK_EQ(job.end(), "All ranks that held the state of the training are gone.");
}

RT_TEST(members_that_finish_before_they_have_answered_the_next_launcher_end_the_job_well) {
  Job job(0);
  job.ChangeLauncher(kSecond);
  job.actions.clear();
  ControlFrame leave;
  leave.type = ControlType::kLeave;
  leave.finished = true;
  for (int slot = 0; slot < 4; ++slot) {
    leave.process = {{1, static_cast<uint64_t>(slot)}, "a", slot, "a:" + std::to_string(slot)};
    job.authority->Arrived(kSecond, "a", leave, &job.actions);
  }
  job.Hear(kSecond, ControlType::kReady, 0);  // as an answer that was on its way
  for (int slot = 0; slot < 4; ++slot) job.Hear(kSecond, ControlType::kDead, slot);
  RT_CHECK(job.end() == "well: All ranks have come to their end.");
  RT_CHECK(job.TakeSaid("slot").empty());
}

RT_TEST(joiners_with_whom_a_world_cannot_be_connected_are_given_up_and_the_others_go_on) {
  Job job(0);
  const auto report = [&] {
    for (int slot : {0, 1, 2}) job.Hear(0, ControlType::kReport, slot);
    job.Hear(0, ControlType::kReport, 3, /*life=*/2);
  };
  job.Die(3, {0, 1, 2});
  job.Hear(0, ControlType::kReady, 3, /*life=*/2);
  report();
  RT_CHECK(job.authority->phase() == Authority::Phase::kForming);
  job.actions.clear();
  ControlFrame suspect;
  suspect.type = ControlType::kSuspect;
  suspect.epoch = job.authority->epoch();
  suspect.process = {{1, 0}, "a", 0, "a:0"};
  job.authority->Arrived(0, "a", suspect, &job.actions);
  report();
  RT_CHECK(job.TakeSaid("could not be connected with it").size() == 1);
  job.Form({0, 1, 2});
  RT_CHECK(job.runs());
}

RT_TEST(a_world_that_has_lost_a_member_and_cannot_be_connected_keeps_its_joiners) {
  Job job(0);
  job.Rejoins();
  job.actions.clear();
  ControlFrame suspect;
  suspect.type = ControlType::kSuspect;
  suspect.epoch = job.authority->epoch();
  suspect.process = {{1, 0}, "a", 0, "a:0"};
  job.authority->Arrived(0, "a", suspect, &job.actions);
  job.Hear(0, ControlType::kDead, 2);
  for (int slot : {0, 1}) job.Hear(0, ControlType::kReport, slot);
  job.Hear(0, ControlType::kReport, 3, /*life=*/2);
  RT_CHECK(job.TakeSaid("could not be connected").empty());
  job.Form({0, 1});
  job.Hear(0, ControlType::kFormed, 3, /*life=*/2);
  RT_CHECK(job.runs());
}

// Four hosts with a rank each, of which all reach the launcher.
struct FourHosts : Job {
  FourHosts() : Job(0) {
    actions.clear();
    options.hosts = {{"a", 1}, {"b", 1}, {"c", 1}, {"d", 1}};
    authority = std::make_unique<Authority>(options);
    authority->Begin(0);
    for (uint64_t place = 0; place < 4; ++place) {
      authority->HostCame(0, Name(place), &actions);
      Tell(ControlType::kPresent, place);
      Tell(ControlType::kReady, place);
    }
    for (uint64_t place = 0; place < 4; ++place) Tell(ControlType::kFormed, place);
  }
  static std::string Name(uint64_t place) { return {static_cast<char>('a' + place)}; }
  // unheard: the ranks that this one does not hear.
  void Tell(ControlType type, uint64_t place, const std::vector<uint64_t>& unheard = {}) {
    ControlFrame frame;
    frame.type = type;
    if (type != ControlType::kReady) frame.epoch = authority->epoch();
    frame.process = {{1, place}, Name(place), 0, ""};
    frame.holds_state = type == ControlType::kReport;
    for (uint64_t other : unheard) frame.uids.push_back({1, other});
    authority->Arrived(0, Name(place), frame, &actions);
  }
};

RT_TEST(of_a_cut_a_side_stays_whose_ranks_hear_each_other_though_only_the_first_one_names_whom_it_does_not_hear) {
  FourHosts job;
  RT_CHECK(job.runs());
  job.Tell(ControlType::kSuspect, 3, {2});
  RT_CHECK(job.authority->phase() == Authority::Phase::kStopping);
  job.Tell(ControlType::kReport, 0, {1, 3});
  job.Tell(ControlType::kReport, 1, {0});
  job.Tell(ControlType::kReport, 2, {1});
  job.Tell(ControlType::kReport, 3, {2});
  RT_CHECK_EQ(job.TakeSaid("do not hear it").size(), size_t{2});
  job.Tell(ControlType::kFormed, 0);
  job.Tell(ControlType::kFormed, 2);
  RT_CHECK(job.runs());
}

RT_TEST(a_rank_that_is_not_heard_for_a_moment_is_kept_until_a_world_cannot_be_connected) {
  FourHosts job;
  job.Tell(ControlType::kDead, 3);
  job.Tell(ControlType::kReport, 0, {1});
  job.Tell(ControlType::kReport, 1, {0});
  job.Tell(ControlType::kReport, 2);
  RT_CHECK(job.TakeSaid("was evicted").empty());
  RT_CHECK(job.authority->phase() == Authority::Phase::kForming);
  job.Tell(ControlType::kSuspect, 0);  // it cannot connect, and does not know because of whom
  for (uint64_t place = 0; place < 3; ++place) job.Tell(ControlType::kReport, place);
  RT_CHECK_EQ(job.TakeSaid("do not hear it").size(), size_t{1});
}

// Two hosts with two ranks each, which both reach the launcher: 0 and 1, 2 and 3.
struct TwoHosts : Job {
  TwoHosts() : Job(0) {
    actions.clear();
    options.hosts = {{"a", 2}, {"b", 2}};
    authority = std::make_unique<Authority>(options);
    authority->Begin(0);
    for (uint64_t rank : {0, 2}) {
      authority->HostCame(0, Name(rank), &actions);
      Tell(ControlType::kPresent, rank);
    }
    for (ControlType type : {ControlType::kReady, ControlType::kFormed}) TellAll(type, {0, 1, 2, 3});
    actions.clear();
  }
  static std::string Name(uint64_t rank) { return rank < 2 ? "a" : "b"; }
  // unheard: the ranks that this one does not hear.
  void Tell(ControlType type, uint64_t rank, const std::vector<uint64_t>& unheard = {}) {
    ControlFrame frame;
    frame.type = type;
    if (type != ControlType::kReady) frame.epoch = authority->epoch();
    frame.process = {{1, rank}, Name(rank), static_cast<int>(rank % 2), ""};
    frame.holds_state = type == ControlType::kReport;
    for (uint64_t other : unheard) frame.uids.push_back({1, other});
    authority->Arrived(0, Name(rank), frame, &actions);
  }
  void TellAll(ControlType type, const std::vector<uint64_t>& ranks) {
    for (uint64_t rank : ranks) Tell(type, rank);
  }
  // Who has been evicted since the last look.
  std::vector<uint64_t> TakeEvicted() {
    std::vector<uint64_t> ranks;
    for (const AuthorityAction& action : actions)
      if (const auto* send = std::get_if<authority_action::Send>(&action))
        if (send->frame.type == ControlType::kEvict) ranks.push_back(send->frame.process.uid.low);
    actions.clear();
    return ranks;
  }
};

RT_TEST(a_rank_that_was_stopped_and_wakes_as_it_is_given_up_takes_nobody_of_its_host_along) {
  for (uint64_t stopped : {0, 2}) {  // the lowest of its host, by which other hosts hear it
    for (bool confesses : {false, true}) {
      TwoHosts job;
      RT_REQUIRE(job.runs());
      job.Tell(ControlType::kSuspect, 2 - stopped, {stopped});
      job.Tell(ControlType::kReport, 3 - stopped);
      job.Tell(ControlType::kReport, 2 - stopped);
      const std::vector<uint64_t> named = {stopped}, nobody;  // in time
      job.Tell(ControlType::kReport, stopped, confesses ? named : nobody);
      job.Tell(ControlType::kReport, stopped + 1, confesses ? nobody : named);
      RT_CHECK(job.TakeEvicted() == named);
    }
  }
}

RT_TEST(a_rank_that_was_stopped_by_its_own_word_goes_before_those_that_did_not_hear_it) {
  for (const std::vector<uint64_t>& confesses : {std::vector<uint64_t>{}, std::vector<uint64_t>{0}}) {
    FourHosts job;
    job.actions.clear();
    job.Tell(ControlType::kSuspect, 1, {0});
    job.Tell(ControlType::kReport, 0, confesses);
    for (uint64_t place : {1, 2, 3}) job.Tell(ControlType::kReport, place);
    const bool keeps_the_lowest = job.TakeSaid("of host 'b' was evicted").size() == 1;
    RT_CHECK_EQ(keeps_the_lowest, confesses.empty());
    const std::vector<uint64_t> left =
        confesses.empty() ? std::vector<uint64_t>{0, 2, 3} : std::vector<uint64_t>{1, 2, 3};
    for (uint64_t place : left) job.Tell(ControlType::kFormed, place);
    RT_CHECK(job.runs());
  }
}

RT_TEST(a_rank_that_says_that_it_was_stopped_is_kept_where_all_others_hear_it) {
  FourHosts job;
  job.actions.clear();
  job.Tell(ControlType::kSuspect, 2, {3});
  job.Tell(ControlType::kReport, 0, {0});
  for (uint64_t place : {1, 2, 3}) job.Tell(ControlType::kReport, place);
  RT_CHECK_EQ(job.TakeSaid("was evicted").size(), size_t{1});
}

RT_TEST(those_beside_a_rank_that_was_stopped_are_cut_off_if_no_world_can_be_connected_with_them) {
  TwoHosts job;
  job.Tell(ControlType::kSuspect, 0, {2});
  job.TellAll(ControlType::kReport, {0, 1, 2});
  job.Tell(ControlType::kReport, 3, {2});
  RT_CHECK(job.TakeEvicted() == std::vector<uint64_t>{2});
  job.Tell(ControlType::kSuspect, 0);  // it cannot connect, and does not know because of whom
  job.TellAll(ControlType::kReport, {0, 1, 3});
  RT_CHECK(job.TakeEvicted() == std::vector<uint64_t>{3});
  job.TellAll(ControlType::kFormed, {0, 1});
  RT_CHECK(job.runs());
}

// The others tell of it by name; its thread that speaks to the authority reports, as those of the others do.
void TellMissing(Job* job, Nanoseconds now, uint64_t reporter, const std::vector<uint64_t>& missing) {
  ControlFrame suspect;
  suspect.type = ControlType::kSuspect;
  suspect.epoch = job->authority->epoch();
  suspect.process = {{1, reporter}, "a", static_cast<int>(reporter), "a:" + std::to_string(reporter)};
  suspect.hangs = true;
  for (uint64_t slot : missing) suspect.uids.push_back({1, slot});
  job->authority->Arrived(now, "a", suspect, &job->actions);
}

RT_TEST(a_rank_for_which_the_others_have_waited_in_vain_is_evicted_by_name) {
  for (uint64_t hung :
       {uint64_t{0}, uint64_t{2}}) {  // the lowest rank, too, of which each of the others is one that tells
    Job job(0);
    job.actions.clear();
    std::vector<int> others;
    for (uint64_t slot = 0; slot < 4; ++slot)
      if (slot != hung) others.push_back(static_cast<int>(slot));
    for (int slot : others) TellMissing(&job, 0, static_cast<uint64_t>(slot), {hung});
    RT_CHECK_EQ(job.TakeSaid("was evicted: the others have waited for it").size(), size_t{1});
    for (int slot : others) job.Hear(0, ControlType::kReport, slot);
    job.Form(others);
    RT_CHECK(job.runs());
  }
}

RT_TEST(a_world_below_the_minimum_that_hangs_ends_the_job_when_its_time_is_over) {
  Job job(0, /*minimum=*/3);
  const Nanoseconds wait = job.options.wait;
  job.Hear(0, ControlType::kDead, 3);
  job.Hear(0, ControlType::kReady, 3, /*life=*/2);
  ControlFrame report;  // they are within a step, in which nobody may join
  report.type = ControlType::kReport;
  report.epoch = job.authority->epoch();
  report.holds_state = true;
  report.admits = false;
  job.Hear(0, ControlType::kDead, 2);
  for (uint64_t slot : {uint64_t{0}, uint64_t{1}}) {
    report.process = {{1, slot}, "a", static_cast<int>(slot), "a:" + std::to_string(slot)};
    job.authority->Arrived(0, "a", report, &job.actions);
  }
  job.Form({0, 1});
  RT_REQUIRE(job.runs());
  for (Nanoseconds now : {wait / 4, wait / 2, 3 * (wait / 4), wait - kSecond}) {  // it has not stood still
    job.Hear(now, ControlType::kBeat, 0);
    job.authority->Tick(now, &job.actions);
  }
  RT_CHECK_EQ(job.end(), std::string());
  job.Hear(wait, ControlType::kBeat, 0);
  job.authority->Tick(wait, &job.actions);
  RT_CHECK(job.end().find("A world must have 3 ranks, but has fewer.") == 0);
}

RT_TEST(ranks_that_all_leave_wait_for_one_that_is_on_its_way) {
  AuthorityOptions options;
  options.hosts = {{"a", 1}};
  options.minimum = 1;
  options.silence = options.grace = options.wait = 100000 * kSecond;
  options.random = [drawn = std::make_shared<uint64_t>(0)] { return ++*drawn; };
  Authority authority(options);
  AuthorityActions actions;
  authority.Begin(0);
  bool has_got_it = false;  // the rank of b the state
  const auto hear = [&](const std::string& host, ControlType type) {
    ControlFrame frame;
    frame.type = type;
    frame.epoch = type == ControlType::kReady ? EpochId() : authority.epoch();
    frame.process = {{1, host == "a" ? 1u : 2u}, host, 0, host + ":0"};
    frame.holds_state = host == "a" || has_got_it;
    authority.Arrived(0, host, frame, &actions);
  };
  const auto any = [&](auto fits) { return std::any_of(actions.begin(), actions.end(), fits); };
  const auto dismissed = [&](const AuthorityAction& action) {
    const auto* send = std::get_if<authority_action::Send>(&action);
    return send != nullptr && send->frame.type == ControlType::kLeave;
  };
  const auto ended = [](const AuthorityAction& action) {
    return std::holds_alternative<authority_action::End>(action);
  };
  authority.HostCame(0, "a", &actions);
  for (ControlType type : {ControlType::kPresent, ControlType::kReady, ControlType::kFormed}) hear("a", type);
  RT_REQUIRE(authority.phase() == Authority::Phase::kRunning);
  authority.HostAdded("b", 1);
  authority.HostCame(0, "b", &actions);
  hear("b", ControlType::kPresent);
  authority.HostLeaves(0, "a", "it is to be taken away.", &actions);
  RT_CHECK(authority.phase() == Authority::Phase::kRunning && !any(dismissed));  // and is not asked to pause
  hear("a", ControlType::kReport);                                               // another pause than for that
  hear("a", ControlType::kFormed);
  RT_CHECK(authority.phase() == Authority::Phase::kRunning && !any(dismissed) && !any(ended));
  hear("b", ControlType::kReady);
  hear("a", ControlType::kReport);
  for (const std::string host : {"a", "b"}) hear(host, ControlType::kFormed);
  RT_CHECK(!any(dismissed));
  has_got_it = true;
  for (const std::string host : {"a", "b"}) hear(host, ControlType::kReport);
  RT_CHECK(any(dismissed) && !any(ended));
  hear("b", ControlType::kFormed);
  RT_CHECK(authority.phase() == Authority::Phase::kRunning);
}

RT_TEST(a_joiner_that_does_not_form_in_time_is_left_out_until_it_answers) {
  Job job(0);
  job.Die(3, {0, 1, 2});
  const auto join = [&](Nanoseconds now) {
    for (int slot : {0, 1, 2}) job.Hear(now, ControlType::kReport, slot);
    RT_REQUIRE(job.authority->phase() == Authority::Phase::kForming);
  };
  job.Hear(0, ControlType::kReady, 3, /*life=*/2);
  join(0);
  job.authority->Tick(kSecond, &job.actions);
  RT_CHECK(job.authority->phase() == Authority::Phase::kForming);
  const Nanoseconds soon = job.authority->next_timer();
  RT_CHECK(soon > kSecond && soon < kSecond + kSecond / 10);
  job.authority->Tick(soon, &job.actions);
  RT_CHECK(job.authority->phase() == Authority::Phase::kStopping);
  join(soon);  // without it
  job.Form({0, 1, 2});
  RT_CHECK(job.runs());
  RT_CHECK(job.TakeSaid("evicted").empty());
  job.Hear(soon, ControlType::kReady, 3, /*life=*/2);  // it was stopped, and goes on
  join(soon);
  job.Form({0, 1, 2});
  job.Hear(soon, ControlType::kFormed, 3, /*life=*/2);
  RT_CHECK(job.runs());
}

RT_TEST(a_joiner_that_others_refuse_is_not_waited_for_and_is_evicted_if_it_does_not_end) {
  Job job(0);
  job.Rejoins();
  job.Form({0, 1, 2});
  job.Hear(0, ControlType::kFormed, 3, /*life=*/2);
  RT_REQUIRE(job.runs());
  ControlFrame refusal;
  refusal.type = ControlType::kSuspect;
  refusal.epoch = job.authority->epoch();
  refusal.process = {{1, 0}, "a", 0, "a:0"};
  refusal.refused = true;
  refusal.uids = {{1, 1}, {2, 3}};  // of which the first has joined nobody
  job.authority->Arrived(0, "a", refusal, &job.actions);
  RT_CHECK(job.authority->phase() == Authority::Phase::kStopping);
  job.Hear(0, ControlType::kReport, 3, /*life=*/2);  // as a program that goes on all the same
  for (int slot : {0, 1, 2}) job.Hear(0, ControlType::kReport, slot);
  job.Form({0, 1, 2});
  RT_CHECK(job.runs());
  RT_CHECK(job.TakeSaid("evicted").empty());
  for (Nanoseconds now = job.options.silence / 4; now <= job.options.silence; now += job.options.silence / 4) {
    job.Hear(now, ControlType::kBeat, 0);
    job.authority->Tick(now, &job.actions);
  }
  RT_CHECK_EQ(job.TakeSaid("slot 3 of host 'a' was evicted: it was refused").size(), size_t{1});
  RT_CHECK(job.runs());
}

RT_TEST(a_joiner_that_was_left_out_listens_elsewhere_when_it_answers) {
  Job job(0);
  job.Rejoins();
  job.authority->Tick(2 * kSecond, &job.actions);  // too late
  for (int slot : {0, 1, 2}) job.Hear(2 * kSecond, ControlType::kReport, slot);
  job.Form({0, 1, 2});
  RT_REQUIRE(job.runs());
  job.actions.clear();
  ControlFrame ready;
  ready.type = ControlType::kReady;
  ready.process = {{2, 3}, "a", 3, "a:elsewhere"};
  job.authority->Arrived(2 * kSecond, "a", ready, &job.actions);
  for (int slot : {0, 1, 2}) job.Hear(2 * kSecond, ControlType::kReport, slot);
  std::vector<std::string> addresses;
  for (const AuthorityAction& action : job.actions)
    if (const auto* send = std::get_if<authority_action::Send>(&action))
      if (send->frame.type == ControlType::kForm) addresses.push_back(send->frame.members.back().process.address);
  RT_CHECK_EQ(addresses.size(), size_t{4});
  for (const std::string& address : addresses) RT_CHECK(address == "a:elsewhere");
}

RT_TEST(a_joiner_that_was_left_out_and_never_answers_is_evicted) {
  Job job(0);
  job.Rejoins();
  job.authority->Tick(2 * kSecond, &job.actions);
  for (int slot : {0, 1, 2}) job.Hear(2 * kSecond, ControlType::kReport, slot);
  job.Form({0, 1, 2});
  RT_REQUIRE(job.runs());
  for (Nanoseconds now = job.options.silence / 4; now < 2 * job.options.silence; now += job.options.silence / 4) {
    job.Hear(now, ControlType::kBeat, 0);
    job.authority->Tick(now, &job.actions);
  }
  RT_CHECK_EQ(job.TakeSaid("slot 3 of host 'a' was evicted: it has not answered.").size(), size_t{1});
  RT_CHECK(job.runs());
}

RT_TEST(a_host_is_not_lost_for_the_time_in_which_the_authority_was_stopped) {
  AuthorityOptions options;
  options.hosts = {{"a", 1}, {"b", 1}};
  options.minimum = 1;
  options.silence = 5 * kSecond;
  options.grace = options.wait = 60 * kSecond;
  options.random = [drawn = std::make_shared<uint64_t>(0)] { return ++*drawn; };
  Authority authority(options);
  AuthorityActions actions;
  authority.Begin(0);
  ControlFrame beat;
  beat.type = ControlType::kBeat;
  const std::vector<std::string> hosts = {"a", "b"};
  for (const std::string& host : hosts) authority.HostCame(0, host, &actions);
  for (ControlType type : {ControlType::kPresent, ControlType::kReady, ControlType::kFormed})
    for (const std::string& host : hosts) {
      ControlFrame frame;
      frame.type = type;
      frame.epoch = authority.epoch();
      frame.process = {{1, host == "a" ? 1u : 2u}, host, 0, host + ":0"};
      authority.Arrived(0, host, frame, &actions);
    }
  RT_CHECK(authority.phase() == Authority::Phase::kRunning);
  const auto lost = [&](const std::string& host) {
    return std::any_of(actions.begin(), actions.end(), [&](const AuthorityAction& action) {
      const auto* say = std::get_if<authority_action::Say>(&action);
      return say != nullptr && say->text.find("Host '" + host + "' is lost") != std::string::npos;
    });
  };
  Nanoseconds now = 0;
  const auto tick = [&](int seconds) {
    for (int second = 0; second < seconds; ++second) {
      now += kSecond;
      authority.Arrived(now, "a", beat, &actions);
      authority.Tick(now, &actions);
    }
  };
  tick(2);
  now += 6 * kSecond;  // stopped; what it reads first is of one host
  tick(3);
  RT_CHECK(!lost("a") && !lost("b"));
  tick(1);  // the fifth second in which it could have heard the other one: two before
  RT_CHECK(!lost("a") && lost("b"));
}

RT_TEST(a_slot_in_which_a_rank_has_failed_is_tried_again_after_a_pause) {
  Job job(0);
  job.Die(3, {0, 1, 2});
  RT_CHECK(job.StartedAt(kPause - 1).empty());
  RT_CHECK(job.StartedAt(kPause) == std::vector<int>{3});
  RT_CHECK(job.StartedAt(2 * kPause).empty());  // it is on its way
}

RT_TEST(a_host_whose_ranks_fail_together_pauses_as_a_whole) {
  Job job(0);
  job.Die(3, {0, 1, 2});
  job.Die(2, {0, 1});
  job.Die(1, {0});
  RT_CHECK(job.StartedAt(kPause - 1).empty());
  RT_CHECK_EQ(job.StartedAt(kPause).size(), size_t{3});
}

RT_TEST(pauses_double_up_to_sixty_times_the_first_and_are_forgotten) {
  struct Row {
    Nanoseconds after;  // seconds from the end of the pause before to the next failure
    int factor;         // of the pause that follows
  };
  Cooldown cooldown(kPause, 60 * kPause);
  RT_CHECK_EQ(cooldown.until("a", 0), Nanoseconds{0});
  Nanoseconds now = 1000 * kSecond;
  for (const Row row : {Row{0, 1}, Row{1, 2}, Row{599, 4}, Row{0, 8}, Row{0, 16}, Row{0, 32}, Row{0, 60}, Row{599, 60},
                        Row{600, 1}, Row{0, 2}}) {
    now += row.after * kSecond;
    cooldown.Failed(now, "a", 0);
    RT_CHECK_EQ(cooldown.until("a", 0), now + row.factor * kPause);
    now = cooldown.until("a", 0);
  }
  RT_CHECK_EQ(cooldown.until("a", 1), Nanoseconds{0});
  RT_CHECK_EQ(cooldown.until("b", 0), Nanoseconds{0});
}

RT_TEST(three_slots_that_pause_at_once_make_their_host_pause) {
  Cooldown cooldown(kPause, 60 * kPause);
  cooldown.Failed(0, "a", 0);
  cooldown.Failed(kSecond, "a", 1);
  RT_CHECK_EQ(cooldown.until("a", 7), Nanoseconds{0});
  cooldown.Failed(2 * kSecond, "a", 2);
  RT_CHECK_EQ(cooldown.until("a", 7), 2 * kSecond + kPause);  // which has never failed
  RT_CHECK_EQ(cooldown.until("a", 0), 2 * kSecond + kPause);
  RT_CHECK_EQ(cooldown.until("b", 7), Nanoseconds{0});
  Cooldown apart(kPause, 60 * kPause);  // never three at once
  for (int slot = 0; slot < 9; ++slot) apart.Failed(slot * kPause, "a", slot);
  RT_CHECK_EQ(apart.until("a", 9), Nanoseconds{0});
}

}  // namespace
}  // namespace ringtrain
