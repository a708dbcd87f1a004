"""Faults planted into copies of the protocol's sources, to show that the simulation finds such faults.

Each row replaces one piece of a source that occurs there once. All go into one copy, each behind a switch, so that a
single executable (``simulate_mutants``) has them all and one is awake at a time. Production sources know nothing of it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple


class Mutant(NamedTuple):
    """A fault: in the source `file`, named from the repository's root, `original` becomes `mutated`.

    Both are statements, ending in ; or }, or expressions.
    """

    name: str
    file: str
    original: str
    mutated: str


AGREE, WORLD = "native/agree/", "native/world/"
NEGOTIATOR, ARBITER, UNDELIVERED = AGREE + "negotiator.cc", AGREE + "arbiter.cc", AGREE + "undelivered.cc"
MATCH, FUSION = AGREE + "match.cc", AGREE + "fusion.cc"
REQUEST, LIVENESS, PROTOCOL = AGREE + "request.cc", WORLD + "liveness.cc", WORLD + "protocol.cc"
MEMBERSHIPS = WORLD + "memberships.cc"
STALLS = AGREE + "stall_watch.cc"
SCHEDULE, PROMISES, SCHEDULED = AGREE + "schedule.cc", AGREE + "promises.cc", AGREE + "negotiator_schedule.cc"
MUTANTS = [
    # Who has to be there
    Mutant(
        "a goodbye overtakes what was asked for again",
        ARBITER,
        "unanswered_[member] > 0 && !gone",
        "false",
    ),
    Mutant(
        "any join counts for all members",
        ARBITER,
        "found->second.present.has(member) || joined_.has(member)",
        "found->second.present.has(member) || joined_.has(0)",
    ),
    Mutant(
        "who has joined is counted as missing",
        ARBITER,
        "member_count() - found->second.present.size() > joined_.size()",
        "member_count() > found->second.present.size()",
    ),
    Mutant("ready with one member missing", ARBITER, "      waits = true;", "      waits = member > 0;"),
    Mutant("a member that left is waited for", ARBITER, "  left_.Add(member);", ";"),
    Mutant(
        "a goodbye does not end what waits for it",
        ARBITER,
        "  CompleteAll(effects);\n  FailHopelessJoin(effects);",
        "  FailHopelessJoin(effects);",
    ),
    Mutant("a coordinator that is gone is still written to", NEGOTIATOR, "    coordinator_gone_ = true;", ";"),
    # Joins
    Mutant(
        "a join overtakes what was asked for again",
        ARBITER,
        "!held_joins_[member].name.empty() && answered",
        "!held_joins_[member].name.empty()",
    ),
    Mutant(
        "joined members stay joined",
        ARBITER,
        "  ready_to_run_.push_back(std::move(ready));\n  joined_.Clear();",
        "ready_to_run_.push_back(std::move(ready));",
    ),
    Mutant(
        "a join leaves waiting operations alone",
        ARBITER,
        "  CompleteAll(effects);\n  if (joined_.size() < member_count()) return FailHopelessJoin(effects);",
        "  if (joined_.size() < member_count()) return FailHopelessJoin(effects);",
    ),
    Mutant("a join keeps what the member is owed", ARBITER, "  undelivered_.Cancel(member);", ";"),
    Mutant(
        "joined members are listed off by one",
        ARBITER,
        "if (!entry.present.has(member)) ready.joined.push_back(member);",
        "if (!entry.present.has(member)) ready.joined.push_back(member > 0 ? member - 1 : 0);",
    ),
    Mutant("batches mix different joined members", ARBITER, "if (ready.joined != ready_to_run_[0].joined) break;", ";"),
    Mutant(
        "a joined root sends nothing", MATCH, "members[member] == first.root && requests[member] == nullptr", "false"
    ),
    # Errors
    Mutant(
        "late members do not hear of a failure",
        ARBITER,
        "undelivered_.Add(entry.name, member, failure);",
        ";",
    ),
    Mutant(
        "the refusing member is told of its own refusal",
        ARBITER,
        "entry.refused != member && !joined_.has(member)",
        "!joined_.has(member)",
    ),
    Mutant(
        "an error is not told to the coordinator's own rank",
        ARBITER,
        "  if (member == options_.me)\n    own_->Hear(frame, effects);\n  else\n"
        "    effects->push_back(effect::Send{member, std::move(frame)});",
        "if (member != options_.me) effects->push_back(effect::Send{member, std::move(frame)});",
    ),
    Mutant(
        "the newest failure is told first",
        UNDELIVERED,
        "*failure = std::move(found->second);",
        "*failure = members.back().second;",
    ),
    Mutant(
        "shapes may differ",
        MATCH,
        "ShapesText(r, Ragged(Find(r.operation)->layout))",
        "ShapesText(Request(), Ragged(Find(r.operation)->layout))",
    ),
    Mutant(
        "a mismatch lists only two groups",
        MATCH,
        "if (group == groups.size()) groups.emplace_back(text, std::vector<int>());",
        "if (group == groups.size()) { if (group == 2) group = 1; else groups.emplace_back(text, std::vector<int>()); }",
    ),
    Mutant(
        "ranks are named by their places",
        MATCH,
        "groups[group].second.push_back(members[member]);",
        "groups[group].second.push_back(static_cast<int>(member));",
    ),
    # The response cache
    Mutant("an unknown id is dropped", ARBITER, "      unknown->push_back(id);", ";"),
    Mutant(
        "an id stands for another request",
        NEGOTIATOR,
        "!cache_.Find(id)->IsOf(options_.me, options_.member_count(), request)",
        "false",
    ),
    Mutant(
        "what joined members left out is cached",
        ARBITER,
        "ready.joined.empty() && response.request.cacheable",
        "response.request.cacheable",
    ),
    Mutant(
        "a used entry is not touched",
        NEGOTIATOR,
        "if (agreed.cached) cache_.Touch(agreed.id);",
        "if (agreed.cached && options_.coordinates()) cache_.Touch(agreed.id);",
    ),
    Mutant("an id is given twice", ARBITER, "ready.agreed.id = next_id_++;", "ready.agreed.id = 1 + next_id_++ % 7;"),
    Mutant(
        "an evicted response is named by its id",
        ARBITER,
        "agreed.cached && cache_.Find(agreed.id) == nullptr",
        "false",
    ),
    Mutant(
        "nothing is cached",
        NEGOTIATOR,
        "if (!agreed.cached && agreed.id != ResponseCache::kNone) cache_.Insert(agreed.id, agreed.response);",
        ";",
    ),
    Mutant("rows of another member", REQUEST, "rows.data() + rows.size() / members * member", "rows.data()"),
    Mutant(
        "all are told of one member's exchange",
        ARBITER,
        "differs ? FrameFor(member, member_count(), frame) : frame",
        "frame",
    ),
    # Batches
    Mutant(
        "a finished batch frees no place",
        NEGOTIATOR,
        "if (arbiter_) arbiter_->BatchFinished();",
        "if (arbiter_ && ready_frames_ % 5 != 0) arbiter_->BatchFinished();",
    ),
    Mutant(
        "any number of batches is under way",
        ARBITER,
        "!ready_to_run_.empty() && batches_under_way_ < kMaxBatches",
        "!ready_to_run_.empty()",
    ),
    Mutant(
        "a batch grows beyond the threshold", FUSION, "bytes + ready[next]->request.bytes() > threshold_bytes", "false"
    ),
    Mutant("sum and maximum share a batch", FUSION, "one.request.name != other.request.name", "false"),
    Mutant("averages of other weights share a batch", FUSION, "one.name##s != other.name##s", "false"),
    Mutant(
        "the last member hears of no batch",
        ARBITER,
        "member != options_.me",
        "member != options_.me && (next_id_ % 3 != 0 || member + 1 < member_count())",
    ),
    # Stalls
    Mutant(
        "a stall is never given up",
        STALLS,
        "abort_ == kNever ? kNever : std::max(clock.since, BusyUntil(missing)) + abort_",
        "kNever",
    ),
    Mutant(
        "stall reports do not get rarer",
        STALLS,
        "while (clock->since + clock->patience <= now) clock->patience *= 2;",
        ";",
    ),
    Mutant(
        "a stall names the wrong ranks",
        ARBITER,
        "if (IsMissing(entry, member)) ranks.push_back(options_.members[member]);",
        "if (IsMissing(entry, member)) ranks.push_back(member);",
    ),
    Mutant(
        "the coordinator sets no timer",
        NEGOTIATOR,
        "return arbiter_ ? arbiter_->next_timer() : kNever;",
        "return kNever;",
    ),
    Mutant("process sets share an id", ARBITER, "next_process_set_++", "1 + next_process_set_++ % 2"),
    # Long phases
    Mutant(
        "a long phase is not told to the coordinator",
        NEGOTIATOR,
        "  frame.milliseconds = static_cast<uint64_t>(event.duration / kMillisecond);",
        ";",
    ),
    Mutant("a long phase puts no end off", STALLS, "until = std::max(until, busy.second)", "until = 1"),
    Mutant(
        "a long phase keeps no report back",
        STALLS,
        "std::max(clock.warn_at, busy_until + warning_)",
        "clock.warn_at",
    ),
    # Who lives
    Mutant("silence is no death", LIVENESS, "now - peer->changed < bound", "true"),
    Mutant("half of the bound is enough", LIVENESS, "dead_after_seconds * 1e9", "dead_after_seconds * 0.5e9"),
    Mutant("a process that has ended is not noticed", LIVENESS, "peer.local && seen[peer.ranks[0]].died()", "false"),
    Mutant("whoever left has died when it ends", LIVENESS, "ended && !left", "ended"),
    Mutant("whoever left is judged on", LIVENESS, "peer->local && seen[peer->ranks[0]].left", "false"),
    Mutant("a new sign of life is not noted", LIVENESS, "sign != peer->sign", "false"),
    Mutant("whoever was stopped judges at once", LIVENESS, "if (!listened(peer)) peer.changed = now;", ";"),
    Mutant(
        "hosts are listened to in one direction of the ring only",
        LIVENESS,
        "world.hosts[(mine + hosts - distance) % hosts]",
        "world.hosts[(mine + distance) % hosts]",
    ),
    Mutant("a host is named by its first rank alone", LIVENESS, "RanksText(ranks)", "RanksText({ranks[0]})"),
    Mutant("idle ranks sleep too long", LIVENESS, "now + period_", "now + 40 * period_"),
    Mutant("a host that left is judged on", LIVENESS, "peer.ranks[0] == rank", "false"),
    Mutant("no host beats for the others", PROTOCOL, "  SendBeats(false, effects);", ";"),
    Mutant("nobody beats within a host", PROTOCOL, "  effects->push_back(rank_effect::Beat{});", ";"),
    # Lost connections
    Mutant("a lost connection is no death", PROTOCOL, "  HearEnd(liveness_.ConnectionLost(lost), effects);", ";"),
    Mutant("whoever said that it leaves is lost", PROTOCOL, "left_.count(lost.rank) > 0", "false"),
    Mutant("a host that says that it leaves is lost", PROTOCOL, "      left_.insert(from);", ";"),
    Mutant("a lost connection is named by this rank", LIVENESS, "Subject({lost.rank})", "Subject({world_.rank})"),
    # The end
    Mutant(
        "other hosts hear of no end",
        PROTOCOL,
        "    effects->push_back(rank_effect::Send{rank, std::move(abort)});",
        ";",
    ),
    Mutant(
        "an end that is heard of ends nothing",
        PROTOCOL,
        "return HearEnd(Status::PeerLost(frame.text), effects);",
        "return;",
    ),
    Mutant("an end overtakes what was decided before", PROTOCOL, "!hears_", "true"),
    Mutant(
        "last words of a dead coordinator are waited for",
        PROTOCOL,
        "now >= end_by_ || !memberships_.AwaitsVerdict(silent_)",
        "!memberships_.AwaitsVerdict(silent_)",
    ),
    Mutant("one goodbye is enough", PROTOCOL, "goodbyes_.size() == everyone().size()", "true"),
    Mutant(
        "only the lowest rank hears goodbyes",
        MEMBERSHIPS,
        "    concerned.insert(ranks[0]);",
        "    if (entry.first == 0) concerned.insert(ranks[0]);",
    ),
    Mutant("whoever gives up waiting goes on beating", PROTOCOL, "  SendBeats(true, effects);", ";"),
    # Schedules
    Mutant(
        "one promise is enough",
        PROMISES,
        "*std::min_element(counters_.begin(), counters_.end())",
        "*std::max_element(counters_.begin(), counters_.end())",
    ),
    Mutant(
        "other hosts need not promise",
        PROMISES,
        "for (const Neighbour& neighbour : neighbours_) agreed = std::min(agreed, Theirs(neighbour));",
        ";",
    ),
    Mutant(
        "a promise for another schedule counts",
        PROMISES,
        "sign.schedule != schedule_ || sign.promised <= counters_[place]",
        "sign.promised <= counters_[place]",
    ),
    Mutant(
        "another host's promise for another schedule counts",
        PROMISES,
        "neighbour.schedule == schedule_ ? neighbour.theirs : 0",
        "neighbour.theirs",
    ),
    Mutant(
        "a host is told of one other host alone",
        PROMISES,
        "if (other.member != told.member) count = std::min(count, Theirs(other));",
        ";",
    ),
    Mutant(
        "a member promises after it has said what it promised",
        SCHEDULE,
        "!frozen_ && promised_ < started_ + cycle_.size()",
        "promised_ < started_ + cycle_.size()",
    ),
    Mutant("a batch is ready for ever", SCHEDULE, "  ready_[place] = 0;", ";"),
    Mutant(
        "what is no part of a schedule is taken for it",
        SCHEDULE,
        "  if (found == place_of_.end()) return false;",
        "  if (found == place_of_.end()) return true;",
    ),
    Mutant(
        "what cannot be promised waits for ever",
        SCHEDULE,
        "unpromised_ > 0 ? unpromised_since_ + kStuck : kNever",
        "kNever",
    ),
    Mutant(
        "promised batches are not run at the end",
        SCHEDULED,
        "while (schedule_->started() < frame.count) StartScheduled(now, effects);",
        ";",
    ),
    Mutant(
        "what lies beyond the end is forgotten",
        SCHEDULED,
        "for (const std::string& name : NamesOfMine()) AddToReady(&mine_[name]);",
        ";",
    ),
    Mutant(
        "the coordinator's promise says where the end is",
        SCHEDULED,
        "    least = std::min(least, *each);",
        "least = *halted_[0];",
    ),
    Mutant("the end waits for nobody", SCHEDULED, "    if (!each) return;", "if (!each) continue;"),
    Mutant(
        "a schedule begins without what waits",
        SCHEDULED,
        "for (const std::string& name : NamesOfMine()) TakeIntoSchedule(now, mine_[name], effects);",
        ";",
    ),
    Mutant("what was announced before a schedule counts", NEGOTIATOR, "IsStale(ready.schedule)", "false"),
    Mutant("a goodbye overtakes what comes back from a schedule", SCHEDULED, "  ++ready_.resent;", ";"),
    Mutant(
        "a refusal ends no schedule",
        NEGOTIATOR,
        "  refused_in_ = ready_frames_ + 1;\n  if (schedule_) Deviate(now, effects);",
        "  refused_in_ = ready_frames_ + 1;",
    ),
    # Process sets
    Mutant(
        "frames that come before their set are lost",
        PROTOCOL,
        "    early_frames_[process_set].emplace_back(from, std::move(frame));",
        ";",
    ),
]
AWAKE = "::ringtrain::simulation::awake_mutant == {number}"


def sources(mutants: list[Mutant]) -> list[str]:
    """The files that have mutants."""
    return sorted({mutant.file for mutant in mutants})


def mutated(mutants: list[Mutant], file: str, text: str) -> str:
    """The text of a source with all its mutants in it.

    Raises ValueError if a mutant's piece does not occur exactly once, or overlaps another's: the source has changed.
    So it does for half of a statement, which a switch cannot hold.
    """
    pieces = []
    for number, mutant in enumerate(mutants):
        if mutant.file != file:
            continue
        if text.count(mutant.original) != 1:
            raise ValueError(
                f"mutant '{mutant.name}': expected this once in {file}, but found it {text.count(mutant.original)} times: "
                f"{mutant.original!r}. Adapt the table in tests/simulation to the source."
            )
        if not (is_whole(mutant.original) and is_whole(mutant.mutated)):
            raise ValueError(
                f"mutant '{mutant.name}' begins or ends within brackets: choose a whole expression or statement."
            )
        pieces.append((text.index(mutant.original), mutant, AWAKE.format(number=number)))
    end = 0
    parts = ['#include "mutants.h"\n']
    for start, mutant, awake in sorted(pieces):
        if start < end:
            raise ValueError(f"mutant '{mutant.name}' overlaps another in {file}. Choose other pieces.")
        parts += [text[end:start], switched(mutant, awake)]
        end = start + len(mutant.original)
    return "".join([*parts, text[end:]])


def is_whole(text: str) -> bool:
    """Whether each bracket that this C++ opens is closed in it."""
    rest = re.sub(r"[^][(){}]", "", text)
    while (closed := re.sub(r"\(\)|\[\]|\{\}", "", rest)) != rest:
        rest = closed
    return not rest


def switched(mutant: Mutant, awake: str) -> str:
    """The C++ that does one or the other."""
    if mutant.original.endswith(";"):
        return f"{{ if ({awake}) {{ {mutant.mutated} }} else {{ {mutant.original} }} }}"
    return f"({awake} ? ({mutant.mutated}) : ({mutant.original}))"


def names_source(mutants: list[Mutant]) -> str:
    """The C++ file that gives the executable the names."""
    names = "".join(f'    "{mutant.name}",\n' for mutant in mutants)
    return (
        '#include "mutants.h"\n\nnamespace ringtrain {\nnamespace simulation {\n\n'
        f"const std::vector<std::string> kMutants = {{\n{names}}};\nint awake_mutant = -1;\n\n"
        "}  // namespace simulation\n}  // namespace ringtrain\n"
    )


def write(mutants: list[Mutant], root: Path, folder: Path) -> list[Path]:
    """Writes the mutated copies and the names into a folder, leaving alone what has not changed, and returns their paths."""
    texts = {"mutant_names.cc": names_source(mutants)}
    for file in sources(mutants):
        texts["mutated_" + Path(file).name] = mutated(mutants, file, (root / file).read_text())
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        path = folder / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    return [folder / name for name in texts]
