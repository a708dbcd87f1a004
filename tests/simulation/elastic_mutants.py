"""Faults planted into copies of what decides in an elastic job, to show that its simulation finds such faults.

tests/native/step_test.cc and authority_test.cc have what only a rare meeting of faults would show.
"""

from __future__ import annotations

from mutants import Mutant

ELASTIC = "native/elastic/"
STEP, SAMPLES = ELASTIC + "step.cc", ELASTIC + "samples.cc"
MEMBERSHIP, AUTHORITY, CUTS = ELASTIC + "membership.cc", ELASTIC + "authority.cc", ELASTIC + "cuts.cc"
ARBITER = "native/agree/arbiter.cc"
MUTANTS = [
    # What survivors settle
    Mutant(
        "a part that one rank holds is released",
        STEP,
        "all_whole &= !behind && each.stage == Stage::kWhole",
        "all_whole = each.stage == Stage::kWhole || newest + 1 < 0",
    ),
    Mutant(
        "what somebody has released is done again",
        STEP,
        "newest = std::max(newest, each.released)",
        "newest = newest == 0 ? each.released : std::min(newest, each.released)",
    ),
    Mutant("settled with a joiner's vote", STEP, "(each.holds_state)", "(true)"),
    Mutant(
        "the first world has no state to give",
        STEP,
        "settlement->gives_state = holders.size() < standings.size()",
        "settlement->gives_state = !holders.empty() && holders.size() < standings.size()",
    ),
    Mutant(
        "an open window is dealt anew",
        STEP,
        "    settlement->dealt_in = std::max(settlement->dealt_in.value_or(each.dealt_in), each.dealt_in);",
        ";",
    ),
    Mutant(
        "the dealing of whoever has released is that of the open window",
        STEP,
        "if (behind || each.stage == Stage::kIdle) continue;",
        "",
    ),
    # A rank's steps
    Mutant(
        "released by one rank alone",
        STEP,
        "settlement_.released > released_",
        "(settlement_.released > released_ || stage_ == Stage::kWhole)",
    ),
    Mutant(
        "what a settlement has released is done again",
        STEP,
        "    Release(effects);",
        ";",
    ),
    Mutant("results that were given up are held", STEP, "(stage_ == Stage::kWhole)", "(false)"),
    Mutant(
        "a part that all hold ends the window",
        STEP,
        "settlement_.dealt_in && !has_ended",
        "settlement_.dealt_in && !settlement_.releases",
    ),
    Mutant(
        "all have contributed, whoever is lost",
        STEP,
        "contributors_ = is_open ? Contributors(places) : std::nullopt;",
        "contributors_ = std::nullopt;",
    ),
    Mutant(
        "the samples of a part that is given up are in the window",
        STEP,
        "!has_parts_ && held_ != Part::kNothing",
        "!has_parts_",
    ),
    Mutant(
        "the samples of the last part are in the window",
        STEP,
        "    has_parts_ = true;",
        "    has_parts_ = false;",
    ),
    Mutant(
        "a window goes on in the world where it ends",
        STEP,
        "DealIn(is_open ? *settlement_.dealt_in : world_, effects)",
        "DealIn(world_, effects)",
    ),
    Mutant(
        "a window that has ended is dealt as before",
        STEP,
        "  DealIn(world_, effects);",
        "  DealIn(dealt_in_, effects);",
    ),
    Mutant(
        "a part within a window ends it",
        STEP,
        "held_ != Part::kLast && !(has_step_ && !several_)",
        "held_ == Part::kNothing && !(has_step_ && !several_)",
    ),
    Mutant("a joiner counts from nothing", STEP, "  released_ = settlement_.released;", ";"),
    # Samples
    Mutant(
        "samples are given back twice",
        SAMPLES,
        "  std::sort(again.begin(), again.end());",
        "  if (lost) again.push_back(again.front());\n  std::sort(again.begin(), again.end());",
    ),
    Mutant("samples are not given back", SAMPLES, "lost.push_back(At(first + at));", ";"),
    Mutant(
        "what was given back is dealt once more",
        SAMPLES,
        "given_back_.begin() + were_given_back",
        "given_back_.begin()",
    ),
    Mutant(
        "what was drawn ahead is kept in another dealing",
        SAMPLES,
        """    ForgetAhead();
    before_.clear();""",
        "    before_.clear();",
    ),
    Mutant(
        "unequal shares overlap",
        SAMPLES,
        "return {begins[place], begins[place + 1], 1};",
        "return {begins[place], std::min(count, begins[place + 1] + 1), 1};",
    ),
    Mutant(
        "who is lost is asked for by equal shares",
        SAMPLES,
        "if (begins.empty()) return place % among == at % among;",
        "if (true) return place % among == at % among;",
    ),
    Mutant(
        "what samples cost is taken from the order's beginning",
        SAMPLES,
        "before.push_back(before.back() + static_cast<double>(CostAt(number * batch_ + at)));",
        "before.push_back(before.back() + static_cast<double>(CostAt(at + (place_ == 0))));",
    ),
    Mutant(
        "unequal shares stay in another dealing",
        SAMPLES,
        "  if (before == before_) return;",
        "  if (before == before_ || !before_.empty()) return;",
    ),
    Mutant(
        "who computes another one's samples weighs them", SAMPLES, "is_lowest = place_ < count;", "is_lowest = true;"
    ),
    Mutant(
        "nobody weighs the samples of a rank that is lost",
        SAMPLES,
        "is_lowest = std::none_of(contributors->begin(), contributors->end(), same);",
        "is_lowest = place_ < count;",
    ),
    Mutant(
        "samples that another rank has computed too are lost",
        SAMPLES,
        "std::min<int64_t>(size_, count)",
        "size_",
    ),
    # The rank
    Mutant(
        "a joiner holds the state before it has taken it",
        MEMBERSHIP,
        "report.holds_state = holds_state_;",
        "report.holds_state = has_begun();",
    ),
    Mutant(
        "somebody may join within a step",
        MEMBERSHIP,
        "report.admits = admits_;",
        "report.admits = true;",
    ),
    Mutant(
        "a report does not say whom its rank does not hear",
        MEMBERSHIP,
        "  report.uids = unheard_;",
        ";",
    ),
    # The authority
    Mutant(
        "the count is not written before Form",
        AUTHORITY,
        "  actions->push_back(authority_action::Write{form.Encode()});",
        ";",
    ),
    Mutant(
        "resumed without + 1",
        AUTHORITY,
        "!ControlFrame::Decode(record, &form)",
        "!ControlFrame::Decode(record, &form) || (--form.epoch.count, false)",
    ),
    Mutant(
        "a joiner is ranked first",
        AUTHORITY,
        "  for (const Uid& uid : newcomers) members.push_back({roster_.at(uid).process, begun_});",
        "  for (const Uid& uid : newcomers) members.insert(members.begin(), {roster_.at(uid).process, begun_});",
    ),
    Mutant(
        "a joiner is admitted to an open window",
        AUTHORITY,
        "  if (!between_steps) newcomers.clear();",
        ";",
    ),
    Mutant(
        "silence is taken as attested",
        AUTHORITY,
        "SomebodyIsHeard(now) ? options_.silence : options_.grace + kSlack",
        "SomebodyIsHeard(now) ? kSecond / 2 : options_.grace + kSlack",
    ),
    Mutant(
        "a second death during Stop is ignored",
        AUTHORITY,
        "  roster_.Remove(uid);",
        "  if (phase_ != Phase::kStopping) roster_.Remove(uid);",
    ),
    Mutant(
        "a death while a world forms is ignored",
        AUTHORITY,
        "alive && roster_.InWorld(uid)",
        "alive && phase_ == Phase::kRunning && roster_.InWorld(uid)",
    ),
    Mutant(
        "the smaller side goes on",
        CUTS,
        "unheard.at(uid) >= unheard.at(*most)",
        "unheard.at(uid) < unheard.at(*most)",
    ),
    Mutant("both sides of a cut go on", CUTS, "unheard.count(uid) > 0", "false"),
    Mutant(
        "a host whose network for data is dead gets ranks",
        AUTHORITY,
        "  for (const std::string& host : unheard_hosts) LetGo(now, host, actions);",
        ";",
    ),
    Mutant("a host that is let go gets ranks before it is checked", AUTHORITY, "  hosts_.Of(name).leaves = true;", ";"),
    Mutant(
        "a host is let go for one of its ranks",
        AUTHORITY,
        "std::any_of(living.begin(), living.end(), is_there)",
        "(std::any_of(living.begin(), living.end(), is_there) && false)",
    ),
    Mutant(
        "a world goes on below the minimum",
        AUTHORITY,
        "static_cast<int>(voters.size() + newcomers.size()) < enough",
        "false",
    ),
    Mutant(
        "most are evicted for one that waits for them",
        ARBITER,
        "IsOutnumbered(entry) ? std::vector<int>() : Missing(entry)",
        "Missing(entry)",
    ),
    Mutant(
        "whoever was given up first waits no longer",
        ARBITER,
        "std::any_of(given_up_.begin(), given_up_.end(), outnumbers)",
        "false",
    ),
    Mutant(
        "of ranks that wait for each other most go",
        ARBITER,
        "others > size",
        "others < size",
    ),
    Mutant(
        "an evicted rank is taken for a new one",
        AUTHORITY,
        "lost || (rank.holds_state && !roster_.InWorld(uid))",
        "false",
    ),
    Mutant("whoever forgets to report is waited for", AUTHORITY, "now - since_ >= patience", "false"),
    Mutant("a rank with another program is admitted", AUTHORITY, "rank.program != program_", "false"),
    Mutant(
        "a launcher that comes back stops the world",
        AUTHORITY,
        "cuts_.empty() && living.size() == world.size()",
        "false",
    ),
]
